"""``fairfold server``: the server of a fleet; ``fairfold federate``: a whole fleet on this machine."""

import json
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fairfold.cli.console import Terminal, make_table
from fairfold.cli.options import Change, Data, Plugin, Recipe, collect_changes, resolve_settings
from fairfold.errors import InvalidSettings
from fairfold.runs.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from fairfold.config import Settings
    from fairfold.data import Dataset
    from fairfold.flower.fleet.server import ServerFolder


server = typer.Typer(help="Run the server of a fleet: make it, start it, invite devices, train.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Folder of the server.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def open_server(folder: Path) -> "ServerFolder":
    """The server in a folder; an error where Flower is missing."""
    require_flower()
    from fairfold.flower.fleet.server import ServerFolder

    return ServerFolder.open(folder)


def require_flower() -> None:
    """Raise an error where the extra ``flower`` is not installed."""
    import importlib.util

    if importlib.util.find_spec("flwr") is None:
        raise InvalidSettings("a fleet, which needs Flower", "the extra 'flower'", "pip install 'fairfold[flower]'")


@server.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder, which will hold everything of the server.")],
    host: Annotated[str, typer.Option(help="The name or address by which devices reach the server.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that the server listens on.")] = 8000,
    items: Annotated[
        int | None, typer.Option(min=1, help="Number of items, where devices name items by numbers from 0.")
    ] = None,
    catalogue: Annotated[
        Path | None,
        typer.Option(help="File of the names of the items: one per line, or a CSV file with a column `item`."),
    ] = None,
    capacities: Annotated[
        str | None, typer.Option(help="Sizes of devices that are served. Default: 1x-4x-16x.")
    ] = None,
    recipe: Recipe = None,
    plugin: Plugin = None,  # noqa: ARG001 (its callback loads it)
    change: Change = None,
) -> None:
    """Make a server: certificates, an authority of its own, settings and the catalogue, in one folder.

    Nothing is overwritten. List the items in the order of popularity where you know it. With --catalogue devices may
    use the names of items in their files.

    Examples:
        fairfold server init fleet --host server.example.org --catalogue items.csv
    """
    require_flower()
    from fairfold.flower.fleet.server import ServerFolder

    console = Terminal()
    if (items is None) == (catalogue is None):
        raise InvalidSettings("--items and --catalogue", "one of them", "Give the number of items, or their names.")
    # All connected devices take part in a round, unless another number is given.
    changes = {"fleet.clients_per_round": None} | collect_changes({"capacities": capacities}, change or [])
    asked = any(key.partition(".")[0] == "privacy" for key in changes)
    resolved = resolve_settings(None, recipe, changes)
    settings = resolved.settings
    console.echo(resolved.source)
    made = ServerFolder.create(folder, settings, host, port=port, items=items or 0, catalogue=catalogue, privacy=asked)
    known = f"known as {host}:{port}; {folder}/settings.toml has its settings"
    console.echo(f"A server for {made.items:,} items in {folder}, {known}.")
    _print_privacy(console, settings if asked else None)
    console.echo(f"Its secrets are in {folder}/keys. Next: fairfold server start {folder}")


@server.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def start(
    context: typer.Context,
    folder: Folder,
    watch: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Also show the server on a page at this port, for this machine alone."),
    ] = None,
) -> None:
    """Run the server in the foreground until Ctrl-C or SIGTERM; its program is started again when it ends.

    --watch also runs `fairfold watch FOLDER`. Further options go to the SuperLink: --node-quota MB, --total-quota
    MB, --control-from ADDRESS, and Flower's own.

    Examples:
        fairfold server start fleet
        fairfold server start fleet --watch 8050
    """
    console = Terminal()
    try:
        open_server(folder).start(console.echo, context.args, watch)
    except KeyboardInterrupt:
        console.echo("The server has stopped.")


@server.command()
def invite(
    folder: Folder,
    valid: Annotated[
        str, typer.Option(help="How long the token is valid: minutes (30m), hours (24h) or days (7d, at most 30d).")
    ] = "24h",
    users: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="The most users that the device may speak for, in every sum.")
    ] = 1,
) -> None:
    """Print a token that lets one device enrol, once, within some time.

    What a device can do to the model grows with its users: --users is for devices that you trust so far.

    Examples:
        fairfold server invite fleet --valid 7d
        fairfold server invite fleet --users 50
    """
    from fairfold.flower.fleet.credentials import parse_duration

    typer.echo(str(open_server(folder).invite(parse_duration(valid), users)))


