"""Output of results: Markdown, CSV, PNG, a self-contained HTML page, and paired comparisons."""

import base64
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy
from rich.markup import escape
from rich.table import Table

from experiments.combine import Difference, PerUser, intervals, mean_over_seeds
from experiments.experiment import Experiment
from experiments.tables import (
    COLUMNS,
    SIZE_COLUMNS,
    BySeed,
    ResultTable,
    View,
    cross_table,
    detail_row,
    format_figure,
    size_rows,
    sizes,
    views,
)
from fairfold import __version__
from fairfold.atomic_io import write_atomically
from fairfold.cli.console import make_table
from fairfold.runs.report import fill_template
from fairfold.runs.units import human_seconds

QUICK = (
    "Quick version: fewer rounds and seeds. It shows that everything runs; it says nothing about the paper's figures."
)


@dataclass(frozen=True)
class Results:
    """An experiment with its tables; once written, their SVG plots by table and file."""

    experiment: Experiment
    result_tables: list[ResultTable]
    plots: dict[str, dict[str, bytes]] = field(default_factory=dict)


def write_results(results: Results, out: Path) -> list[Path]:
    """Write all files of an experiment to its folder; returns them, Markdown first and the page last."""
    from experiments.figures import figures
    from fairfold.runs.plots import render_figure

    place, written = out / results.experiment.folder, []
    for result_table in results.result_tables:
        results.plots[result_table.name] = {}
        for name, figure in figures(result_table).items():
            file = f"{result_table.name}-{name}.png"
            write_atomically(place / file, render_figure(figure, "png"))
            results.plots[result_table.name][file] = render_figure(figure, "svg")
            written.append(place / file)
    texts = {
        "results.md": render_page([results], "results.md"),
        "results.csv": _csv(results, [*COLUMNS, "values", "machine"], _cell_lines),
        "sizes.csv": _csv(results, list(SIZE_COLUMNS), _size_lines),
        "results.html": render_page([results]),
    }
    for name, text in texts.items():
        write_atomically(place / name, text.encode())
    *first, page = (place / name for name in texts)
    return [*first, *written, page]


def _about_run(result_table: ResultTable) -> list[str]:
    """Lines about data, hardware and time of a table."""
    words = [f"Data: {'; '.join(result_table.data)}."] if result_table.data else []
    if result_table.machines:
        seconds = human_seconds(sum(sum(entry.seconds) for entry in result_table.entries))
        words.append(f"Hardware: {'; '.join(result_table.machines)}. All cells together: {seconds}.")
    return words


def sentence(tables: Sequence[ResultTable]) -> str:
    """What an experiment found, in words: how it stands beside the paper, where it is worse first; then the best."""
    sides = [(result_table, entry) for result_table in tables for entry in result_table.entries if entry.state != "–"]
    done = [(result_table, entry) for result_table, entry in sides if entry.state == "done"]
    if not done:
        return f"None of the {len(sides)} cells was run."
    better = [
        (-entry.difference if result_table.smaller_is_better else entry.difference, result_table, entry)
        for result_table, entry in done
        if entry.difference is not None
    ]
    lacking = sum(entry.state in ("no data", "not run") for _, entry in sides)
    words = [f"{lacking} of {len(sides)} cells were not run."] if lacking else []
    if better:
        worse = [gap for gap in better if gap[0] < 0]
        words.append(
            f"Of {len(better)} figures that the paper gives, ours are worse in {len(worse)} and at least as good in "
            f"{len(better) - len(worse)}."
        )
        if worse:
            gap, result_table, entry = min(worse, key=lambda each: each[0])
            place = f"{entry.row}, {entry.column}".strip(", ")
            words.append(f"The largest gap is {format_figure(abs(gap))} in {result_table.file.metric} ({place}).")
    else:
        result_table = done[0][0]
        own = [entry for one, entry in done if one is result_table]
        own = [entry for entry in own if entry.column == result_table.file.metric] or own  # others measure else
        best = (min if result_table.smaller_is_better else max)(own, key=lambda entry: entry.mean or 0.0)
        place = f"{best.row}, {best.column}".strip(", ")
        words.append(f"The best {result_table.file.metric} of the first table is {format_figure(best.mean)} ({place}).")
    return " ".join(words)


