"""Display the progress of a run: a bar on a terminal, a changing line in a notebook, plain lines elsewhere."""

import threading
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from fairfold.config import Settings
from fairfold.federation.evaluation import Callback, Quality, RoundReport
from fairfold.runs.units import human_bytes, human_seconds
from fairfold.subspace import Capacity

LINE_SECONDS = 30.0  # without a terminal a line is printed per evaluation, and after so many seconds without one


class Display(Callback):
    """Shows rounds, time left, bytes, and the last quality of every size."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._cell: Any = None  # the output of a notebook
        self._ended = threading.Event()
        columns = (TextColumn("round"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, console=console)
        self._down = self._up = self._last_round = 0
        self._last: Quality | None = None

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:
        self._sizes = [str(capacity) for capacity in capacities]
        self._metric = settings.metric
        self._rounds = settings.run.rounds
        self._first = first_round
        self._started = self._printed = time.monotonic()
        self._task = self._bar.add_task("", total=settings.run.rounds, completed=first_round - 1, left="")
        self._now = first_round
        if self._console.is_jupyter:
            from IPython.display import display

            self._cell = display({"text/plain": "starting ..."}, raw=True, display_id=True)
        elif self._console.is_terminal:
            self._live = Live(self._live_table(), console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        self._ended.clear()
        threading.Thread(target=self._report_long_rounds, daemon=True).start()

    def _report_long_rounds(self) -> None:
        """Print a line while a round takes long."""
        while not self._ended.wait(LINE_SECONDS / 2):
            if self._live is None and time.monotonic() - self._printed >= LINE_SECONDS:
                now = min(self._now, self._rounds)  # after the last round models are evaluated
                self._print(f"round {now}/{self._rounds} goes on: {human_seconds(self._elapsed)} so far")

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _print(self, line: str) -> None:
        """Print a line; in a notebook in the place of the one before."""
        self._printed = time.monotonic()
        if self._cell is not None:
            self._cell.update({"text/plain": line}, raw=True)
        else:
            self._console.print(line, soft_wrap=True, highlight=False)

    def on_round(self, report: RoundReport) -> None:
        self._down += report.bytes_down
        self._up += report.bytes_up
        if report.quality is not None:
            self._last, self._last_round = report.quality, report.round_number
        remaining = self._rounds - report.round_number
        per_round = self._elapsed / (report.round_number - self._first + 1)
        left = f"{human_seconds(per_round * remaining)} left" if remaining else ""
        self._now = report.round_number + 1
        if self._live is not None:
            self._bar.update(self._task, completed=report.round_number, left=left)
            self._live.update(self._live_table())
            return
        if self._cell is not None or report.quality is not None or time.monotonic() - self._printed > LINE_SECONDS:
            self._print(self._round_line(report, left))

    def close(self) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _round_line(self, report: RoundReport, left: str) -> str:
        parts = [f"round {report.round_number}/{self._rounds}"]
        if report.quality is not None:
            values = ["left out" if value is None else f"{value:.4f}" for value in report.quality.groups]
            sizes = ", ".join(map(" ".join, zip(self._sizes, values, strict=True)))
            parts.append(f"{self._metric} {report.quality.server:.4f} ({sizes})")
        parts += [f"{human_bytes(self._down)} down, {human_bytes(self._up)} up", left]
        return "  ".join(filter(None, parts))

    def _live_table(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
        table.add_column(f"{self._metric} after round {self._last_round}" if self._last else self._metric)
        for heading in (*self._sizes, "server", "down", "up"):
            table.add_column(heading, justify="right")
        values = [*self._last.groups, self._last.server] if self._last else [None] * (len(self._sizes) + 1)
        cells = ["–" if value is None else f"[bold]{value:.4f}[/bold]" for value in values]
        table.add_row("", *cells, human_bytes(self._down), human_bytes(self._up))
        return Group(self._bar, table)
