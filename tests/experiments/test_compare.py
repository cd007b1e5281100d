"""Comparison with the cells of the paper: the rule, the order, and the page that is made of it."""

from pathlib import Path

import pytest

from experiments.combine import pack_per_user
from experiments.compare import compared_cells, comparison_lines
from experiments.experiment import TableFile
from experiments.pages import COMPARED, Pages
from experiments.tables import Entry, ResultTable

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reproduction.md"


def entry(row: str, paper: float | str, values: tuple[float, ...] = (), **more: object) -> Entry:
    state = "done" if values else "N/A"
    return Entry(row, "FAIR", paper, **({"values": values, "rounds": (40.0,) * len(values), "state": state} | more))  # type: ignore[arg-type]


def compared(*entries: Entry, metric: str = "accuracy", deviation: float = 0.0) -> list[tuple[str, str]]:
    file = TableFile(title="t", metric=metric, deviation=deviation, why={"": "the split"})
    found = compared_cells([("t", ResultTable("t", file, entries, {}, (), ()))])
    return [(one.entry.row, one.words) for one in found]


def test_a_cell_agrees_within_two_spreads() -> None:
    spread = (0.69, 0.70, 0.71)  # a sample deviation of 0.01
    assert compared(entry("in", 0.719, spread)) == [("in", "agrees (−0.0190)")]
    assert compared(entry("out", 0.721, spread)) == [("out", "differs, worse by 0.0210: the split")]
    assert compared(entry("out", 0.679, spread)) == [("out", "differs, better by 0.0210: the split")]
    assert compared(entry("stated", 0.721, spread), deviation=0.03) == [("stated", "agrees (−0.0210)")]


def test_wide_spreads_do_not_make_a_cell_agree() -> None:
    """.25 ± .33 is within two spreads of any figure; one that is beyond them differs all the same."""
    assert compared(entry("failed", 0.7491, (0.0609, 0.06, 0.6243))) == [("failed", "too uncertain to say (−0.5007)")]
    narrow, wide = (0.662, 0.70, 0.738), (0.661, 0.70, 0.739)  # two spreads of 0.076 and 0.078
    assert compared(entry("narrow", 0.77, narrow)) == [("narrow", "agrees (−0.0700)")]
    assert compared(entry("wide", 0.77, wide)) == [("wide", "too uncertain to say (−0.0700)")]
    assert compared(entry("near", 0.71, wide), deviation=0.03) == [("near", "too uncertain to say (−0.0100)")]
    assert compared(entry("beyond", 0.8, wide))[0][1].startswith("differs, worse by 0.1000")
    cells = [entry("agrees", 0.7, (0.7, 0.7)), entry("wide", 0.77, wide), entry("better", 0.5, (0.7, 0.7))]
    assert [row for row, _ in compared(*cells)] == ["better", "wide", "agrees"]


def test_an_error_is_better_where_it_is_smaller() -> None:
    ours = (0.70, 0.70, 0.70)
    assert compared(entry("a", 0.6, ours), metric="MSE") == [("a", "differs, worse by 0.1000: the split")]
    assert compared(entry("a", 0.8, ours), metric="MSE") == [("a", "differs, better by 0.1000: the split")]


def test_one_seed_is_judged_by_its_images() -> None:
    right = pack_per_user([1.0] * 280 + [0.0] * 120)  # a standard error of 0.023
    assert compared(entry("in", 0.74, (0.7,), by_user=(right,))) == [("in", "agrees (−0.0400)")]
    assert compared(entry("out", 0.80, (0.7,), by_user=(right,)))[0][1].startswith("differs, worse by 0.1000")


def test_what_cannot_be_run_and_what_was_not() -> None:
    assert compared(entry("both", "N/A")) == [("both", "agrees: cannot be run")]
    assert compared(entry("here", 0.7)) == [("here", "differs: cannot be run here")]
    assert compared(entry("there", "N/A", (0.7,))) == [("there", "differs: the paper could not run it")]
    assert compared(entry("none", 0.7, state="no data")) == [("none", "not run")]


def test_the_worst_stands_first() -> None:
    same = (0.7, 0.7, 0.7)
    cells = [entry("agrees", 0.7, same), entry("better", 0.5, same), entry("bad", 0.8, same), entry("worst", 0.9, same)]
    assert [row for row, _ in compared(*cells)] == ["worst", "bad", "better", "agrees"]


def test_the_page_has_two_pages_and_every_cell_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    (table,) = COMPARED.finditer(text)
    lines = [line for line in table[0].splitlines() if line.startswith("| ")][1:]
    pages = Pages(ROOT / "experiments" / "results", ROOT)
    names = [name.strip() for name in table["tables"].split(",")]
    cells = [
        (name, f"{one.row} {one.column}")
        for name in names
        for one in pages.result_table(*name.split("/", 1)).entries
        if one.paper is not None
    ]
    shown = [line.strip("| ").split(" | ")[:2] for line in lines]
    parts = [(table, *cell.rsplit(" ", 1)) for table, cell in shown]  # rows, with commas between them, and a column
    assert sorted((table, f"{row} {column}") for table, rows, column in parts for row in rows.split(", ")) == sorted(
        cells
    )


def test_cells_that_nobody_can_run_share_a_line() -> None:
    file = TableFile(title="t", metric="accuracy", deviation=0.0)
    entries = (entry("1x", "N/A"), entry("2x", 0.8, (0.7,)), entry("4x", "N/A"), entry("8x", "N/A"))
    lines = comparison_lines(compared_cells([("t", ResultTable("t", file, entries, {}, (), ()))]))
    assert [line[:2] for line in lines] == [("t", "2x FAIR"), ("t", "1x, 4x, 8x FAIR")]


def test_a_page_that_names_no_table_is_refused() -> None:
    from fairfold.errors import InvalidData

    with pytest.raises(InvalidData, match="goodread"):
        Pages(ROOT / "experiments" / "results", ROOT).made("<!-- compared: ranking/goodread -->\n<!-- end -->")
