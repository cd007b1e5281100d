"""``python -m experiments``: the paper's tables and figures, each from one command, beside the paper's own numbers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from experiments.records import Watcher, is_complete, is_of_this_code
from fairfold.atomic_io import write_atomically
from fairfold.cli.console import CommandWithExamples, ErrorReporting, Terminal
from fairfold.cli.options import Plugin
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.runs.progress import LINE_SECONDS
from fairfold.runs.units import human_seconds

if TYPE_CHECKING:
    from experiments.check import Recheck
    from experiments.experiment import Cell, Experiment
    from experiments.output import Results
    from experiments.records import Outcome


DEFAULT_OUT = Path("reproduction")

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


class _Command(ErrorReporting, CommandWithExamples):
    """A command that ends in a result, or in an error message of one line."""


@app.command(cls=_Command)
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            help="An experiment (--list shows them), 'all' (the paper's), 'ours' (what explains it or goes beyond), "
            "or a .toml file of your own."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a small version, which is marked as such in the results.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="How many seeds, counted from 0. Default: that of the experiment.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; each experiment has a folder in it.")
    ] = DEFAULT_OUT,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes of one thread each, which share a GPU. Default: one per core.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only these cells: table, table/row or table/row/column, with * and ?; may be repeated. Others "
            "are shown as they are kept."
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Run cells (--search: trials) again whose records lack commit, hardware or users."
        ),
    ] = False,
    redo: Annotated[
        bool,
        typer.Option(
            "--redo", help="Run the cells again (best with --only) that another commit than the present one has run."
        ),
    ] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="Choose settings (learning rates) in short runs on held-out data, and stop."),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Write tables and a page from the cells that are kept, and run nothing.")
    ] = False,
    pages: Annotated[
        Path | None,
        typer.Option(
            help="Also write the tables in the Markdown pages of this folder again, and name figures without a record."
        ),
    ] = None,
    check: Annotated[
        int,
        typer.Option(min=0, help="Run so many kept cells again, in the order of their names' SHA-256, and compare."),
    ] = 0,
    longest: Annotated[
        float, typer.Option(help="With --check: of the cells that took at most so many seconds when they were run.")
    ] = float("inf"),
    join: Annotated[
        Path | None,
        typer.Option(help="Take over the records of another folder of results; compare those that were run again."),
    ] = None,
    plugin: Plugin = None,  # noqa: ARG001 (its callback loads it)
    list_them: Annotated[bool, typer.Option("--list", help="Show the experiments and what they hold.")] = False,
) -> None:
    """Run a table of the paper again, and show its figures beside ours, with the spread over seeds.

    Cells that are done are kept and not run again; one that was interrupted goes on from its checkpoint. Results are
    Markdown, CSV, PNG and one page that opens offline.

    Examples:
        python -m experiments --list
        python -m experiments ranking --quick
    """
    from experiments.execute import execute_all, matches_patterns
    from experiments.experiment import named, read_experiment
    from experiments.output import render_page
    from experiments.search import search as choose_settings
    from fairfold.runs.report import require_plots

    console = Terminal()
    if list_them:
        _list(console)
        return
    if name is None:
        raise InvalidSettings("no experiment", "a name, 'all' or 'ours'", "`python -m experiments --list` shows them.")
    experiments = [read_experiment(each, quick=quick, seeds=seeds) for each in named(name)]
    everything = [cell for experiment in experiments for cell in experiment.cells]
    if unknown := [one for one in only or () if not any(matches_patterns(cell, [one]) for cell in everything)]:
        tables = sorted({cell.table for cell in everything})
        raise InvalidSettings(f"--only {unknown[0]}", f"a cell of {', '.join(tables)}", "Check the spelling.")
    require_plots()
    if search:
        for experiment in experiments:
            if experiment.file.search is None:
                console.echo(f"{experiment.name}: nothing to choose")
            else:
                console.echo(f"Record: {choose_settings(experiment, out, console.echo, jobs, again=again)}")
        return
    title = experiments[0].folder if len(experiments) == 1 else f"{name}-quick" if quick else name
    display = Display(console, title)
    if join is not None:
        _join(console, experiments, out, join)
        return
    if check:
        _check(console, experiments, out, check, longest, jobs, display)
        return
    holds = is_of_this_code if redo else is_complete if again else bool
    try:
        outcomes = execute_all(experiments, out, jobs, display, run=not show, only=only or (), holds=holds)
    except KeyboardInterrupt:
        console.echo("What is done is kept: the same command goes on.")
        raise
    finally:
        display.close()
    finished = [_write(console, *each, out) for each in zip(experiments, outcomes, strict=True)]
    if len(finished) > 1:
        page = out / f"{title}.html"
        write_atomically(page, render_page(finished).encode())
        console.echo(f"All on one page: {page}")
    if pages is not None:
        _write_pages(console, pages, out)
    missing = [
        entry for results in finished for result_table in results.result_tables for entry in result_table.entries
    ]
    if missing and all(entry.state == "no data" for entry in missing):
        raise InvalidData(missing[0].reason.split("; needed")[0], "data for at least one cell", missing[0].reason)
    if broken := [outcome.reason for found in outcomes for outcome in found.values() if outcome.state == "broken"]:
        for reason in broken:
            console.echo(reason)
        console.echo(f"{len(broken)} cells broke off. All others are kept; the same command runs these again.")
        raise typer.Exit(1)


def _check(
    console: Terminal,
    experiments: list[Experiment],
    out: Path,
    many: int,
    longest: float,
    jobs: int | None,
    display: Display,
) -> None:
    from experiments.check import check

    try:
        found = check(experiments, out, many, longest, jobs, display)
    finally:
        display.close()
    _print_checked(console, found)
    console.echo(_agreement(found))
    if not all(one.agrees for one in found):
        raise typer.Exit(1)


def _join(console: Terminal, experiments: list[Experiment], out: Path, other: Path) -> None:
    from experiments.check import AGAIN, join

    if not any((other / experiment.folder).is_dir() for experiment in experiments):
        names = ", ".join(experiment.folder for experiment in experiments)
        raise InvalidData(f"--join {other}", f"a folder that holds {names}", "Name the folder that was given as --out.")
    found = join(experiments, out, other)
    _print_checked(console, [one for one in found if not one.agrees])
    for experiment in experiments:
        mine = [one for one in found if one.cell.experiment == experiment.name]
        if mine:
            console.echo(f"{experiment.name}: {_agreement(mine)}")
    console.echo(f"{_agreement(found)} Every cell: {out / AGAIN}" if found else "No kept cell was run again.")


def _print_checked(console: Terminal, found: list[Recheck]) -> None:
    table = Table("cell", "kept", "now", "seeds apart", "")
    for one in found:
        figures = f"{one.kept:.4f}", f"{one.now:.4f}", f"{one.range:.4f}"
        table.add_row(escape(f"{one.cell.experiment} {one.cell.label}"), *figures, one.result)
    if found:
        console.print(table)


def _agreement(found: list[Recheck]) -> str:
    agree, same = sum(one.agrees for one in found), sum(one.same for one in found)
    return f"{agree} of {len(found)} agree: {same} to four digits, the others within what seeds are apart."


def _write(console: Terminal, experiment: Experiment, outcomes: dict[Cell, Outcome], out: Path) -> Results:
    from experiments.output import Results, terminal_tables, write_results
    from experiments.tables import result_tables

    results = Results(experiment, result_tables(experiment, outcomes))
    for result_table in results.result_tables:
        for table in terminal_tables(result_table):
            console.print(table)
        for reason in dict.fromkeys(entry.reason for entry in result_table.entries if entry.state != "done"):
            console.echo(f"  {reason}")
    written = write_results(results, out)
    console.echo(f"Page: {written[-1]} (Markdown, CSV and plots beside it)")
    return results


def _write_pages(console: Terminal, folder: Path, out: Path) -> None:
    from experiments.pages import PART, Pages

    pages = Pages(out, folder.parent)
    readme = folder.parent / "README.md"
    for path in [*sorted(folder.glob("*.md")), *([readme] if readme.is_file() else [])]:
        text = path.read_text(encoding="utf-8")
        try:
            made, drawn = pages.made(text), pages.drawn(text)
            wrong = pages.unrecorded_figures(made) if PART.search(made) else []
        except InvalidData as error:  # names records that are not there: its other tables cannot be trusted either
            console.echo(f"{path} is left as it is: {error}")
            continue
        if made != text:
            write_atomically(path, made.encode())
            console.echo(f"Tables made anew: {path}")
        for name, content in drawn.items():
            write_atomically(folder / name, content)
        for one in wrong:
            console.echo(f"{path}: no record holds {one}")


def _list(console: Terminal) -> None:
    from experiments.experiment import GROUPS, named, read_experiment

    table = Table("name", "group", "what", "in the paper", "cells", "with seeds")
    for group in GROUPS:
        for name in named(group):
            experiment = read_experiment(name)
            sources = dict.fromkeys(file.source for file in experiment.file.tables.values() if file.source)
            counted = [cell for cell in experiment.cells if cell.kind != "baselines" and not cell.is_trial]
            cells = [(cell.table, cell.row, cell.column) for cell in counted]
            counts = str(len(set(cells))), str(len(cells))
            table.add_row(experiment.name, group, experiment.file.title, "; ".join(sources), *counts)
        table.add_section()
    console.print(table)
    for group, meaning in GROUPS.items():
        console.echo(f"`python -m experiments {group}` runs all of group {group}: {meaning}.")


class Display(Watcher):
    """Progress on the console: a bar on a terminal, else a line per cell."""

    def __init__(self, console: Terminal, name: str) -> None:
        self._console, self._name = console, name
        self._shares: dict[Cell, float] = {}
        self._total = self._over = 0
        self._started = self._spoke = time.monotonic()
        self._bar: Progress | None = None

    def on_plan(self, kept: int, lacking: int, to_run: list[Cell]) -> None:
        self._total, self._started = len(to_run), time.monotonic()
        without = f", {lacking} without data" if lacking else ""
        self._console.echo(f"{self._name}: {kept} cells kept, {len(to_run)} to run{without}")
        if to_run and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(self._name, total=self._total, left="")
            self._bar.start()

    def on_progress(self, cell: Cell, share: float) -> None:
        self._shares[cell] = min(share, 1.0)
        self._show(f"{cell.experiment} {cell.label}")

    def on_cell(self, cell: Cell, outcome: Outcome) -> None:
        self._over += 1
        self._shares[cell] = 1.0
        at = f" (round {outcome.best_round:.0f})" if outcome.best_round else ""  # what is no curve has none
        found = outcome.state if outcome.best is None else f"{outcome.best:.4f}{at}"
        times = f"{human_seconds(outcome.seconds)}{self._left()}"
        self._console.echo(f"[{self._over}/{self._total}] {cell.experiment} {cell.label}: {found}, {times}")
        self._spoke = time.monotonic()
        self._show("")

    def on_note(self, text: str) -> None:
        self._console.echo(text)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _left(self) -> str:
        done = sum(self._shares.values())
        if done <= 0 or done >= self._total:
            return ""
        return f", {human_seconds((time.monotonic() - self._started) / done * (self._total - done))} left"

    def _show(self, label: str) -> None:
        done, left = sum(self._shares.values()), self._left()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{self._name} {label}", left=left.strip(", "))
        elif label and time.monotonic() - self._spoke > LINE_SECONDS:
            self._spoke = time.monotonic()
            self._console.echo(f"{done:.1f} of {self._total} cells, in {label}{left}")


if __name__ == "__main__":
    app(prog_name="python -m experiments")
