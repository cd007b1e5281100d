"""How a run is watched: a bar on a terminal, a line that changes in a notebook, plain lines elsewhere.

Each has the last quality of every size. Where a round takes long, a sign of life is given.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from fairfold.runs.units import human_bytes, human_seconds
from fairfold.trackers.callback import Callback

if TYPE_CHECKING:
    from fairfold.settings import Settings
    from fairfold.simulate.result import Quality, RoundReport
    from fairfold.subspace import Capacity

LINE_SECONDS = 30.0  # without a terminal: a line per evaluation, and one when nothing has been said for so long


class Display(Callback):
    """Shows rounds, time left, quality and bytes, by device size."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._cell: Any = None  # what is shown in a notebook
        self._over = threading.Event()
        columns = (TextColumn("round"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, console=console)
        self._down = self._up = 0
        self._last: Quality | None = None
        self._last_round = 0

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:
        """Draw the bar."""
        self._sizes = [str(capacity) for capacity in capacities]
        self._metric = settings.metric
        self._rounds, self._first = settings.run.rounds, first_round
        self._started = self._spoke = time.monotonic()
        self._task = self._bar.add_task("", total=settings.run.rounds, completed=first_round - 1, left="")
        self._now = first_round
        if self._console.is_jupyter:
            from IPython.display import display

            self._cell = display({"text/plain": "starting ..."}, raw=True, display_id=True)
        elif self._console.is_terminal:
            self._live = Live(self._view(), console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        self._over.clear()
        threading.Thread(target=self._live_on, daemon=True).start()

    def _live_on(self) -> None:
        """Say that a round goes on where nothing has been said for long: the first may take minutes, or be the only."""
        while not self._over.wait(LINE_SECONDS / 2):
            silent = time.monotonic() - self._spoke
            if self._live is None and silent >= LINE_SECONDS:
                now = min(self._now, self._rounds)  # after the last one models are judged
                self._say(f"round {now}/{self._rounds} goes on: {human_seconds(self._elapsed)} so far")

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _say(self, line: str) -> None:
        """A line; in a notebook in the place of the one before."""
        self._spoke = time.monotonic()
        if self._cell is not None:
            self._cell.update({"text/plain": line}, raw=True)
        else:
            self._console.print(line, soft_wrap=True, highlight=False)

    def on_round(self, report: RoundReport) -> None:
        """Move on."""
        self._down += report.bytes_down
        self._up += report.bytes_up
        if report.quality is not None:
            self._last, self._last_round = report.quality, report.round_number
        left, self._now = self._left(report.round_number), report.round_number + 1
        if self._live is not None:
            self._bar.update(self._task, completed=report.round_number, left=left)
            self._live.update(self._view())
            return
        if self._cell is not None or report.quality is not None or time.monotonic() - self._spoke > LINE_SECONDS:
            self._say(self._line(report, left))

    def close(self) -> None:
        """Take the bar away."""
        self._over.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _left(self, number: int) -> str:
        done, more = number - self._first + 1, self._rounds - number
        return f"{human_seconds(self._elapsed / done * more)} left" if more else ""

    def _line(self, report: RoundReport, left: str) -> str:
        words = [f"round {report.round_number}/{self._rounds}"]
        if report.quality is not None:
            sizes = ", ".join(
                f"{size} {'left out' if value is None else format(value, '.4f')}"
                for size, value in zip(self._sizes, report.quality.groups, strict=True)
            )
            words.append(f"{self._metric} {report.quality.server:.4f} ({sizes})")
        words += [f"{human_bytes(self._down)} down, {human_bytes(self._up)} up", left]
        return "  ".join(filter(None, words))

    def _view(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
        table.add_column(f"{self._metric} after round {self._last_round}" if self._last else self._metric)
        for size in self._sizes:
            table.add_column(size, justify="right")
        for heading in ("server", "down", "up"):
            table.add_column(heading, justify="right")
        values = [*self._last.groups, self._last.server] if self._last else [None] * (len(self._sizes) + 1)
        cells = ["–" if value is None else f"[bold]{value:.4f}[/bold]" for value in values]
        table.add_row("", *cells, human_bytes(self._down), human_bytes(self._up))
        return Group(self._bar, table)
