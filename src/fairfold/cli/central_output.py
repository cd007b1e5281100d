"""What ``fairfold central`` shows: the data, progress, and the table at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from fairfold.data.interactions import Dataset, Interactions
    from fairfold.models import Recommender
    from fairfold.models.central import CentralSettings, EpochReport
    from fairfold.models.tasks import Row, Task

# Name, epoch, loss, metrics (or why there are none), seconds.
Line = tuple[str, str, str, "Row | str", str]


class Ticker:
    """A progress bar over the samples of all epochs, with the last loss and value beside it."""

    def __init__(self, progress: Progress, name: str, samples: int) -> None:
        self._progress = progress
        self._name = name
        self._task = progress.add_task(name, total=samples)

    def step(self, samples: int) -> None:
        """Count a step's samples."""
        self._progress.advance(self._task, samples)

    def epoch(self, report: "EpochReport", headline: str, value: float) -> None:
        """Show an epoch's loss and value."""
        text = f"{self._name}: epoch {report.epoch}, loss {report.loss:.4f}, {headline} {abs(value):.4f}"
        self._progress.update(self._task, description=text)


@contextmanager
def ticker(console: Console, name: str, samples: int) -> Iterator[Ticker]:
    """A progress bar for the length of a block; it vanishes afterwards."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Ticker(progress, name, samples)


def describe(console: Console, data: "Dataset", task: "Task", device: "torch.device") -> None:
    """One line on the data and the machine."""
    console.print(
        f"{data.name}: {data.num_users:,} users, {data.num_items:,} items, "
        f"{len(task.train):,} interactions to train on, {len(data.test):,} to test; device {device}",
        highlight=False,
    )


def chosen_epochs(
    console: Console,
    task: "Task",
    model: "Recommender",
    parts: "tuple[Interactions, Interactions]",
    settings: "CentralSettings",
    patience: int,
) -> int:
    """Train on one part, and say after how many epochs the model did best on the other."""
    from fairfold.models.central import choose_epochs

    train, held_out = parts
    with ticker(console, "choosing epochs", settings.epochs * len(train)) as bar:
        choice = choose_epochs(
            task.epochs(model, train, settings, bar.step),
            lambda: task.value(model, train, held_out),
            patience,
            lambda report, value: bar.epoch(report, f"validation {task.headline}", value),
        )
    console.print(
        f"validation: best {task.headline} {abs(choice.value):.4f} after {choice.epochs} of {choice.tried} epochs "
        f"({len(held_out):,} interactions held out)",
        highlight=False,
    )
    return choice.epochs


def reference_rows(console: Console, task: "Task") -> list[Line]:
    """The reference methods' rows."""
    lines: list[Line] = []
    with console.status("reference methods …") as status:
        for reference in task.references():
            lines.append((reference.name, "", "", reference.row, ""))
            status.update(f"reference methods, settings chosen on held-out training data: {len(lines)} done …")
    return lines


def model_rows(
    console: Console, task: "Task", model: "Recommender", settings: "CentralSettings", name: str
) -> list[Line]:
    """Train, and evaluate after every epoch."""
    lines: list[Line] = []
    with ticker(console, "training", settings.epochs * len(task.train)) as bar:
        for report in task.epochs(model, task.train, settings, bar.step):
            row = task.test_row(model)
            bar.epoch(report, f"test {task.headline}", row[0])
            lines.append((name, str(report.epoch), f"{report.loss:.4f}", row, f"{report.seconds:.1f}"))
    return lines


def print_table(console: Console, task: "Task", lines: list[Line]) -> None:
    """All rows; the last epoch, which is the result, stands out."""
    table = Table(title=task.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in ("epoch", "loss", *task.metrics, "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for number, (name, epoch, loss, row, seconds) in enumerate(lines):
        if isinstance(row, str):
            notes.append(f"{name}: {row}")
            cells = ["-" for _ in task.metrics]
        else:
            cells = [f"{value:.4f}" for value in row]
        last_reference = not epoch and number + 1 < len(lines) and bool(lines[number + 1][1])
        style = "bold" if number == len(lines) - 1 else None
        table.add_row(name, epoch, loss, *cells, seconds, style=style, end_section=last_reference)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
