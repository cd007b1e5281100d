"""One answer of every method attacked: what it tells, against what is known of it."""

import pytest

from fairfold.data.interactions import Dataset
from fairfold.errors import InvalidSettings
from fairfold.reproduce import overheard as module
from fairfold.reproduce.overheard import AUC, FOUND, OverheardSettings, overheard
from fairfold.reproduce.paired import unpacked
from tests.audit.small import people


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "newest_left_out", lambda _name: people())
