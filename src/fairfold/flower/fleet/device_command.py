"""``fairfold-device``, the command of the small wheel: enrol, start and recommend where little is installed."""

import argparse
import os
import sys
from pathlib import Path

from fairfold.errors import FairfoldError, printable

DEFAULT = Path("~/.local/state/fairfold/node")
WAIT_TIMEOUT = 60.0  # seconds to wait for a server that does not listen yet


def main(words: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser("fairfold-device", description="A small device of a fairfold fleet.")
    commands = parser.add_subparsers(dest="command", required=True)
    enrol = commands.add_parser("enrol", help="Make a key, pin the server's authority, and register with a token.")
    enrol.add_argument("token", help="What `fairfold server invite` printed.")
    enrol.add_argument("--server", required=True, help="https://server.example.org:8000")
    enrol.add_argument("--data", required=True, type=Path, help="CSV or SQLite file, which never leaves the device.")
    enrol.add_argument("--capacity", required=True, help="40MB, or 16x for a sixteenth of the model.")
    enrol.add_argument("--holdout", type=float, default=0.0, help="The share of the data to evaluate the model by.")
    enrol.add_argument("--privacy", choices=("", "secure", "private"), default="", help="Refuse less than this.")
    enrol.add_argument("--min-cohort", type=int, default=100, help="Refuse secure sums over fewer devices.")
    enrol.add_argument("--roster", type=Path, help="All devices' public keys, from a source other than the server.")
    start = commands.add_parser("start", help="Wait for tasks and reply to them, until it is ended.")
    recommend = commands.add_parser("recommend", help="The best items for a user of the data, offline.")
    recommend.add_argument("--user", default="", help="The user's name; a file without users needs none.")
    recommend.add_argument("--top", type=int, default=10)
    for command in (enrol, start, recommend):
        command.add_argument("--folder", type=Path, default=DEFAULT, help="The device's folder.")
    given = parser.parse_args(words)
    given.folder = given.folder.expanduser().absolute()
    try:
        {"enrol": _enrol, "start": _start, "recommend": _recommend}[given.command](given)
    except FairfoldError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return 2
    return 0


def _enrol(given: argparse.Namespace) -> None:
    from fairfold.flower.fleet.credentials import Token
    from fairfold.flower.fleet.node import NodeFolder, enrol

    roster = "" if given.roster is None else str(given.roster.absolute())
    node = NodeFolder(
        given.folder,
        given.server,
        str(given.data.absolute()),
        given.capacity,
        holdout=given.holdout,
        privacy=given.privacy,
        min_cohort=given.min_cohort,
        roster=roster,
    )
    items = enrol(node, Token.parse(given.token), WAIT_TIMEOUT)
    sys.stdout.write(f"Enrolled with {printable(given.server)} (a catalogue of {items:,} items).\n")


def _start(given: argparse.Namespace) -> None:
    from fairfold.flower.fleet.node import NodeFolder

    found = NodeFolder.open(given.folder)
    # Another program in this process, without the memory of this one.
    os.execv(sys.executable, [sys.executable, "-m", "fairfold.flower.fleet.node_loop", str(found.folder)])


def _recommend(given: argparse.Namespace) -> None:
    from fairfold.device import offline
    from fairfold.device.requests import NeedsWorker
    from fairfold.device.stored_model import read_model
    from fairfold.errors import InvalidData, InvalidSettings
    from fairfold.flower.fleet.node import NodeFolder
    from fairfold.flower.local_data import LocalFile, read_item_names

    node = NodeFolder.open(given.folder)
    catalogue = node.catalogue if node.catalogue.exists() else None
    model = read_model(node.state)
    names = read_item_names(catalogue, model.items) if catalogue else None
    histories = LocalFile(node.data, catalogue=catalogue).histories(model.items, ratings=model.kind == "ratings")
    if given.user not in histories:
        raise InvalidData(f"user {given.user!r}", "a user of the device's file", "Name one with --user.")
    try:
        found = offline.recommend(node.state, model, given.user, histories[given.user], given.top)
    except NeedsWorker as left:
        remedy = "Install fairfold, and run: fairfold node recommend."
        raise InvalidSettings(f"a model of {left}", "one that a small device scores for this user", remedy) from None
    for item, _score in found:
        sys.stdout.write(f"{item if names is None else printable(names[item])}\n")


if __name__ == "__main__":
    sys.exit(main())
