"""``fairfold train``: run a federation and show what each size of device got out of it."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fairfold.cli.errors import told_plainly
from fairfold.errors import InvalidSettings

if TYPE_CHECKING:
    from fairfold.simulate.result import Result, RoundReport


def train(
    file: Annotated[Path | None, typer.Argument(help="Settings (TOML). Without: the built-in example.")] = None,
    capacities: Annotated[str | None, typer.Option(help="Capacity scheme, e.g. 1x-4x-16x.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/DATE-TIME-DATA.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; may be repeated.")
    ] = None,
) -> None:
    """Train a federation. Without arguments: devices of sizes 1x-4x-16x in a synthetic world, under a minute."""
    from fairfold.runs.folder import RunFolder, load_settings
    from fairfold.simulate import simulate

    console = Console()
    with told_plainly():
        overrides = {"capacities": capacities, "rounds": rounds, "seed": seed}
        changes = {key: value for key, value in overrides.items() if value is not None}
        settings = load_settings(file, changes | _parse_changes(change or []))
        folder = RunFolder.create(settings, out)
        started = time.monotonic()
        with Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[quality]}"),
            console=console,
        ) as progress:
            task = progress.add_task("training", total=settings.rounds, quality="")

            def watch(report: RoundReport) -> None:
                folder.note(report)
                progress.update(task, completed=report.round_number)
                if report.quality is not None:
                    progress.update(task, quality=f"NDCG@{settings.top} {report.quality.server:.3f}")

            result = simulate(settings, watch)
        seconds = time.monotonic() - started
        folder.finish(result, seconds)
        console.print(closing_table(result))
        console.print(f"{settings.rounds} rounds in {seconds:.1f} s. Results are in {folder.path}", soft_wrap=True)


def _parse_changes(changes: list[str]) -> dict[str, Any]:
    """``key=value`` pairs; values are read as TOML where that works, and as text otherwise."""
    parsed: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise InvalidSettings(f"--set {change}", "KEY=VALUE", "Write e.g. --set factors=16.")
        try:
            parsed[key.strip()] = tomllib.loads(f"value = {value.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            parsed[key.strip()] = value.strip()
    return parsed


def closing_table(result: Result) -> Table:
    """Quality, memory and bytes by device size, beside what needs no training."""
    names = list(result.references)
    table = Table(title=f"NDCG@{result.settings.top} by device size")
    table.add_column("devices")
    for heading in ("users", "memory", "sent a round, each way", "NDCG", *names):
        table.add_column(heading, justify="right")
    for group in result.groups:
        table.add_row(
            group.capacity,
            str(group.users),
            human_bytes(group.bytes_held),
            human_bytes(group.bytes_each_way),
            f"[bold]{group.quality:.3f}[/bold]",
            *(f"{group.references[name]:.3f}" for name in names),
        )
    table.add_section()
    full_bytes = result.state.full.numel() * result.state.full.element_size()
    table.add_row(
        "server's model",
        str(result.users),
        human_bytes(full_bytes),
        "–",
        f"[bold]{result.quality:.3f}[/bold]",
        *(f"{result.references[name]:.3f}" for name in names),
    )
    return table


def human_bytes(count: int) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    for unit, label in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {label}"
    return f"{count} B"
