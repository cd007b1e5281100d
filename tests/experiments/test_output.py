"""Tables beside the paper's figures: means, spreads, differences, and the files they are written to."""

import csv
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from experiments.execute import execute_all
from experiments.experiment import Cell, read_experiment
from experiments.figures import figures
from experiments.kinds import KINDS
from experiments.output import QUICK, Results, sentence, write_results
from experiments.records import TRIALS, Outcome, Records, fingerprint
from experiments.search import search
from experiments.tables import COLUMNS, Entry, ResultTable, cross_table, detail_row, result_tables, size_rows, views
from fairfold.errors import InvalidSettings
from fairfold.runs.plots import baseline_line, merge_labels
from tests.support.experiments import SMALL, write


def outcome(values: list[float], **others: object) -> Outcome:
    curve = [(float(10 * (number + 1)), value) for number, value in enumerate(values)]
    return Outcome.of_curve(curve, "NDCG@20", seconds=2.0, **others)


def entry_of(grid: ResultTable, row: str, column: str) -> Entry:
    return next(entry for entry in grid.entries if (entry.row, entry.column) == (row, column))


def made_up(tmp_path: Path) -> Results:
    experiment = read_experiment(write(tmp_path))
    found: dict[Cell, Outcome] = {}
    for cell in experiment.cells:
        if cell.kind == "baselines":
            found[cell] = Outcome(facts={"baselines": {"popularity": 0.2, "ridge": "not computed: too large"}})
        elif cell.column == "HeteroFL":
            found[cell] = Outcome("N/A", "too small | by far")
        else:
            found[cell] = outcome([0.1, 0.24 + 0.02 * cell.seed, 0.2], facts={"machine": "a machine"})
    return Results(experiment, result_tables(experiment, found))


def test_means_spreads_and_differences(tmp_path: Path) -> None:
    (grid,) = made_up(tmp_path).result_tables
    fair = entry_of(grid, "1x-16x", "FAIR")
    assert fair.mean == pytest.approx(0.25)
    assert fair.spread == pytest.approx(0.02 / 2**0.5)
    assert list(fair.rounds) == [20, 20]
    assert fair.difference == pytest.approx(0.0)
    heading, rows = cross_table(grid)
    assert heading == ["", "FedAvg", "FAIR", "HeteroFL"]
    assert rows == [["1x", "0.2500 ± 0.0141", "", ""], ["1x-16x", "", "0.2500 ± 0.0141 (0.2500)", "N/A (N/A)"]]
    by_name = dict(zip(COLUMNS, detail_row(grid.entries[1]), strict=True))
    assert (by_name["round"], by_name["at the end"], by_name["seconds"]) == ("20", "0.2000", "2.0")
    refused = dict(zip(COLUMNS, detail_row(grid.entries[2]), strict=True))
    assert (refused["ours"], refused["note"]) == ("N/A", "too small | by far")


def test_the_last_round_counts_where_the_table_says_so(tmp_path: Path) -> None:
    text = SMALL.replace('metric = "NDCG@20"', 'metric = "NDCG@20"\nvalue = "last"')
    experiment = read_experiment(write(tmp_path, text), seeds=1)
    found = {cell: outcome([0.1, 0.3, 0.2]) for cell in experiment.cells if cell.kind == "federated"}
    fair = entry_of(result_tables(experiment, found)[0], "1x-16x", "FAIR")
    assert (fair.mean, fair.rounds) == (0.2, (30,))
    assert fair.spread is None  # one seed has none


def devices(seed: int, moved: dict[str, int]) -> dict[str, dict[str, float]]:
    """Of a cell with two sizes, the smaller one's model for all users known of the first seed alone."""
    small = {"users": 7, "numbers held": 25, "quality": 0.1 + 0.2 * seed} | ({} if seed else {"everybody": 0.15})
    return {"1x": {"users": 5, "numbers held": 4000, "quality": 0.5, "everybody": 0.4} | moved, "16x": small}


