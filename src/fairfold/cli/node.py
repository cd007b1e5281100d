"""``fairfold node``: a device of a fleet."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fairfold.cli.console import Terminal
from fairfold.cli.server import Json, require_flower

PATIENCE = 60.0  # seconds to wait for a server that does not listen yet
DEFAULT = Path("~/.local/state/fairfold/node")
node = typer.Typer(help="Run a device of a fleet: enrol it, start it, see how it is, recommend.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Folder of the device.")]


@node.command()
def enrol(
    token: Annotated[str, typer.Argument(help="The token that `fairfold server invite` printed.")],
    server: Annotated[str, typer.Option(help="Address of the server: https://server.example.org:8000.")],
    data: Annotated[
        Path, typer.Option(help="CSV or SQLite file of what the device's users have; it is read where it lies.")
    ],
    capacity: Annotated[str, typer.Option(help="What the device can hold: 40MB, or 16x for a sixteenth of the model.")],
    folder: Annotated[Path, typer.Option(help="Folder for the device's key and all that it keeps.")] = DEFAULT,
    test: Annotated[
        Path | None, typer.Option(help="File of the same form with what the model should guess, to judge it by.")
    ] = None,
    holdout: Annotated[
        float,
        typer.Option(min=0, max=0.5, help="Without --test: the share of the data to keep back to judge the model by."),
    ] = 0.0,
    model: Annotated[str, typer.Option(help="A model of your own to train, package.module:Class.")] = "",
    app: Annotated[str, typer.Option(help="A ClientApp of your own, package.module:app, in place of fairfold's.")] = "",
    secure: Annotated[
        bool, typer.Option("--secure", help="Refuse whatever is not summed under masks with other devices.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Refuse whatever is not summed under masks and with noise.")
    ] = False,
    epsilon: Annotated[
        float,
        typer.Option(min=1e-6, max=100, help="ε: what all noisy sums of the device's lifetime may cost together."),
    ] = 8.0,
    smallest_cohort: Annotated[
        int, typer.Option(min=2, help="Take part in no secure sum over fewer devices, whatever the server says.")
    ] = 100,
    roster: Annotated[
        Path | None, typer.Option(help="File of all devices' public keys, from somebody who is not the server.")
    ] = None,
    begin: Annotated[
        bool, typer.Option("--start", help="Also start the device, as `fairfold node start` does.")
    ] = False,
) -> None:
    """Make a key on this device, pin the server's authority, and register the key with a token.

    The private key does not leave the device; the token is shown only to the server that gave it out.

    Examples:
        fairfold node enrol TOKEN --server https://server.example.org:8000 --data mine.csv --capacity 40MB
    """
    require_flower()
    from fairfold.errors import InvalidData
    from fairfold.flower.local import LocalFile
    from fairfold.flower.node import NodeFolder
    from fairfold.flower.node import enrol as register
    from fairfold.flower.tokens import Token
    from fairfold.subspace import Capacity

    console, folder = Terminal(), folder.expanduser()
    made = NodeFolder(
        folder.absolute(), server, str(data.absolute()), str(Capacity.parse(capacity)),
        "" if test is None else str(test.absolute()), holdout, model, app,
        "private" if private else "secure" if secure else "", smallest_cohort,
        "" if roster is None else str(roster.absolute()), epsilon,
    )  # fmt: skip
    items = register(made, Token.parse(token), PATIENCE)
    follows = "" if begin else f" Next: fairfold node start {folder}"
    console.say(f"Enrolled with {server} (a catalogue of {items:,} items).{follows}")
    if not app:
        try:
            LocalFile(made.data, catalogue=made.catalogue if made.catalogue.exists() else None).histories(items)
        except InvalidData as error:  # it may be mended until the server asks
            console.say(f"This device cannot answer yet: {error}")
    if begin:
        start(folder)


@node.command()
def start(folder: Folder = DEFAULT) -> None:
    """Run this device in the foreground, until Ctrl-C or SIGTERM: it waits for work and does it.

    Examples:
        fairfold node start device1
    """
    require_flower()
    from fairfold.flower.node import NodeFolder

    found = NodeFolder.open(folder.expanduser())
    sys.stdout.flush()
    # Another program in this process: what a command line needs would weigh on a device for as long as it waits.
    os.execv(sys.executable, [sys.executable, "-m", "fairfold.flower.watch", str(found.folder)])


@node.command()
def status(folder: Folder = DEFAULT, as_json: Json = False) -> None:
    """Say how this device is: connected, waiting, refused (and why), working or stopped.

    Examples:
        fairfold node status device1
    """
    require_flower()
    from rich.table import Table

    from fairfold.flower.node import NodeFolder
    from fairfold.runs.units import human_bytes, human_seconds

    told = NodeFolder.open(folder.expanduser()).status()
    if as_json:
        typer.echo(json.dumps(told))
        return
    table = Table("what", "how it is", title=f"Device of {told['server']}", title_justify="left")
    since = f", for {human_seconds(time.time() - told['since'])}" if "since" in told else ""
    table.add_row("state", f"{told.get('state', 'never started')}{since}")
    table.add_row("last word", str(told.get("words", "")))
    if "node" in told:
        table.add_row("node", f"{told['node']}, as the server's log has it")
    table.add_row("can hold", told["capacity"])
    table.add_row("data", told["data"])
    table.add_row("answers", f"{told.get('answers', 0)}, and {told.get('failures', 0)} failures")
    if failure := told.get("failure"):
        table.add_row("last failure", f"{human_seconds(time.time() - failure['at'])} ago: {failure['words']}")
    for what, how in _privacy(told["privacy"]):
        table.add_row(what, how)
    if last := told.get("last"):
        peak = f", peak memory {human_bytes(last['peak'])}" if last.get("peak") else ""
        table.add_row("last work", f"{human_seconds(last.get('seconds') or 0.0)}{peak}")
    if model := told.get("model"):
        given = f"{human_bytes(model['bytes'])}, given {human_seconds(time.time() - model['at'])} ago"
        table.add_row("model", f"{given}: fairfold node recommend")
    Terminal().print(table)


def _privacy(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What this device lets out, and what that has cost; nothing is spent where sums have no noise."""
    asks = {"plain": "nothing: it answers whatever it is asked", "secure": "sums under masks", "private": "noisy sums"}
    few = f", of {told['smallest cohort']:,} devices or more" if "smallest cohort" in told else ""
    yield "privacy it asks for", asks[told["level"]] + (few if told["level"] != "plain" else "")
    if "problem" in told:
        yield "ε spent", f"not known: {told['problem']}"
    elif told["sums"] or told["level"] == "private":
        left = "" if told["spent"] < told["epsilon"] * 0.999 else "; it takes no further part in noisy sums"
        allowed = f"{told['spent']:.3f} of {told['epsilon']:g} (δ = {told['delta']:g})"
        yield "ε spent", f"{allowed}, in {told['sums']} sums{left}"
