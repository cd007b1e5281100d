"""``fairfold federate``: a whole fleet on this machine."""

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fairfold.cli.console import Terminal, make_table
from fairfold.cli.options import Change, Data, Plugin, Recipe, collect_changes, resolve_settings
from fairfold.cli.server import more_evaluations, require_flower
from fairfold.errors import InvalidSettings
from fairfold.runs.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from fairfold.config import Settings
    from fairfold.data import Dataset

ROUNDS = 5
"""Rounds of ``fairfold federate`` where none are given."""
NODES = "1x,4x,16x,64x"
"""Its nodes where neither they nor a recipe or method are given."""


def federate(
    nodes: Annotated[
        str | None,
        typer.Option(
            help='What each device can hold: "1x,4x*3,16x" (three of 4x), or in bytes "1MB,200kB". '
            'Default: "1x,4x,16x,64x", or what the recipe or method serves.'
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds. Default: 5, or 1 where a run is private.")
    ] = None,
    data: Data = "synthetic",
    recipe: Recipe = None,
    method: Annotated[
        str | None,
        typer.Option(help="What devices of each size hold: fair, fair_hom, full_trn, fedavg, fedhm or heterofl."),
    ] = None,
    half: Annotated[bool, typer.Option("--half", help="Send vectors in half precision: half the bytes.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the model and the data.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for everything. Default: runs/DATE-TIME-federation.")] = None,
    plugin: Plugin = None,  # noqa: ARG001 (its callback loads it)
    change: Change = None,
) -> None:
    """Try out a real fleet on this machine: a server and devices of several sizes, as separate programs.

    Every device has a file of its own, which never leaves it. It sends updates over its users, by secure aggregation
    where privacy.level requires it or 100 devices take part. The end shows the participants with their memory and
    bytes, and the quality on each device before and after.

    Examples:
        fairfold federate --nodes "1x,4x*3,16x" --rounds 3
        fairfold federate --data ratings.csv --nodes "1x,16x" --out trial
    """
    require_flower()
    from fairfold.federation.algorithm import SettingsRules
    from fairfold.flower.fleet.local_fleet import make_local_fleet
    from fairfold.flower.preparation import default_privacy

    console = Terminal()
    values = {"data": data, "method": method, "rounds": rounds, "seed": seed}
    changes = {"fleet.clients_per_round": None} | collect_changes(values, change or [])  # every node in every round
    resolved = resolve_settings(None, recipe, changes)
    settings = resolved.settings
    if "rounds" not in SettingsRules.of(settings.algorithm).fixed_settings(settings).get("run", {}):
        resolved = resolve_settings(None, recipe, {"run.rounds": ROUNDS} | changes)
        settings = resolved.settings
        settings = settings.with_changes(more_evaluations(settings, changes))
    console.echo(resolved.source)
    folder = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-federation"
    if folder.exists() and any(folder.iterdir()):
        raise InvalidSettings(f"--out {folder}", "a new or empty folder", "Name another, or remove it.")
    if nodes is None:
        nodes = settings.fleet.capacities.replace("-", ",") if recipe or method else NODES
    local_fleet, loaded = make_local_fleet(settings, nodes, folder, half=half)
    asked = any(key.startswith("privacy") for key in changes)
    local_fleet.settings, notes = default_privacy(local_fleet.settings, len(local_fleet.capacities), asked=asked)
    for sentence in notes:
        console.echo(sentence)
    console.echo(f"A server and {len(local_fleet.capacities)} nodes' own files in {folder}")
    local_fleet.prepare(loaded)
    started = time.monotonic()
    wanted = settings.run.rounds
    with console.status("starting") as status:

        def on_round(done: int, num_updates: int) -> None:
            console.echo(f"round {done}/{wanted}: {num_updates} of {len(local_fleet.capacities)} nodes replied")
            status.update(f"round {min(done + 1, wanted)}/{wanted}")

        local_fleet.run(console.echo, on_round)
    quality = local_fleet.quality()
    for sentence in _warnings(local_fleet.settings, loaded, quality):
        console.echo(sentence)
    console.print(_participants_table(local_fleet.participants(), settings.metric))
    for sentence in local_fleet.notes():
        console.echo(sentence)
    if local_fleet.settings.privacy.uses_secure_aggregation and quality is not None:
        known = "the server does not know the quality of single nodes"
        console.echo(f"{settings.metric} over the users of all nodes: {quality:.4f} ({known}).")
    console.echo(f"{wanted} rounds in {human_seconds(time.monotonic() - started)}, all over TLS.")
    console.echo(
        f"Everything is in {folder}: `fairfold server status {folder}/server`. A real fleet: docs/first-fleet.md."
    )
    rated = settings.predicts_ratings
    there = f"`fairfold recommend {folder} --history {'FILE' if rated else '1,5,9'}`"
    console.echo(f"Recommend on a device: `fairfold node recommend {folder}/nodes/0 --user 0`; on the server: {there}.")


def _warnings(settings: "Settings", data: "Dataset", quality: float | None) -> list[str]:
    """Sentences on a run that ranks worse than popularity does on all nodes' users."""
    from fairfold.federation.evaluation import POPULARITY, below_popularity
    from fairfold.federation.federation import popularity_baseline
    from fairfold.metrics import evaluate_ranking

    if quality is None or settings.predicts_ratings or not len(data.test):
        return []
    score = popularity_baseline(data)[POPULARITY]
    return below_popularity(settings, quality, evaluate_ranking(score, data.train, data.test, settings.run.top).ndcg)


def _participants_table(participants: list[dict[str, Any]], metric: str) -> Table:
    headings = ["capacity", "memory", "received", "sent", "rounds", "before", "after"]
    table = make_table(["node"], headings, title=f"Participants, and {metric} on their users' held-out items")
    for place, node in enumerate(sorted(participants, key=lambda one: -one["bytes_held"])):
        costs = [human_bytes(node[key]) for key in ("bytes_held", "bytes_down", "bytes_up")]
        both = [_mean([node[key]]) for key in ("first_quality", "last_quality")]
        table.add_row(str(place + 1), node["capacity"], *costs, str(node["rounds"]), *both)
    table.add_section()
    totals = [human_bytes(sum(node[key] for node in participants)) for key in ("bytes_down", "bytes_up")]
    both = [_mean([node[key] for node in participants]) for key in ("first_quality", "last_quality")]
    table.add_row("all", "", "", *totals, "", *(f"[bold]{value}[/bold]" for value in both))
    return table


def _mean(qualities: list[list[float] | None]) -> str:
    known = [quality for quality in qualities if quality is not None]
    return f"{sum(q[0] for q in known) / sum(q[1] for q in known):.4f}" if known else "–"