def with_devices(tmp_path: Path, text: str = SMALL, moved: dict[str, int] | None = None) -> Results:
    experiment, costs = read_experiment(write(tmp_path, text), seeds=2), {"bytes a round": 2.5e6}
    found = {
        cell: outcome([0.3], facts=costs | {
            "devices": devices(cell.seed, moved or {}), "seconds a round": 0.5 - cell.seed / 4,
        })
        for cell in experiment.cells
        if cell.kind == "federated"
    }  # fmt: skip
    return Results(experiment, result_tables(experiment, found))


def test_what_devices_reach_is_a_mean_over_the_seeds(tmp_path: Path) -> None:
    (grid,) = with_devices(tmp_path).result_tables
    cost, own = views(grid)
    assert cost.heading == own.heading == cross_table(grid)[0]
    assert cost.rows[1] == ["1x-16x", "", *["0.25 s, 2.5 MB, 100 B–16 kB"] * 2]
    assert own.rows[1] == ["1x-16x", "", *["0.200–0.500 (0.150–0.400)"] * 2]
    by_name = dict(zip(COLUMNS, detail_row(grid.entries[1]), strict=True))
    assert (by_name["seconds per round"], by_name["bytes per round"], by_name["note"]) == ("0.2500", "2500000", "")


def test_measured_peaks_are_means_over_the_seeds_with_their_spread(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path))
    found = {}
    for cell in experiment.cells:
        if cell.kind == "federated" and cell.column != "HeteroFL":
            peaks = {"8x": {"numbers held": 1000, "measured peak bytes": 16_000_000 + 2_000_000 * cell.seed}}
            peaks["64x"] = {"numbers held": 10, "measured peak bytes": -40_000}
            found[cell] = outcome([0.1], facts={"devices": peaks})
    (grid,) = result_tables(experiment, found)
    note = dict(zip(COLUMNS, detail_row(grid.entries[0]), strict=True))["note"]
    assert note == "8x: 1,000 numbers, peak 17 MB ± 1.41 MB; 64x: 10 numbers, peak 0 B ± 0 B"


def test_every_size_has_a_line(tmp_path: Path) -> None:
    results = with_devices(tmp_path, moved={"bytes down": 32_000, "bytes up": 8_000})
    (tmp_path / "small").mkdir()
    write_results(results, tmp_path)
    rows = list(csv.DictReader((tmp_path / "small" / "sizes.csv").read_text().splitlines()))
    lines = [tuple(row[name] for name in ("row", "size", "users", "holds", "receives", "sends")) for row in rows[2:4]]
    assert lines == [("1x-16x", "1x", "5", "16000", "32000", "8000"), ("1x-16x", "16x", "7", "100", "", "")]
    assert [row["for all users"] for row in rows[2:4]] == ["0.4", "0.15"]
    for name in ("results.md", "results.html"):
        text = (tmp_path / "small" / name).read_text()
        assert all(part in text for part in ("100 B–16 kB", "0.200–0.500 (0.150–0.400)", "32 kB", "for all users"))


def test_what_is_moved_is_not_guessed(tmp_path: Path) -> None:
    (grid,) = with_devices(tmp_path, moved={"bytes down": 32_000, "bytes up": 8_000}).result_tables
    rows = {(row[1], row[2]): row[5:7] for row in size_rows(grid)}
    assert rows["FAIR", "1x"] == ("32 kB", "8 kB")
    assert rows["FAIR", "16x"] == ("–", "–")


def test_curves_are_means_over_the_seeds(tmp_path: Path) -> None:
    fair = entry_of(made_up(tmp_path).result_tables[0], "1x-16x", "FAIR")
    across, up = zip(*fair.curve, strict=True)
    assert across == (10, 20, 30)
    assert up == pytest.approx((0.1, 0.25, 0.2))


