"""The page of all keys says what the classes say."""

from docs.settings_page import MARK, PAGE, page
from fairfold.algorithms import ALGORITHMS
from fairfold.methods import METHODS


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2].strip() == page().strip(), (
        "write it anew: python docs/settings_page.py"
    )


def test_every_key_has_a_meaning() -> None:
    rows = [row for row in page().splitlines() if row.startswith("| `")]
    assert len(rows) > 80
    assert not [row for row in rows if row.rstrip("| ").count(" | ") < 3]


def test_every_kind_is_there() -> None:
    for kind in ALGORITHMS:
        assert f'`kind = "{kind.model_fields["kind"].default}"`' in page()
    for method in METHODS:
        assert f'`method = "{method.model_fields["method"].default}"`' in page()
