"""Results as files: Markdown, CSV, PNG and one page that opens anywhere."""

import base64
import csv
import io
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fairfold.errors import InvalidSettings
from fairfold.files import write_atomically
from fairfold.reproduce import sizes
from fairfold.reproduce.experiment import Experiment
from fairfold.reproduce.tables import COLUMNS, Grid, crossed, detail_rows, shown, total_seconds
from fairfold.version import __version__

QUICK = (
    "Quick version: fewer rounds and seeds. It shows that everything runs; it says nothing about the paper's figures."
)


@dataclass(frozen=True)
class Results:
    """An experiment and its tables."""

    experiment: Experiment
    grids: list[Grid]


def require_plots() -> None:
    """Refuse before any work where plots and page could not be made."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidSettings(
            f"plots and a page without {error.name}", "Jinja2 and matplotlib", "pip install 'fairfold[report]'"
        ) from None


def write_results(results: Results, out: Path) -> list[Path]:
    """Write all files of an experiment to its folder.

    Returns:
        The files, Markdown first and the page last.
    """
    from fairfold.reproduce.figures import figures
    from fairfold.runs.plots import rendered

    place, plots, written = out / results.experiment.folder, dict[str, dict[str, bytes]](), []
    for grid in results.grids:
        plots[grid.name] = {}
        for name, figure in figures(grid).items():
            file = f"{grid.name}-{name}.png"
            write_atomically(place / file, rendered(figure, "png"))
            plots[grid.name][file] = rendered(figure, "svg")
            written.append(place / file)
    write_atomically(place / "results.md", markdown(results, plots).encode())
    write_atomically(place / "results.csv", as_csv(results).encode())
    write_atomically(place / "sizes.csv", sizes_as_csv(results).encode())
    page = render_page([(results, plots)])
    write_atomically(place / "results.html", page.encode())
    return [place / "results.md", place / "results.csv", place / "sizes.csv", *written, place / "results.html"]


def markdown(results: Results, plots: dict[str, dict[str, bytes]]) -> str:
    """The results as a page of Markdown, plots linked."""
    file, quick = results.experiment.file, results.experiment.quick
    lines = [f"# {file.title}", ""]
    if quick:
        lines += [f"**{QUICK}**", ""]
    lines += [file.about.strip(), ""] if file.about else []
    lines += [f"- {note}" for note in file.notes] + ([""] if file.notes else [])
    for grid in results.grids:
        lines += _markdown_table(grid)
        lines += [f"![{name}]({name})" for name in plots.get(grid.name, {})] + [""]
    again = f"fairfold reproduce {results.experiment.name}{' --quick' if quick else ''}"
    lines += [f"Written by `{again}`, fairfold {__version__}. Every cell's settings and values: `cells.jsonl`.", ""]
    return "\n".join(lines)


def _markdown_table(grid: Grid) -> list[str]:
    heading, rows = crossed(grid)
    counts = {"best": "best over the evaluations", "last": "after the last round"}[grid.file.value]
    lines = [f"## {grid.file.title}", ""]
    source, brackets = (
        f"{grid.file.source}. " * bool(grid.file.source),
        "; the paper's in brackets" * bool(grid.file.paper),
    )
    lines += [f"{source}{grid.file.metric}, {counts}{brackets}.", ""]
    lines += [*_pipes(heading, rows), ""]
    if grid.references:
        lines += _pipes(["without federation", grid.file.metric], [[n, shown(v)] for n, v in grid.references.items()])
        lines += [""]
    lines += [f"- {note}" for note in grid.file.notes] + ([""] if grid.file.notes else [])
    for view in sizes.views(grid):
        lines += [f"{view.about}:", "", *_pipes(view.heading, view.rows), ""]
    lines += [*_pipes(list(COLUMNS), [list(row) for row in detail_rows(grid)]), ""]
    by_size = [list(row) for row in sizes.size_rows(grid)]
    lines += [*_pipes(list(sizes.COLUMNS), by_size), ""] if by_size else []
    lines += [f"{facts}" for facts in about_run(grid)] + [""]
    return lines


def about_run(grid: Grid) -> list[str]:
    """Data, hardware and time of a table."""
    words = [f"Data: {'; '.join(grid.data)}." if grid.data else ""]
    words += [
        f"Hardware: {'; '.join(grid.machines)}. All cells together: {total_seconds(grid)}." if grid.machines else ""
    ]
    return [word for word in words if word]


def _pipes(heading: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(heading), "|" + "---|" * len(heading), *map(line, rows)]


def as_csv(results: Results) -> str:
    """One line a cell, and one a reference row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["experiment", "quick", "table", "metric", *COLUMNS, "values", "machine"])
    for grid in results.grids:
        shared = [results.experiment.name, results.experiment.quick, grid.name, grid.file.metric]
        for entry, row in zip(grid.entries, detail_rows(grid), strict=True):
            values, machine = " ".join(f"{value:.6g}" for value in entry.values), entry.facts.get("machine", "")
            writer.writerow([*shared, *row, values, machine])
        for name, value in grid.references.items():
            blank = [""] * (len(COLUMNS) - 4)
            writer.writerow([*shared, "reference", name, "", shown(value), *blank, "", ""])
    return text.getvalue()


def sizes_as_csv(results: Results) -> str:
    """One line a cell and device size: bytes as numbers, the own model as mean over the seeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["experiment", "quick", "table", "metric", *sizes.COLUMNS])
    for grid in results.grids:
        shared = [results.experiment.name, results.experiment.quick, grid.name, grid.file.metric]
        for entry in grid.entries:
            for size in sizes.sizes(entry):
                told = (size.name, size.users, size.held, size.down, size.up, size.quality, size.everybody)
                writer.writerow([*shared, entry.row, entry.column, *told])
    return text.getvalue()


def render_page(many: list[tuple[Results, dict[str, dict[str, bytes]]]]) -> str:
    """One page without scripts, plots inside."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    folder = resources.files("fairfold.reproduce")
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title="The paper's tables, run again" if len(many) > 1 else many[0][0].experiment.file.title,
        experiments=[_for_page(results, plots) for results, plots in many],
        columns=COLUMNS,
        size_columns=sizes.COLUMNS,
        quick=QUICK,
        version=__version__,
    )


def _for_page(results: Results, plots: dict[str, dict[str, bytes]]) -> dict[str, Any]:
    tables = []
    for grid in results.grids:
        heading, rows = crossed(grid)
        drawn = [(name, base64.b64encode(content).decode()) for name, content in plots.get(grid.name, {}).items()]
        tables.append(
            {
                "file": grid.file, "heading": heading, "rows": rows, "details": detail_rows(grid),
                "references": [(name, shown(value)) for name, value in grid.references.items()],
                "plots": drawn, "about": about_run(grid), "views": sizes.views(grid), "sizes": sizes.size_rows(grid),
            }
        )  # fmt: skip
    return {
        "name": results.experiment.name,
        "file": results.experiment.file,
        "quick": results.experiment.quick,
        "tables": tables,
    }