def test_what_diverged_is_never_best() -> None:
    found = Outcome.of_curve([(1.0, float("nan")), (2.0, 0.5), (3.0, float("nan"))], "MSE")
    assert (found.best, found.best_round) == (0.5, 2)


def test_files(tmp_path: Path) -> None:
    results = made_up(tmp_path)
    (tmp_path / "small").mkdir()
    written = write_results(results, tmp_path)
    assert all(path.stat().st_size for path in written)
    assert {path.name for path in written} == {
        "results.md", "results.csv", "sizes.csv", "results.html", "one-compared.png", "one-curves.png",
    }  # fmt: skip
    text = written[0].read_text()
    assert "0.2500 ± 0.0141 (0.2500)" in text
    assert "too small \\| by far" in text
    assert "popularity | 0.2000" in text
    assert QUICK not in text
    rows = list(csv.DictReader((tmp_path / "small" / "results.csv").read_text().splitlines()))
    assert [row["ours"] for row in rows] == ["0.2500", "0.2500", "N/A", "0.2000", "not computed: too large"]
    page = written[-1].read_text()
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.count("data:image/svg+xml;base64,") == 2


def crossing(tmp_path: Path, rows: int, columns: int) -> ResultTable:
    """A table in which every cell has a curve of its own height."""
    (grid,) = result_tables(read_experiment(write(tmp_path)), {})
    entries = tuple(
        Entry(
            f"row {row}",
            f"column {column}",
            None,
            (0.5,),
            state="done",
            curve=((10.0, 0.1 * row), (20.0, column + 1.0)),
        )
        for row in range(rows)
        for column in range(columns)
    )
    return replace(grid, entries=entries, baselines={"popularity": 0.2})


@pytest.mark.parametrize(("rows", "columns", "titles"), [(3, 9, "row"), (9, 3, "column"), (1, 12, "row")])
def test_every_line_of_a_panel_looks_different(tmp_path: Path, rows: int, columns: int, titles: str) -> None:
    figure = figures(crossing(tmp_path, rows, columns))["curves"]
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == [f"{titles} {n}" for n in range(min(rows, columns))]
    for axes in panels:
        lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == max(rows, columns)
    assert len(figure.legends[0].get_texts()) == max(rows, columns)


def test_few_curves_share_one_plot(tmp_path: Path) -> None:
    (axes,) = figures(crossing(tmp_path, 2, 3))["curves"].axes
    assert axes.get_lines()[0].get_label() == "row 0 column 0"


def test_more_curves_than_can_be_distinguished_are_not_drawn(tmp_path: Path) -> None:
    assert set(figures(crossing(tmp_path, 2, 28))) == {"compared", "curves"}
    assert set(figures(crossing(tmp_path, 2, 29))) == {"compared"}
    assert set(figures(crossing(tmp_path, 17, 18))) == {"compared"}


def test_the_quick_version_is_marked_and_kept_apart(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path), quick=True)
    results = Results(experiment, result_tables(experiment, execute_all([experiment], tmp_path, 1)[0]))
    written = write_results(results, tmp_path)
    assert written[0].parent.name == "small-quick"
    for path in (written[0], written[-1]):
        assert QUICK.split(".")[0] in path.read_text()


def test_search_records_every_trial_and_marks_the_best(tmp_path: Path) -> None:
    experiment, messages = read_experiment(write(tmp_path), seeds=1), list[str]()
    path = search(experiment, tmp_path, messages.append, jobs=1)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["algorithm.local_lr"]) for row in rows] == [0.1, 0.001]
    (chosen,) = [row for row in rows if row["chosen"]]
    assert float(chosen["at the end"]) == max(float(row["at the end"]) for row in rows)
    records = tmp_path / "small" / "trials.csv"
    assert len(Records(tmp_path / "small", TRIALS).by_label) == 2
    kept = records.stat().st_mtime_ns
    search(experiment, tmp_path, messages.append)
    assert records.stat().st_mtime_ns == kept
    alone = path.read_text()
    search(experiment, tmp_path / "processes", messages.append, jobs=2)
    assert (tmp_path / "processes" / "small" / "search.csv").read_text() == alone


