"""The page of all keys says what the classes say."""

from pathlib import Path

from fairfold.algorithms import ALGORITHMS
from fairfold.methods import METHODS
from fairfold.settings.reference import MARK, page

PAGE = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    again = "python -m fairfold.settings.reference docs/settings.md"
    assert PAGE.partition(MARK)[2].strip() == page().strip(), f"write it anew: {again}"


def test_every_key_has_a_meaning() -> None:
    rows = [row for row in page().splitlines() if row.startswith("| `")]
    assert len(rows) > 80
    assert not [row for row in rows if row.rstrip("| ").count(" | ") < 3]


def test_every_kind_is_there() -> None:
    for kind in ALGORITHMS:
        assert f'`kind = "{kind.model_fields["kind"].default}"`' in page()
    for method in METHODS:
        assert f'`method = "{method.model_fields["method"].default}"`' in page()
