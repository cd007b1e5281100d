"""``fairfold report``: runs side by side, as a table, plots and one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fairfold.cli.audit import audit_table
from fairfold.cli.console import Terminal

if TYPE_CHECKING:
    from fairfold.runs.summary import RunSummary


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or a folder of such folders.")],
    out: Annotated[Path, typer.Option(help="Folder for the page (report.html) and the plots.")] = Path("report"),
    page: Annotated[bool, typer.Option(help="Write the page and the plots, or only show the table.")] = True,
) -> None:
    """Compare runs in a table and on a page: quality by device size, time and bytes, beside reference methods.

    The page opens offline and can be mailed: plots are inside, and nothing is fetched. Each plot is also a PNG file.

    Examples:
        fairfold report runs/first
        fairfold report runs --out comparison
    """
    from fairfold.runs.report import write_report
    from fairfold.runs.summary import by_data, read_runs

    console, found = Terminal(), read_runs(runs)
    for (data, _), members in by_data(found).items():
        console.print(comparison(data, members))
        for run in members:
            if run.state == "N/A":
                console.say(f"N/A {run.path}: {run.reason}")
            elif run.popularity is not None:
                console.say(f"{run.path}: {run.popularity}")
            if run.audit:
                console.say(f"{run.path}: {' '.join(run.audit['words'])}")
                console.print(audit_table(run.audit))
    if page:
        written = write_report(found, out)
        console.say(f"Page: {written[0]} ({len(written) - 1} plots beside it)")


def comparison(data: str, runs: list[RunSummary]) -> Table:
    """Runs on the same data, and the reference rows once."""
    from fairfold.runs.report import headings, table_rows
    from fairfold.runs.summary import references_of

    table = Table("run", title=escape(data), title_justify="left")
    for heading in headings(runs):
        table.add_column(heading, justify="right")
    for row in table_rows(runs):
        label = escape(f"{row['label']} ({row['mark']})" if row["mark"] else row["label"])
        if row["reason"]:
            table.add_row(label, "–", "N/A")
            continue
        rounds, best, *others = row["cells"]
        table.add_row(label, rounds, f"[bold]{best}[/bold]" if row["is_best"] else best, *others)
    table.add_section()
    for name, value in references_of(runs).items():
        table.add_row(f"[italic]{name}[/italic]", "", f"{value:.4f}")
    return table
