"""Results as files: Markdown, CSV, PNG and one page that opens anywhere."""

import base64
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairfold.files import write_atomically
from fairfold.reproduce.compared import compared
from fairfold.reproduce.experiment import Experiment
from fairfold.reproduce.tables import (
    COLUMNS,
    SIZE_COLUMNS,
    Grid,
    crossed,
    detail,
    shown,
    size_rows,
    sizes,
    views,
)
from fairfold.runs.report import rendered_page
from fairfold.runs.units import human_seconds
from fairfold.version import __version__

QUICK = (
    "Quick version: fewer rounds and seeds. It shows that everything runs; it says nothing about the paper's figures."
)


@dataclass(frozen=True)
class Results:
    """An experiment and its tables; once written, their plots (SVG) by table and file."""

    experiment: Experiment
    grids: list[Grid]
    plots: dict[str, dict[str, bytes]] = field(default_factory=dict)


def write_results(results: Results, out: Path) -> list[Path]:
    """Write all files of an experiment to its folder; returns them, Markdown first and the page last."""
    from fairfold.reproduce.figures import figures
    from fairfold.runs.plots import rendered

    place, written = out / results.experiment.folder, []
    for grid in results.grids:
        results.plots[grid.name] = {}
        for name, figure in figures(grid).items():
            file = f"{grid.name}-{name}.png"
            write_atomically(place / file, rendered(figure, "png"))
            results.plots[grid.name][file] = rendered(figure, "svg")
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


def _about_run(grid: Grid) -> list[str]:
    """Data, hardware and time of a table."""
    words = [f"Data: {'; '.join(grid.data)}."] if grid.data else []
    if grid.machines:
        seconds = human_seconds(sum(sum(entry.seconds) for entry in grid.entries))
        words.append(f"Hardware: {'; '.join(grid.machines)}. All cells together: {seconds}.")
    return words


def sentence(tables: Sequence[Grid]) -> str:
    """What an experiment found, in words: how it stands beside the paper, where it is worse first; then the best."""
    sides = [(grid, entry) for grid in tables for entry in grid.entries if entry.state != "–"]
    done = [(grid, entry) for grid, entry in sides if entry.state == "done"]
    if not done:
        return f"None of the {len(sides)} cells was run."
    better = [
        (-entry.difference if grid.smaller_is_better else entry.difference, grid, entry)
        for grid, entry in done
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
            gap, grid, entry = min(worse, key=lambda each: each[0])
            place = f"{entry.row}, {entry.column}".strip(", ")
            words.append(f"The largest gap is {shown(abs(gap))} in {grid.file.metric} ({place}).")
    else:
        grid = done[0][0]
        own = [entry for one, entry in done if one is grid]
        own = [entry for entry in own if entry.column == grid.file.metric] or own  # others measure else
        best = (min if grid.smaller_is_better else max)(own, key=lambda entry: entry.mean or 0.0)
        place = f"{best.row}, {best.column}".strip(", ")
        words.append(f"The best {grid.file.metric} of the first table is {shown(best.mean)} ({place}).")
    return " ".join(words)


def _csv(results: Results, columns: list[str], lines: Callable[[Grid], Iterator[list[Any]]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["experiment", "quick", "table", "metric", *columns])
    for grid in results.grids:
        shared = [results.experiment.name, results.experiment.quick, grid.name, grid.file.metric]
        writer.writerows([*shared, *line] for line in lines(grid))
    return text.getvalue()


def _cell_lines(grid: Grid) -> Iterator[list[Any]]:
    """One line per cell, and one per reference row."""
    for entry in grid.entries:
        values, machine = " ".join(f"{value:.6g}" for value in entry.values), entry.facts.get("machine", "")
        yield [*detail(entry), values, machine]
    for name, value in grid.references.items():
        yield ["reference", name, "", shown(value), *[""] * (len(COLUMNS) - 4), "", ""]


def _size_lines(grid: Grid) -> Iterator[list[Any]]:
    """One line per cell and device size: bytes as numbers, the own model as mean over the seeds."""
    for entry in grid.entries:
        for size in sizes(entry):
            yield [entry.row, entry.column, *size]


def render_page(many: list[Results], template: str = "page.html") -> str:
    """One page without scripts, plots inside; or the same in Markdown, plots beside it."""
    return rendered_page(
        "fairfold.reproduce",
        template,
        title="The paper's tables, run again" if len(many) > 1 else many[0].experiment.file.title,
        experiments=[_for_page(results) for results in many],
        columns=COLUMNS,
        size_columns=SIZE_COLUMNS,
        quick=QUICK,
        version=__version__,
    )


def _for_page(results: Results) -> dict[str, Any]:
    tables = []
    for grid in results.grids:
        heading, rows = crossed(grid)
        drawn = [(name, base64.b64encode(content).decode()) for name, content in results.plots[grid.name].items()]
        tables.append(
            {
                "file": grid.file, "heading": heading, "rows": rows, "details": list(map(detail, grid.entries)),
                "references": [(name, shown(value)) for name, value in grid.references.items()],
                "plots": drawn, "about": _about_run(grid), "sizes": size_rows(grid),
                "views": [*views(grid), *compared(grid)],
            }
        )  # fmt: skip
    told = results.experiment
    said = sentence(results.grids)
    return {"name": told.name, "file": told.file, "quick": told.quick, "tables": tables, "sentence": said}