@server.command()
def roster(folder: Folder) -> None:
    """Print the public keys of all enrolled devices, a line each: the file that `node enrol --roster` takes.

    Publish it where devices can read it and the server cannot change it, with the head: the hash of the signed log.

    Examples:
        fairfold server roster fleet > roster
    """
    from fairfold.flower.roster import head_of, openssh_line

    found = open_server(folder).roster()
    entries = found.entries()
    typer.echo(f"# {len(entries)} devices, head {head_of(found.content().splitlines())}")
    for one in entries:
        typer.echo(openssh_line(one))


@server.command()
def train(
    folder: Folder,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds in all. Default: that of settings.toml.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder, if there is one.")] = False,
    wait_for: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to wait for before the first round. Default: all that have enrolled."),
    ] = None,
    wait_timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for them at most.")] = 120.0,
) -> None:
    """Train with the connected devices, and show the progress. The run is written to FOLDER/run.

    A run that breaks off because the server was restarted is resumed by itself. Ctrl-C stops the run.

    Examples:
        fairfold server train fleet --rounds 15 --wait-for 10
        fairfold server train fleet --resume
    """
    console = Terminal()
    found = open_server(folder)
    from fairfold.flower.fleet.training import TrainingLauncher

    settings = found.settings(rounds or 0)
    wanted = settings.run.rounds
    if resume or found.has_privacy_settings():  # else it is printed when devices have been counted
        _print_privacy(console, settings)

    def on_round(number: int, num_updates: int) -> None:
        console.echo(f"round {number}/{wanted}: {num_updates} {'device' if num_updates == 1 else 'devices'} replied")

    TrainingLauncher(found, console.echo, on_round).train(
        rounds or 0, resume=resume, wait_for=wait_for, wait_timeout=wait_timeout
    )
    console.echo(f"Trained. The run is in {folder / 'run'}.")


@server.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Show the state of the server: whether it runs, its devices by state, its run.

    Examples:
        fairfold server status fleet
    """
    current = open_server(folder).status()
    if as_json:
        typer.echo(json.dumps(current))
        return
    Terminal().print(_table(current))


def _print_privacy(console: Terminal, settings: "Settings | None") -> None:
    """Print what the server sees of its devices, or how that is decided where no level is set."""
    from fairfold.federation.noise import privacy_notes, privacy_report
    from fairfold.privacy.ledger import DEFAULT_MIN_COHORT

    if settings is None:
        console.echo(
            f"Privacy is decided when a run begins: its server sees only sums (secure) where {DEFAULT_MIN_COHORT} "
            "devices or more are connected, and each update (plain) else. `--set privacy.level=...` decides it for "
            "good; `fairfold node enrol ... --secure` makes a device refuse plain runs (docs/privacy.md)."
        )
        return
    for sentence in privacy_notes(privacy_report(settings)):
        console.echo(sentence)


def _table(status: dict[str, Any]) -> Any:
    table = Table("", "status", title=f"Server {status['server']}", title_justify="left")
    table.add_row("server", "running" if status["running"] else f"[yellow]not running[/yellow]: {status['message']}")
    table.add_row("catalogue", f"{status['items']:,} items")
    if status["running"]:
        states = Counter(node["state"] for node in status["nodes"])
        table.add_row("devices", ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none")
        table.add_row("invitations", ", ".join(f"{count} {state}" for state, count in status["invites"].items()))
    table.add_row("privacy", " ".join(status["privacy"]).removeprefix("Privacy: "))
    run = status["run"]
    quality = f", {run['metric']} {run['quality']:.4f}" if run.get("quality") is not None else ""
    ended = "ended" if run["result"] else "not ended"
    table.add_row("run", f"{run['rounds']} rounds, {ended}{quality}" if run["rounds"] else "none yet")
    if status["running"] and status["runs"]:
        newest = status["runs"][0]
        table.add_row("newest run", f"{newest['end'] or newest['state']} {newest['details']}".strip())
    return table


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
    changes = collect_changes(values, change or [])
    resolved = resolve_settings(None, recipe, changes)
    settings = resolved.settings
    if "rounds" not in SettingsRules.of(settings.algorithm).fixed_settings(settings).get("run", {}):
        short = {"run.rounds": ROUNDS, "run.evaluate_every": changes.get("run.rounds", ROUNDS)}
        resolved = resolve_settings(None, recipe, short | changes)
        settings = resolved.settings
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
    from fairfold.federation.advice import POPULARITY, below_popularity
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
