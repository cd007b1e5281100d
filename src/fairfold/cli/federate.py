"""``fairfold federate``: a complete federation on this machine, over TLS with node keys."""

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fairfold.cli.choose import Change, Data, Recipe, changes_of, choose
from fairfold.cli.console import Terminal
from fairfold.cli.server import require_flower
from fairfold.errors import InvalidSettings
from fairfold.runs.units import human_bytes, human_seconds

ROUNDS = 5  # where nobody says how many


def federate(
    nodes: Annotated[
        str, typer.Option(help='What each device can hold: "1x,4x*3,16x" (three of 4x), or in bytes "1MB,200kB".')
    ] = "1x,4x,16x,64x",
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
    change: Change = None,
) -> None:
    """Try out a real fleet on this machine: a server and devices of several sizes, as separate programs.

    Every device has a file of its own, which is not sent. It sends sums over its users, under masks where privacy.level
    says so or 100 devices take part. At the end you see who took part, with which memory and bytes, and how well the
    model serves each device before and after.

    Examples:
        fairfold federate --nodes "1x,4x*3,16x" --rounds 3
        fairfold federate --data ratings.csv --nodes "1x,16x" --out trial
    """
    require_flower()
    from fairfold.flower.federate import trial_of
    from fairfold.flower.opening import with_privacy

    console = Terminal()
    values = {"data": data, "method": method, "rounds": rounds, "seed": seed}
    changes = changes_of(values, change or [])
    settings, said = choose(None, recipe, changes)
    if "rounds" not in settings.algorithm.fixed(settings).get("run", {}):
        usual = {"run.rounds": ROUNDS, "run.evaluate_every": changes.get("run.rounds", ROUNDS)}
        settings, said = choose(None, recipe, usual | changes)
    console.say(said)
    folder = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-federation"
    if folder.exists() and any(folder.iterdir()):
        raise InvalidSettings(f"--out {folder}", "a new or empty folder", "Name another, or remove it.")
    trial, loaded = trial_of(settings, nodes, folder, half=half)
    asked = any(key.startswith("privacy") for key in changes)
    trial.settings, told = with_privacy(trial.settings, len(trial.capacities), asked=asked)
    for sentence in told:
        console.say(sentence)
    console.say(f"A server and {len(trial.capacities)} nodes' own files in {folder}")
    trial.prepare(loaded)
    started, wanted = time.monotonic(), settings.run.rounds
    with console.status("starting") as status:

        def on_round(done: int, answers: int) -> None:
            console.say(f"round {done}/{wanted}: {answers} of {len(trial.capacities)} nodes answered")
            status.update(f"round {min(done + 1, wanted)}/{wanted}")

        trial.run(console.say, on_round)
    console.print(_table(trial.took_part(), settings.metric))
    for sentence in trial.told():
        console.say(sentence)
    quality = trial.quality()
    if trial.settings.privacy.sums_alone and quality is not None:
        known = "what single nodes find is not known to the server"
        console.say(f"{settings.metric} over the users of all nodes: {quality:.4f} ({known}).")
    console.say(f"{wanted} rounds in {human_seconds(time.monotonic() - started)}, all over TLS.")
    console.say(
        f"Everything is in {folder}: `fairfold server status {folder}/server`. A real fleet: docs/first-fleet.md."
    )


def _table(took_part: list[dict[str, Any]], metric: str) -> Table:
    table = Table("node", title=f"Who took part, and {metric} on what their users had held back")
    for heading in ("can hold", "memory", "received", "sent", "rounds", "before", "after"):
        table.add_column(heading, justify="right")
    for place, node in enumerate(sorted(took_part, key=lambda one: -one["bytes_held"])):
        costs = [human_bytes(node[key]) for key in ("bytes_held", "bytes_down", "bytes_up")]
        both = [_mean([node[key]]) for key in ("first_quality", "last_quality")]
        table.add_row(str(place + 1), node["capacity"], *costs, str(node["rounds"]), *both)
    table.add_section()
    totals = [human_bytes(sum(node[key] for node in took_part)) for key in ("bytes_down", "bytes_up")]
    both = [_mean([node[key] for node in took_part]) for key in ("first_quality", "last_quality")]
    table.add_row("all", "", "", *totals, "", *(f"[bold]{value}[/bold]" for value in both))
    return table


def _mean(qualities: list[list[float] | None]) -> str:
    known = [quality for quality in qualities if quality is not None]
    return f"{sum(q[0] for q in known) / sum(q[1] for q in known):.4f}" if known else "–"