def test_trials_that_say_neither_code_nor_hardware_are_run_again_when_asked(tmp_path: Path) -> None:
    experiment, place = read_experiment(write(tmp_path), seeds=1), tmp_path / "small"
    search(experiment, tmp_path, list[str]().append, jobs=1)
    records = Records(place, TRIALS)
    first, second = (records.by_label[label] for label in sorted(records.by_label))
    assert all(record["outcome"]["facts"]["machine"] for record in (first, second))
    with_code = second | {"commit": "abc", "outcome": second["outcome"] | {"last": 0.123}}
    records.join([first | {"commit": None, "outcome": first["outcome"] | {"last": 0.456}}, with_code])
    for again, found in ((False, [0.456, 0.123]), (True, [first["outcome"]["last"], 0.123])):
        search(experiment, tmp_path, list[str]().append, jobs=1, again=again)
        kept = Records(place, TRIALS).by_label
        assert [kept[label]["outcome"]["last"] for label in sorted(kept)] == found


def test_search_tries_more_where_a_column_has_more_to_try(tmp_path: Path) -> None:
    cells = 'cells = [["one", "1x-16x", "FAIR"], ["one", "1x", "FedAvg"]]\n'
    more = cells + 'more = { FAIR = { "algorithm.weighting" = ["equal", "data"] } }'
    text = SMALL.replace('cells = [["one", "1x-16x", "FAIR"]]', more)
    path = search(read_experiment(write(tmp_path, text), seeds=1), tmp_path, list[str]().append, jobs=1)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    tried = [(row["column"], row["algorithm.local_lr"], row["algorithm.weighting"]) for row in rows]
    assert tried == [("FAIR", "0.1", "equal"), ("FAIR", "0.1", "data"),
                     ("FAIR", "0.001", "equal"), ("FAIR", "0.001", "data"),
                     ("FedAvg", "0.1", ""), ("FedAvg", "0.001", "")]  # fmt: skip
    assert [row["column"] for row in rows if row["chosen"]] == ["FAIR", "FedAvg"]
    misspelt = text.replace("more = { FAIR", "more = { FAIRER")
    with pytest.raises(InvalidSettings, match="FAIRER"):
        search(read_experiment(write(tmp_path, misspelt), seeds=1), tmp_path, list[str]().append, jobs=1)


def curves_of(tmp_path: Path, smaller: bool, ends: list[float]) -> tuple[tuple[float, float], str, list[float]]:
    """Limits and title of a plot of curves that go straight from 0.9 to an end, and all heights in it."""
    text = SMALL.replace('metric = "NDCG@20"', f'metric = "{"MSE" if smaller else "NDCG@20"}"')
    (grid,) = result_tables(read_experiment(write(tmp_path, text)), {})
    entries = tuple(
        Entry(f"{end:g}", "", None, (end,), state="done",
              curve=tuple((float(x), 0.9 + (end - 0.9) * x / 20) for x in range(21)))
        for end in ends
    )  # fmt: skip
    figure = figures(replace(grid, entries=entries, baselines={}))["curves"]
    (axes,) = figure.axes
    drawn = [float(y) for line in axes.get_lines() for y in np.asarray(line.get_ydata(), dtype=float)]
    return axes.get_ylim(), figure.get_suptitle(), drawn


@pytest.mark.parametrize("smaller", [False, True])
def test_curves_that_collapse_do_not_take_the_room_of_the_others(tmp_path: Path, smaller: bool) -> None:
    good = [0.91, 0.92, 0.93, 0.94, 0.95, 0.96] if not smaller else [0.89, 0.88, 0.87, 0.86, 0.85, 0.84]
    bad = 0.2 if not smaller else 1.8
    (low, high), title, drawn = curves_of(tmp_path, smaller, [*good, bad])
    assert high - low < 0.2
    assert all(low < end < high for end in good)
    assert not low < bad < high
    assert title == f"Not in the plot at the end: {bad:g} ({bad:.2f})"
    assert bad in [pytest.approx(y) for y in drawn]  # cut by the plot, not left out of it