def _csv(results: Results, columns: list[str], lines: Callable[[ResultTable], Iterator[list[Any]]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["experiment", "quick", "table", "metric", *columns])
    for result_table in results.result_tables:
        shared = [results.experiment.name, results.experiment.quick, result_table.name, result_table.file.metric]
        writer.writerows([*shared, *line] for line in lines(result_table))
    return text.getvalue()


def _cell_lines(result_table: ResultTable) -> Iterator[list[Any]]:
    """One line per cell and per baseline."""
    for entry in result_table.entries:
        values, machine = " ".join(f"{value:.6g}" for value in entry.values), entry.facts.get("machine", "")
        yield [*detail_row(entry), values, machine]
    for name, value in result_table.baselines.items():
        yield ["baseline", name, "", format_figure(value), *[""] * (len(COLUMNS) - 4), "", ""]


def _size_lines(result_table: ResultTable) -> Iterator[list[Any]]:
    """One line per cell and device size: bytes as numbers, the own model as mean over the seeds."""
    for entry in result_table.entries:
        for size in sizes(entry):
            yield [entry.row, entry.column, *size]


def render_page(many: list[Results], template: str = "page.html") -> str:
    """Render an HTML page with embedded plots; or Markdown with plots beside it."""
    return fill_template(
        "experiments",
        f"templates/{template}",
        title="The paper's tables, run again" if len(many) > 1 else many[0].experiment.file.title,
        experiments=[_for_page(results) for results in many],
        columns=COLUMNS,
        size_columns=SIZE_COLUMNS,
        quick=QUICK,
        version=__version__,
    )


def _for_page(results: Results) -> dict[str, Any]:
    tables = []
    for result_table in results.result_tables:
        heading, rows = cross_table(result_table)
        drawn = [
            (name, base64.b64encode(content).decode()) for name, content in results.plots[result_table.name].items()
        ]
        baselines = [(name, format_figure(value)) for name, value in result_table.baselines.items()]
        tables.append(
            {
                "file": result_table.file, "heading": heading, "rows": rows, "baselines": baselines, "plots": drawn,
                "details": list(map(detail_row, result_table.entries)), "about": _about_run(result_table),
                "sizes": size_rows(result_table), "views": [*views(result_table), *paired_views(result_table)],
            }
        )  # fmt: skip
    experiment = results.experiment
    summary = sentence(results.result_tables)
    return {
        "name": experiment.name,
        "file": experiment.file,
        "quick": experiment.quick,
        "tables": tables,
        "sentence": summary,
    }


# -- paired comparisons: a table names in ``against`` what its rows are compared with, user by user --------------------
# That is a row, a column or a baseline; ``TABLE/ROW`` is a row of another table of the experiment, ``TABLE/*`` the one
# that has the same name there, and ``TABLE/*/COLUMN`` another column of it.

SAME = "*"
ABOUT = "What it gives more than {}, mean and 95 % interval, paired over {}"


def paired_views(result_table: ResultTable) -> list[View]:
    """Cross tables of paired differences, one per comparison; none where values by user are missing."""
    found = []
    for name, apart in paired_differences(result_table):
        texts = {place: str(one) for place, one in apart.items()}
        heading, rows = cross_table(result_table, lambda entry, texts=texts: texts.get((entry.row, entry.column), ""))  # type: ignore[misc]
        rows = [row for row in rows if any(row[1:])]
        columns = [at for at in range(len(heading)) if at == 0 or any(row[at] for row in rows)]
        cut = [[line[at] for at in columns] for line in (heading, *rows)]
        over = "test images" if result_table.file.metric == "accuracy" else "users"
        table, *there = name.split("/")
        beside = " of ".join([*there[1:], f"the same row of {table}"]) if there[:1] == [SAME] else name
        found.append(View(ABOUT.format(beside, over), cut[0], cut[1:]))
    return found


def paired_differences(result_table: ResultTable) -> Iterator[tuple[str, dict[tuple[str, str], Difference]]]:
    """Paired differences of every cell to a named one, by row and column."""
    known, mean = result_table.by_user, cache(mean_over_seeds)  # a cell is unpacked once, however often it is compared
    apart: dict[int, dict[tuple[str, tuple[str, str]], PerUser]] = {}  # by how many users: these share their draws
    for name in result_table.file.against:
        for place, mine in known.items():
            pair = [mine, _other(result_table, known, name, place)]
            if result_table.file.splits or len(pair[1]) > 1:  # of what both have; a reference of one split has no seeds
                both = [seed for seed in pair[0] if seed in pair[1]]
                pair = [{seed: of[seed] for seed in both} for of in pair]
            if all(pair):
                each, beside = (mean(tuple(of.values())) for of in pair)
                if len(each) == len(beside):
                    apart.setdefault(len(each), {})[name, place] = each - beside
    found = dict[str, dict[tuple[str, str], Difference]]()
    for pairs in apart.values():
        for (name, place), difference in zip(pairs, intervals(numpy.stack(list(pairs.values()))), strict=True):
            found.setdefault(name, {})[place] = difference
    yield from ((name, found[name]) for name in result_table.file.against if name in found)


def _other(
    result_table: ResultTable, known: dict[tuple[str, str], BySeed], name: str, place: tuple[str, str]
) -> BySeed:
    row, column = place
    table, *there = name.split("/")
    if there and table in result_table.others:
        return result_table.others[table].get((row if there[0] == SAME else there[0], [*there, column][1]), {})
    if name == row or (name == column and not result_table.file.measures):
        return {}
    if (name, column) in known or (row, name) in known:
        return known.get((name, column)) or known[row, name]
    if (
        len(alone := [given for (_, other), given in known.items() if other == name]) == 1
        and not result_table.file.measures
    ):
        return alone[0]  # a column with one cell, e.g. FedAvg, which has no sizes
    found = result_table.baselines_by_user.items()  # named without what was chosen for them
    return next((texts for reference, texts in found if reference.split(" (")[0] == name), {})


# -- tables for the terminal -------------------------------------------------------------------------------------------


def terminal_tables(result_table: ResultTable) -> list[Table]:
    """Tables of results for the terminal: quality, baselines, costs by size and paired differences."""
    brackets = ", the paper's in brackets" if result_table.file.paper else ""
    tables = [_table(f"{result_table.file.title}: {result_table.file.metric}{brackets}", *cross_table(result_table))]
    if result_table.baselines:  # apart: in the table above they would stand in some method's column
        known = [[name, format_figure(value)] for name, value in result_table.baselines.items()]
        tables.append(_table("", ["without federation", result_table.file.metric], known))
    for view in [*views(result_table), *paired_views(result_table)]:
        rows = [[cell.replace(", ", "\n") for cell in row] for row in view.rows]
        tables.append(_table(view.about, view.heading, rows))
    return tables


def _table(title: str, heading: list[str], rows: list[list[str]]) -> Table:
    first, *others = map(escape, heading)
    table = make_table([first], others, title=escape(title) or None, title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
