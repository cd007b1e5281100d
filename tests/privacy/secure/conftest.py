"""What takes long and is the same for all devices of one process is done once."""

from functools import lru_cache

import pytest

from fairfold.privacy.secure import keys


@pytest.fixture
def quick_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every signature once, and not once for each device: for many sums, in which it is not what is tested."""
    monkeypatch.setattr(keys, "verified", lru_cache(10_000)(keys.verified))