def test_curves_that_differ_are_all_shown(tmp_path: Path) -> None:
    for ends in ([0.91, 0.2], [0.95, 0.8, 0.7, 0.6, 0.5, 0.4], [0.9, 0.9, 0.9, 0.9]):
        (low, high), title, _ = curves_of(tmp_path, False, ends)
        assert title == ""
        assert all(low < end < high for end in ends)


def test_a_curve_that_is_no_number_does_not_spoil_the_plot(tmp_path: Path) -> None:
    (low, high), _, _ = curves_of(tmp_path, False, [0.95, 0.94, 0.93, float("nan")])
    assert 0.8 < low < high < 1


def test_the_page_opens_with_what_was_found_and_folds_the_rest(tmp_path: Path) -> None:
    results = made_up(tmp_path)
    (tmp_path / "small").mkdir()
    write_results(results, tmp_path)
    page = (tmp_path / "small" / "results.html").read_text()
    expected = "Of 1 figures that the paper gives, ours are worse in 0 and at least as good in 1."
    assert sentence(results.result_tables) == expected
    assert page.index(expected) < page.index("<img") < page.index("<table")
    open_ones = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)
    assert open_ones.count("<table") == 1, "the table of results; every other is folded"
    (grid,) = results.result_tables
    worse = replace(entry_of(grid, "1x-16x", "FAIR"), paper=0.3)
    found = sentence([replace(grid, entries=(worse, *grid.entries[2:]))])
    assert (
        "ours are worse in 1 and at least as good in 0. The largest gap is 0.0500 in NDCG@20 (1x-16x, FAIR)." in found
    )


def test_kept_cells_are_found_by_what_their_settings_mean() -> None:
    """Tables of settings that came later leave fingerprints as they were."""
    kept = Path(__file__).parents[2] / "experiments" / "results" / "ranking"
    if not kept.exists():
        pytest.skip("no kept results here: they are of the repository, not of a source distribution")
    cells = {cell.label: cell for cell in read_experiment("ranking").cells}
    seen = 0
    for record in Records(kept).by_label.values():
        if record["kind"] == "federated" and (cell := cells.get(record["label"])) is not None:
            meant = KINDS["federated"].canonical(cell.values)
            assert fingerprint("federated", meant, cell.seed, record["outcome"]["data"]) == record["fingerprint"]
            seen += 1
    assert seen > 50


def test_a_reference_has_a_line_where_it_is_and_close_ones_share_a_short_name() -> None:
    known = {"EASE (penalty 3)": 0.41, "EASE, items of 10 users (penalty 9)": 0.47, "iALS of 5 items": 0.45}
    known |= {"popularity": 0.1}
    assert merge_labels(known, 0.1) == [("popularity", [0.1]), ("EASE,\niALS", [0.41, 0.45, 0.47])]
    axes = Figure().add_subplot()
    for name, values in merge_labels(known, 0.1):
        baseline_line(axes, "x", values, name)
    assert [np.asarray(line.get_xdata())[0] for line in axes.lines] == [0.1, 0.41, 0.45, 0.47]


@given(st.dictionaries(st.sampled_from("abcdefghij"), st.floats(0.0, 1.0), min_size=1))
def test_labels_of_lines_never_overlap_and_none_is_lost(known: dict[str, float]) -> None:
    """iALS stood on EASE and item-kNN, whose label has two lines."""
    line = 0.05
    found = [(name.split(",\n"), (values[0] + values[-1]) / 2) for name, values in merge_labels(known, line, line)]
    assert sorted(name for names, _ in found for name in names) == sorted(known)
    for (below, low), (above, high) in itertools.pairwise(found):
        assert high - low >= line * (len(below) + len(above)) / 2 - 1e-9
