"""``fairfold server``: the server of a fleet."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fairfold.cli.console import Terminal
from fairfold.cli.options import Change, Plugin, Recipe, collect_changes, resolve_settings
from fairfold.errors import InvalidSettings, install_hint

if TYPE_CHECKING:
    from fairfold.config import Settings
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
        raise InvalidSettings("a fleet, which needs Flower", "the extra 'flower'", install_hint("flower"))


def more_evaluations(settings: "Settings", changes: Mapping[str, Any]) -> dict[str, int]:
    """The change to at least eight evaluations of a run, for its page, where nothing else was asked for or decided."""
    from fairfold.federation.algorithm import SettingsRules

    decided = SettingsRules.of(settings.algorithm).fixed_settings(settings).get("run", {})
    if "run.evaluate_every" in changes or "evaluate_every" in decided:
        return {}
    return {"run.evaluate_every": min(settings.run.evaluate_every, max(1, settings.run.rounds // 8))}


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
    operator: Annotated[str, typer.Option(help="Who runs the fleet: people read it before they join.")] = "",
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
    settings = settings.with_changes(more_evaluations(settings, changes))
    console.echo(resolved.source)
    named: dict[str, Any] = {"items": items or 0, "catalogue": catalogue, "operator": operator}
    made = ServerFolder.create(folder, settings, host, port=port, privacy=asked, **named)
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
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Run the server in the foreground until Ctrl-C or SIGTERM; its program is started again when it ends.

    What Flower prints goes to FOLDER/server.log. --watch also runs `fairfold watch FOLDER`. Further options go to the
    SuperLink: --node-quota MB, --total-quota MB, and Flower's own.

    Examples:
        fairfold server start fleet
        fairfold server start fleet --watch 8050
    """
    console = Terminal()
    echo = (lambda _line: None) if quiet else console.echo
    try:
        open_server(folder).start(echo, context.args, watch)
    except KeyboardInterrupt:
        echo("The server has stopped.")


@server.command()
def invite(
    folder: Folder,
    valid: Annotated[
        str, typer.Option(help="How long the token is valid: minutes (30m), hours (24h) or days (7d, at most 30d).")
    ] = "24h",
    users: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="The most users that the device may act for, in every sum.")
    ] = 1,
) -> None:
    """Print a token that lets one device enrol, once, within some time; and to stderr the link for a browser.

    What a device can do to the model grows with its users: --users is for devices that you trust so far.

    Examples:
        fairfold server invite fleet --valid 7d
        fairfold server invite fleet --users 50
    """
    from fairfold.flower.fleet.credentials import parse_duration

    opened = open_server(folder)
    token = opened.invite(parse_duration(valid), users)
    typer.echo(str(token))
    typer.echo(f"In a browser: https://{opened.host}:{opened.port}/#{token}", err=True)  # $(...) is the token alone


@server.command()
def roster(folder: Folder) -> None:
    """Print the public keys of all enrolled devices, a line each: the file that `node enrol --roster` takes.

    Publish it where devices can read it and the server cannot change it, with the head: the hash of the signed log.

    Examples:
        fairfold server roster fleet
    """
    from fairfold.flower.roster import openssh_line

    found = open_server(folder).roster()
    entries = found.entries()
    typer.echo(f"# {len(entries)} devices, head {found.head().hash}")
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
    from fairfold.runs.folder import RESULT, read_json

    settings = found.settings(rounds or 0)
    wanted = settings.run.rounds
    if resume or found.has_privacy_settings():  # else it is printed when devices have been counted
        _print_privacy(console, settings)

    def on_round(number: int, num_updates: int) -> None:
        quality = found.qualities().get(number)
        shown = "" if quality is None else f", {settings.metric} {_quality(quality)}"
        replied = "device" if num_updates == 1 else "devices"
        console.echo(f"round {number}/{wanted}: {num_updates} {replied} replied{shown}")

    TrainingLauncher(found, console.echo, on_round).train(
        rounds or 0, resume=resume, wait_for=wait_for, wait_timeout=wait_timeout
    )
    for sentence in read_json(found.run / RESULT, "Train again.").get("warnings", []):
        console.echo(str(sentence))
    qualities = found.qualities()
    if qualities:
        last = max(qualities)
        console.echo(f"{settings.metric} after round {last}: {_quality(qualities[last])}.")
    console.echo(f"Trained. The run is in {folder / 'run'}.")


@server.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Show the state of the server: whether it runs, its devices by state, its run.

    Examples:
        fairfold server status fleet
    """
    current = open_server(folder).status(rows=as_json)
    if as_json:
        typer.echo(json.dumps(current))
        return
    Terminal().print(_table(current))


def _quality(values: dict[str, float]) -> str:
    """The quality of the server's model, and of each size's in brackets."""
    sizes = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "server")
    return f"{values['server']:.4f}{f' ({sizes})' if sizes else ''}"


def _print_privacy(console: Terminal, settings: "Settings | None") -> None:
    """Print what the server sees of its devices, or how that is decided where no level is set."""
    from fairfold.federation.plan import privacy_notes, privacy_report
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
        states = sorted(status["states"].items())
        table.add_row("devices", ", ".join(f"{count:,} {state}" for state, count in states) or "none")
        table.add_row("invitations", ", ".join(f"{count} {state}" for state, count in status["invites"].items()))
    table.add_row("privacy", " ".join(status["privacy"]).removeprefix("Privacy: "))
    run = status["run"]
    quality = f", {run['metric']} {run['quality']:.4f}" if run.get("quality") is not None else ""
    ended = "ended" if run["result"] else "not ended"
    table.add_row("run", f"{run['rounds']} rounds, {ended}{quality}" if run["rounds"] else "none yet")
    if run["quality_by_size"]:
        table.add_row("quality by size", _quality(run["quality_by_size"]))
    if status["running"] and status["runs"]:
        newest = status["runs"][0]
        table.add_row("newest run", f"{newest['end'] or newest['state']} {newest['details']}".strip())
    return table
