"""``fairfold node``: a device of a fleet."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fairfold.cli.console import Terminal
from fairfold.cli.server import Json, require_flower

WAIT_TIMEOUT = 60.0  # seconds to wait for a server that does not listen yet
DEFAULT = Path("~/.local/state/fairfold/node")
LYING_SERVER = (
    "Without --roster this device takes the server's word on who else takes part: a lying server could invent all "
    "others, and read this device's data from one sum (docs/privacy.md). They would stand in its signed "
    "roster, which all are shown alike: see `fairfold node roster`. A roster comes from somebody else than the server."
)
node = typer.Typer(
    help="Run a device of a fleet: enrol it, start it, show its status, recommend.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Argument(help="Folder of the device.")]


@node.command()
def enrol(
    token: Annotated[str, typer.Argument(help="The token that `fairfold server invite` printed.")],
    server: Annotated[str, typer.Option(help="Address of the server: https://server.example.org:8000.")],
    data: Annotated[
        Path, typer.Option(help="CSV or SQLite file of the device's interactions; it never leaves the device.")
    ],
    capacity: Annotated[str, typer.Option(help="What the device can hold: 40MB, or 16x for a sixteenth of the model.")],
    folder: Annotated[Path, typer.Option(help="Folder for the device's key and state.")] = DEFAULT,
    test: Annotated[Path | None, typer.Option(help="File of held-out interactions to evaluate the model by.")] = None,
    holdout: Annotated[
        float, typer.Option(min=0, max=0.5, help="Without --test: the share of the data to hold out.")
    ] = 0.0,
    model: Annotated[str, typer.Option(help="A model of your own to train, package.module:Class.")] = "",
    app: Annotated[str, typer.Option(help="A ClientApp of your own, package.module:app, in place of fairfold's.")] = "",
    secure: Annotated[bool, typer.Option("--secure", help="Refuse all but secure aggregation.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Refuse all but secure aggregation with noise.")] = False,
    epsilon: Annotated[
        float, typer.Option(min=1e-6, max=100, help="ε: the privacy budget of the device's lifetime.")
    ] = 8.0,
    min_cohort: Annotated[
        int, typer.Option(min=2, help="Refuse secure aggregation over fewer devices, whatever the server requests.")
    ] = 100,
    roster: Annotated[
        Path | None, typer.Option(help="File of all devices' public keys, from a source other than the server.")
    ] = None,
    begin: Annotated[
        bool, typer.Option("--start", help="Also start the device, as `fairfold node start` does.")
    ] = False,
) -> None:
    """Make a key on this device, pin the server's authority, and register the key with a token.

    The private key does not leave the device; the token is sent only to the server that issued it.

    Examples:
        fairfold node enrol TOKEN --server https://server.example.org:8000 --data mine.csv --capacity 40MB
    """
    require_flower()
    from fairfold.errors import InvalidData
    from fairfold.flower.fleet.credentials import Token
    from fairfold.flower.fleet.node import NodeFolder
    from fairfold.flower.fleet.node import enrol as register
    from fairfold.flower.local_data import LocalFile
    from fairfold.subspace import Capacity

    console = Terminal()
    folder = folder.expanduser()
    made = NodeFolder(
        folder.absolute(),
        server,
        data=str(data.absolute()),
        capacity=str(Capacity.parse(capacity)),
        test="" if test is None else str(test.absolute()),
        holdout=holdout,
        model=model,
        app=app,
        privacy="private" if private else "secure" if secure else "",
        min_cohort=min_cohort,
        roster="" if roster is None else str(roster.absolute()),
        epsilon=epsilon,
    )
    items = register(made, Token.parse(token), WAIT_TIMEOUT)
    next_step = "" if begin else f" Next: fairfold node start {folder}"
    console.echo(f"Enrolled with {server} (a catalogue of {items:,} items).{next_step}")
    if made.privacy and roster is None:
        console.echo(LYING_SERVER)
    if not app:
        try:
            catalogue = made.catalogue if made.catalogue.exists() else None
            users = len(LocalFile(made.data, catalogue=catalogue).histories(items))
            allowed = NodeFolder.open(folder).users if (folder / NodeFolder.FILE).exists() else 0
            if 0 < allowed < users:
                console.echo(
                    f"{data} has {users} users, and the invitation is for {allowed}: the server leaves it out. "
                    f"Ask for another (`fairfold server invite --users {users}`), and enrol in a new folder."
                )
        except InvalidData as error:  # it may be corrected until the first round
            console.echo(f"This device cannot reply yet: {error}")
    if begin:
        start(folder)


@node.command()
def start(folder: Folder = DEFAULT) -> None:
    """Run this device in the foreground until Ctrl-C or SIGTERM: it waits for tasks and replies to them.

    Examples:
        fairfold node start device1
    """
    require_flower()
    from fairfold.flower.fleet.node import NodeFolder

    found = NodeFolder.open(folder.expanduser())
    sys.stdout.flush()
    # Another program in this process, without the memory that the command line needs.
    os.execv(sys.executable, [sys.executable, "-m", "fairfold.flower.fleet.node_loop", str(found.folder)])


@node.command()
def status(folder: Folder = DEFAULT, as_json: Json = False) -> None:
    """Show the status of this device: connected, waiting, refused (and why), working or stopped.

    Examples:
        fairfold node status device1
    """
    require_flower()
    from fairfold.flower.fleet.node import NodeFolder
    from fairfold.runs.units import human_bytes, human_seconds

    current = NodeFolder.open(folder.expanduser()).status()
    if as_json:
        typer.echo(json.dumps(current))
        return

    def ago(at: float) -> str:
        return human_seconds(time.time() - at)

    table = Table("", "status", title=f"Device of {current['server']}", title_justify="left")
    since = f", for {ago(current['since'])}" if "since" in current else ""
    table.add_row("state", f"{current.get('state', 'never started')}{since}")
    table.add_row("last message", str(current.get("message", "")))
    if "node" in current:
        table.add_row("node", f"{current['node']}, as in the server's log")
    table.add_row("capacity", current["capacity"])
    table.add_row("data", current["data"])
    table.add_row("replies", f"{current.get('replies', 0)}, and {current.get('failures', 0)} failures")
    if failure := current.get("failure"):
        table.add_row("last failure", f"{ago(failure['at'])} ago: {failure['message']}")
    for name, value in _privacy_rows(current["privacy"]):
        table.add_row(name, value)
    if roster := current.get("roster"):
        added = f", {roster['added']} of them added since `fairfold node roster` was last run" * bool(roster["added"])
        table.add_row("server's roster", f"{roster['devices']} devices{added}")
    if last := current.get("last"):
        peak = f", peak memory {human_bytes(last['peak'])}" if last.get("peak") else ""
        table.add_row("last task", f"{human_seconds(last.get('seconds') or 0.0)}{peak}")
    if model := current.get("model"):
        table.add_row("model", f"{human_bytes(model['bytes'])}, {ago(model['at'])} old: fairfold node recommend")
    Terminal().print(table)


@node.command()
def roster(
    folder: Folder = DEFAULT,
    other: Annotated[
        str, typer.Option(help="What another device's command printed, 12:HEAD: whether both see one log.")
    ] = "",
) -> None:
    """Check the server's signed log of enrolled keys, and print it: the same for all devices, or the server lies.

    It only grows: a line that this device has seen cannot be changed or left out. Devices that are invented stand in it
    for all to see.

    Examples:
        fairfold node roster device1
        fairfold node roster device1 --other 3:HEAD
    """
    require_flower()
    from fairfold.errors import InvalidSettings
    from fairfold.flower.fleet.node import NodeFolder, read_server_roster
    from fairfold.flower.roster import openssh_line

    number, _, head = other.partition(":")
    if other and not (number.isdecimal() and head):
        raise InvalidSettings(f"--other {other}", "a number of lines and their head, 12:HEAD", "Copy it whole.")
    opened, compared = NodeFolder.open(folder.expanduser()), (int(number), head) if other else None
    entries, found, added = read_server_roster(opened, compared)
    typer.echo(f"# {len(entries)} devices, {added} of them new; compare with others: {found.lines}:{found.hash}")
    for one in entries:
        typer.echo(openssh_line(one))


def _privacy_rows(budget: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The privacy level that this device requires, and what noisy sums have spent of its budget."""
    levels = {"plain": "none: it replies to every request", "secure": "secure sums", "private": "noisy sums"}
    cohort = f", of {budget['min cohort']:,} devices or more" if "min cohort" in budget else ""
    served = "" if budget["level"] == budget.get("chosen", budget["level"]) else ", as it has taken part in such before"
    yield "required privacy", levels[budget["level"]] + (cohort if budget["level"] != "plain" else "") + served
    if budget["level"] != "plain" and not budget.get("roster", True):
        yield "own roster", "none: a lying server could invent all other devices; they would stand in its own roster"
    if "problem" in budget:
        yield "ε spent", f"not known: {budget['problem']}"
    elif budget["sums"] or budget["level"] == "private":
        end = "" if budget["spent"] < budget["epsilon"] * 0.999 else "; it takes no further part in noisy sums"
        spent = f"{budget['spent']:.3f} of {budget['epsilon']:g} (δ = {budget['delta']:g})"
        yield "ε spent", f"{spent}, in {budget['sums']} sums{end}"


