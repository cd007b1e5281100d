"""``fairfold server``: the server of a fleet, from its certificates to its model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairfold.cli.choose import Change, Recipe, changes_of, choose
from fairfold.cli.console import Terminal
from fairfold.errors import InvalidSettings

if TYPE_CHECKING:
    from fairfold.flower.server import ServerFolder
    from fairfold.settings import Settings

server = typer.Typer(help="Run the server of a fleet: make it, start it, invite devices, train.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Folder of the server.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def opened(folder: Path) -> "ServerFolder":
    """The server in a folder; with a word on the extra where Flower is missing."""
    require_flower()
    from fairfold.flower.server import ServerFolder

    return ServerFolder.open(folder)


def require_flower() -> None:
    """A fleet needs the extra ``flower``."""
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
    change: Change = None,
) -> None:
    """Make a server: certificates, an authority of its own, settings and the catalogue, in one folder.

    Nothing is overwritten. List the items in the order of popularity where you know it. With --catalogue devices may
    use the names of items in their files.

    Examples:
        fairfold server init fleet --host server.example.org --catalogue items.csv
    """
    require_flower()
    from fairfold.flower.server import ServerFolder

    console = Terminal()
    if (items is None) == (catalogue is None):
        raise InvalidSettings("--items and --catalogue", "one of them", "Give the number of items, or their names.")
    # Everybody who is there takes part in a round, unless told otherwise.
    changes = {"fleet.clients_per_round": None} | changes_of({"capacities": capacities}, change or [])
    asked = any(key.partition(".")[0] == "privacy" for key in changes)
    settings, said = choose(None, recipe, changes)
    console.say(said)
    made = ServerFolder.create(folder, settings, host, port=port, items=items or 0, catalogue=catalogue, privacy=asked)
    known = f"known as {host}:{port}; {folder}/settings.toml says what it trains"
    console.say(f"A server for {made.items:,} items in {folder}, {known}.")
    _say_privacy(console, settings if asked else None)
    console.say(f"Its secrets are in {folder}/keys. Next: fairfold server start {folder}")


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

    --watch is `fairfold watch FOLDER`, which see. Further options go to the SuperLink: --node-quota MB, --total-quota
    MB, --control-from ADDRESS, and Flower's own.

    Examples:
        fairfold server start fleet
        fairfold server start fleet --watch 8050
    """
    console, found = Terminal(), opened(folder)
    try:
        found.start(console.say, context.args, watch)
    except KeyboardInterrupt:
        console.say("The server has stopped.")


@server.command()
def invite(
    folder: Folder,
    valid: Annotated[
        str, typer.Option(help="How long the token is valid: minutes (30m), hours (24h) or days (7d, at most 30d).")
    ] = "24h",
) -> None:
    """Print a token that lets one device enrol, once, within some time.

    Examples:
        fairfold server invite fleet --valid 7d
    """
    from fairfold.flower.tokens import seconds_of

    typer.echo(str(opened(folder).invite(seconds_of(valid))))


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
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for them at most.")] = 120.0,
) -> None:
    """Train with the devices that are connected, and show how it goes. The run is written to FOLDER/run.

    A run that breaks off because the server was started again goes on by itself. Ctrl-C stops the run.

    Examples:
        fairfold server train fleet --rounds 15 --wait-for 10
        fairfold server train fleet --resume
    """
    console, found = Terminal(), opened(folder)
    from fairfold.flower.launch import Launch

    settings = found.settings(rounds or 0)
    wanted = settings.run.rounds
    if resume or found.says_privacy():  # else it is said when devices have been counted
        _say_privacy(console, settings)

    def on_round(number: int, answers: int) -> None:
        console.say(f"round {number}/{wanted}: {answers} {'device' if answers == 1 else 'devices'} answered")

    Launch(found, console.say, on_round).train(rounds or 0, resume=resume, wait_for=wait_for, patience=patience)
    console.say(f"Trained. The run is in {folder / 'run'}.")


@server.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """Say how the server is: whether it runs, its devices by state, its run.

    Examples:
        fairfold server status fleet
    """
    told = opened(folder).status()
    if as_json:
        typer.echo(json.dumps(told))
        return
    Terminal().print(_table(told))


def _say_privacy(console: Terminal, settings: "Settings | None") -> None:
    """What the server sees of its devices; or, where nobody has said, how that is decided."""
    from fairfold.privacy.ledger import USUAL_COHORT
    from fairfold.protocol.noising import privacy_facts, privacy_words

    if settings is None:
        console.say(
            f"Privacy is decided when a run begins: its server sees sums alone (secure) where {USUAL_COHORT} devices "
            "or more are connected, and each answer (plain) else. `--set privacy.level=...` decides it for good; "
            "`fairfold node enrol ... --secure` has a device refuse whatever is plain (docs/privacy.md)."
        )
        return
    for sentence in privacy_words(privacy_facts(settings)):
        console.say(sentence)


def _table(told: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("what", "how it is", title=f"Server {told['server']}", title_justify="left")
    table.add_row("server", "running" if told["running"] else f"[yellow]not running[/yellow]: {told['words']}")
    table.add_row("catalogue", f"{told['items']:,} items")
    if told["running"]:
        states: dict[str, int] = {}
        for node in told["nodes"]:
            states[node["state"]] = states.get(node["state"], 0) + 1
        table.add_row("devices", ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none")
        table.add_row("invitations", ", ".join(f"{count} {state}" for state, count in told["invites"].items()))
    table.add_row("privacy", " ".join(told["privacy"]).removeprefix("Privacy: "))
    run = told["run"]
    quality = f", {run['metric']} {run['quality']:.4f}" if run.get("quality") is not None else ""
    ended = "ended" if run["result"] else "not ended"
    table.add_row("run", f"{run['rounds']} rounds, {ended}{quality}" if run["rounds"] else "none yet")
    if told["running"] and told["runs"]:
        newest = told["runs"][0]
        table.add_row("newest run", f"{newest['end'] or newest['state']} {newest['details']}".strip())
    return table
