"""How much of the package a reader has to know to follow ``fit`` and ``recommend``."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fairfold
from tests.estimator.test_fit import rows

PACKAGE = Path(fairfold.__file__).parent
MAX_FILES = 52


def files_called(action: Any) -> set[str]:
    """Files of the package of which a function is called; modules are loaded before."""
    action()
    codes: set[Any] = set()

    def profile(frame: FrameType, _event: str, _argument: Any) -> None:
        codes.add(frame.f_code)

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    paths = [Path(code.co_filename) for code in codes if code.co_filename.startswith(str(PACKAGE))]
    return {str(path.relative_to(PACKAGE)) for path in paths}


@pytest.mark.parametrize("method", [None, "fair"])
def test_fit_and_recommend_run_through_few_files(method: str | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    rows().write_csv(path)

    def fit_and_recommend() -> None:
        model = fairfold.fit(path, "1x-4x", method=method, rounds=2, progress=False)
        assert len(model.recommend(7, k=5)) == 5

    found = files_called(fit_and_recommend)
    assert len(found) <= MAX_FILES, "\n".join(sorted(found))