def node_recommend(
    folder: Annotated[Path, typer.Argument(help="Folder of the device.")],
    user: Annotated[str | None, typer.Option(help="One of its users, where it has several.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of items to recommend.")] = 10,
    data: Annotated[Path | None, typer.Option(help="The device's own file; default as it was enrolled.")] = None,
) -> None:
    """Recommend items by the device's stored model and its own file; nothing is sent.

    Examples:
        fairfold node recommend device3 --user 100 --top 3
    """
    from fairfold.device import offline
    from fairfold.device.requests import NeedsWorker
    from fairfold.device.stored_model import MODEL_FILE, read_model
    from fairfold.errors import InvalidData, InvalidSettings
    from fairfold.flower.fleet.node import NodeFolder
    from fairfold.flower.local_data import LocalFile, read_item_names

    state = folder if (folder / MODEL_FILE).is_file() else folder / "state"
    catalogue = folder / "catalogue.txt"
    enrolled = (folder / NodeFolder.FILE).is_file()
    if data is None and enrolled:
        data = Path(NodeFolder.open(folder).data)
    is_run = (folder / "settings.toml").is_file()  # whose model.safetensors is the server's
    if not enrolled and (is_run or not (state / MODEL_FILE).is_file()):
        remedy = "`fairfold node enrol` makes one; `fairfold federate --out trial` makes trial/nodes/0 and others."
        if (folder / "nodes" / "0").is_dir():
            remedy = f"Those of its devices are in {folder}/nodes: `fairfold node recommend {folder}/nodes/0`."
        elif is_run:
            remedy = f"It is that of a run or a server: `fairfold recommend {folder} --history 1,5,9`."
        raise InvalidSettings(f"{folder}, which is not the folder of a device", "one that enrolled", remedy)
    if data is None:
        remedy = f"Name the device's file: `fairfold node recommend {folder} --data FILE`."
        raise InvalidSettings(f"{folder}, which does not name its data", "--data", remedy)
    model = read_model(state)
    names = read_item_names(catalogue, model.items) if catalogue.is_file() else None
    source = LocalFile(data, catalogue=catalogue if names is not None else None)
    histories = source.histories(model.items, ratings=model.kind == "ratings")
    if not histories:
        raise InvalidData(f"{data}, which holds no interactions", "at least one", "Check the file.")
    some = ", ".join(sorted(histories)[:3])
    if user is None and len(histories) > 1:
        given = f"a device with {len(histories)} users"
        raise InvalidSettings(given, f"--user, such as {some}", "Add --user with the name of one of them.")
    chosen = next(iter(histories), "") if user is None else user
    if chosen not in histories:
        raise InvalidSettings(f"user {chosen!r}", f"a user of {data}, such as {some}", "Check the name.")
    found: list[tuple[int, float]] | list[tuple[int, float | None]]
    try:
        found = offline.recommend(state, model, chosen, histories[chosen], top)
    except NeedsWorker:
        from fairfold.flower import local_scoring  # needs torch

        found = local_scoring.recommend(state, source, chosen, top)
    table = Table()
    for heading, justify in (("rank", "right"), ("item", "left"), ("score", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for rank, (item, score) in enumerate(found, 1):
        table.add_row(str(rank), str(item) if names is None else names[item], "–" if score is None else f"{score:.4f}")
    console = Terminal()
    console.echo(
        f"By the model of a {model.metadata['capacity']} device after round {model.round_number}, on this device."
    )
    console.print(table)
    console.echo(f"Left out: the {len(set(histories[chosen]))} items this user has.")
