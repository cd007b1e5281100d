"""Where the real data is, and small files in the publishers' forms."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """The folder of a real data set; the test is skipped where it is not on this machine."""
    root = Path(os.environ.get("FAIRFOLD_DATA") or ROOT.parent / "shared" / "data")

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            pytest.skip(f"{name} is not in {root}; name the folder that holds it in FAIRFOLD_DATA")
        return root / name

    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test, and no data from outside by name."""
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"
