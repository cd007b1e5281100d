"""Pages state what records hold: tables are those that are made from records, and no other figure is without one."""

from pathlib import Path

import pytest

from fairfold.errors import InvalidData
from fairfold.reproduce.experiment import known_experiments, read_experiment
from fairfold.reproduce.kinds import KINDS
from fairfold.reproduce.pages import MADE, PART, Held, Pages, parts
from fairfold.reproduce.records import Records, fingerprint

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
TIED = [path for path in sorted((ROOT / "docs").glob("*.md")) if PART.search(path.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def pages() -> Pages:
    return Pages(RESULTS, ROOT)


def test_pages_about_experiments_are_tied_to_records() -> None:
    names = {path.stem for path in TIED}
    assert {"beyond-evidence", "beyond-derivation", "fedrec", "reproduction"} <= names


@pytest.mark.parametrize("path", TIED, ids=lambda path: path.stem)
def test_a_page_states_what_records_hold(path: Path, pages: Pages) -> None:
    text = path.read_text(encoding="utf-8")
    assert pages.made(text) == text, "run: fairfold reproduce all --show --out experiments/results --pages docs"
    assert pages.unheld(text) == []


def test_a_figure_that_no_record_holds_is_found(pages: Pages) -> None:
    entry = next(entry for entry in pages.grid("beyond", "ratings-goodreads").entries if entry.column == "paper")
    assert entry.mean is not None
    text = f"<!-- figures: beyond/ratings-goodreads -->\n| {entry.row} | {{:.4f}} |\n"
    assert pages.unheld(text.format(entry.mean)) == []
    (wrong,) = pages.unheld(text.format(entry.mean + 0.3))
    assert wrong.startswith(f"{entry.mean + 0.3:.4f} in: | {entry.row}")
    assert pages.unheld("Nobody says where 0.468 comes from.") == ["0.468 in: Nobody says where 0.468 comes from."]
    assert pages.unheld("<!-- figures: none: told -->\nNobody says where 0.468 comes from.") == []
    ended = "<!-- figures: none: told -->\n0.468\n## Another part\n0.468"
    assert len(pages.unheld(ended)) == 1
    with pytest.raises(InvalidData, match="beyondd"):
        pages.unheld("<!-- figures: beyondd -->\n0.468")


def test_a_line_of_a_table_is_about_its_row() -> None:
    held = Held([0.25, 0.5, 0.75], {"one": [0.25], "two": [0.5]}, [0.125])
    assert held.has("0.250", "one", False)
    assert not held.has("0.500", "one", False)
    assert held.has("0.500", "another", False)
    assert held.has("0.75", None, False)
    assert not held.has("0.125", None, False)
    assert held.has("0.125", None, True)


def test_parts_end_with_the_next_heading() -> None:
    found = list(parts("a\n<!-- figures: x/y,\nz -->\nb\n## c\nd"))
    assert [(sources, part.strip()) for sources, part in found] == [(None, "a"), ("x/y, z", "b"), (None, "d")]


def test_a_table_is_made_from_records(pages: Pages) -> None:
    text = "<!-- made: beyond/ratings-goodreads [rows shared by chance; paper] -->\nold\n<!-- end -->"
    made = pages.made(text)
    assert MADE.fullmatch(made)
    for entry in pages.grid("beyond", "ratings-goodreads").entries:
        assert entry.column == "best" or f"{entry.mean:.4f}" in made
    assert pages.made(made) == made


@pytest.mark.parametrize("name", known_experiments())
def test_kept_cells_are_of_the_settings_of_today(name: str) -> None:
    """Or `--show` would not show them: settings that came later must leave old cells what they are."""
    records, cells = Records(RESULTS / name), read_experiment(name).cells
    assert records.damaged == []
    assert set(records.by_label) <= {cell.label for cell in cells}  # none of a table that is gone
    for cell in cells:
        kept = records.by_label.get(cell.label)
        if kept is not None:
            kind, data = KINDS[cell.kind], kept["outcome"]["data"]
            ways = [cell.values, *kind.earlier(cell.values)]
            marks = [fingerprint(cell.kind, kind.meaning(values), cell.seed, data) for values in ways]
            assert kept["fingerprint"] in marks, cell.label
