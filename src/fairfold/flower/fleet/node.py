"""A node's folder on a device, and how the device enrols. Neither torch nor Flower is imported."""

import contextlib
import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fairfold.atomic_io import locked, make_private_folder, write_atomically
from fairfold.errors import FairfoldError, InvalidSettings, InvalidState
from fairfold.flower.fleet import FleetFolder, PathInside
from fairfold.flower.fleet import connection as link
from fairfold.flower.fleet.connection import API_PREFIX, RefusedByServer, ServerConnection, json_object

if TYPE_CHECKING:
    from fairfold.flower.fleet.credentials import Token
    from fairfold.privacy.secure.log import Enrolled, LogCopy
    from fairfold.privacy.secure.messages import LogHead

STATUS = "status.json"


@dataclass(frozen=True)
class NodeFolder(FleetFolder):
    """A node as ``fairfold node enrol`` made it."""

    FILE: ClassVar[str] = "node.toml"
    WRITTEN_BY: ClassVar[str] = "fairfold node enrol TOKEN --server ..."

    server: str
    data: str
    capacity: str
    test: str = ""  # a file of held-out interactions
    holdout: float = 0.0  # or the share of the data to hold out
    model: str = ""  # the class of a custom model that this device trains, package.module:Class
    app: str = ""  # a custom ClientApp in place of fairfold's, package.module:app
    privacy: str = ""  # "secure": refuse all but secure aggregation; "private": also require noise
    min_cohort: int = 0  # refuse secure aggregation over fewer clients; 0 for the default
    roster: str = ""  # a file of the enrolled public keys, from a source other than the server
    epsilon: float = 0.0  # privacy budget of the device's lifetime; 0 for the default
    delta: float = 0.0
    signer: str = ""  # the public key with which the server signs, in hexadecimal digits
    users: int = 0  # the most users that this device may act for; 0 where the server did not say

    key = PathInside("key")  # the private key, which never leaves the device
    authority = PathInside("ca.crt")  # the certificate of the only authority that the node trusts
    catalogue = PathInside("catalogue.txt")  # the names of the items, where they have names
    known_roster = PathInside("roster.json")  # how many lines its roster had when the owner last looked, and their head
    state = PathInside("state")  # the folder of the client's local state

    def node_config(self) -> dict[str, str | int | float | bool]:
        """The settings that a ClientApp finds in Flower's context."""
        values: dict[str, str | int | float | bool] = {
            "capacity": self.capacity, "data": self.data, "state": str(self.state), "key": str(self.key),
            "test": self.test, "privacy": self.privacy, "min-cohort": self.min_cohort, "roster": self.roster,
            "epsilon": self.epsilon, "delta": self.delta, "signer": self.signer, "server": self.server,
            "authority": str(self.authority),
        }  # fmt: skip
        return {key: value for key, value in values.items() if value}

    def running(self) -> bool:
        """Whether the process of this node is running."""
        try:
            with locked(self.folder, wait=False):
                return False
        except BlockingIOError:
            return True

    def status(self) -> dict[str, Any]:
        """The state that its process last wrote, the stored model, and the privacy budget."""
        from fairfold.device.stored_model import MODEL_FILE

        status: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            status = json.loads((self.folder / STATUS).read_text())
        if not self.running():
            status |= {"state": "stopped", "message": "its process is not running: fairfold node start"}
        with contextlib.suppress(OSError):
            model = (self.state / MODEL_FILE).stat()
            status["model"] = {"bytes": model.st_size, "at": model.st_mtime}
        known = {"server": self.server, "capacity": self.capacity, "data": self.data, "privacy": self.privacy_budget()}
        with contextlib.suppress(FairfoldError):  # a damaged file: sums and `fairfold node roster` say so
            if lines := self.log_copy().head().lines:
                status["roster"] = {"devices": lines, "added": max(lines - self.roster_seen().lines, 0)}
        return known | status

    def log_copy(self) -> "LogCopy":
        """The server's log of enrolled keys, as far as invitations to sums have named it."""
        from fairfold.privacy.participation import LOG_COPY
        from fairfold.privacy.secure.log import LogCopy

        fetch = partial(link.stream_roster, self.server, self.authority)
        return LogCopy(self.state / LOG_COPY, bytes.fromhex(self.signer), fetch)

    def roster_seen(self) -> "LogHead":
        """The server's log when the owner last looked at it."""
        from fairfold.privacy.secure.messages import NO_LOG, LogHead

        try:
            number, head = json.loads(self.known_roster.read_text()) if self.known_roster.exists() else NO_LOG
            return LogHead(int(number), str(head))
        except (ValueError, TypeError) as error:
            given = f"{self.known_roster}: {error}"
            raise InvalidState(given, "a number and a hash", "Remove it to begin anew.") from None

    def privacy_budget(self) -> dict[str, Any]:
        """The required privacy level, and what noisy aggregates have spent by the device's ledger."""
        from fairfold.privacy.ledger import (
            DEFAULT_DELTA,
            DEFAULT_EPSILON,
            DEFAULT_MIN_COHORT,
            LEDGER,
            LEVELS,
            Ledger,
            served_privacy,
        )

        try:
            served = served_privacy(self.state)
        except FairfoldError as error:  # such a device refuses every request
            return {"level": self.privacy or LEVELS[0], "problem": str(error)}
        chosen = self.privacy or LEVELS[0]
        level: dict[str, Any] = {"level": max(chosen, served, key=LEVELS.index), "chosen": chosen, "served": served}
        level["roster"] = bool(self.roster)
        epsilon, delta = self.epsilon or DEFAULT_EPSILON, self.delta or DEFAULT_DELTA
        min_cohort = self.min_cohort or DEFAULT_MIN_COHORT
        try:
            return level | Ledger(self.state / LEDGER, epsilon, delta, min_cohort).summary()
        except FairfoldError as error:
            return level | {"problem": str(error)}


def enrol(node: NodeFolder, token: "Token", wait_timeout: float = 0.0) -> int:
    """Make a key, pin the server's authority, and register the key; returns the number of items in the catalogue.

    The token's secret is sent only to a server whose authority is the one that the token names. One that cannot be
    reached may be about to start, and is tried again for ``wait_timeout`` seconds.
    """
    from fairfold.device.store import save_device_id
    from fairfold.flower.fleet.credentials import fingerprint, make_node_key
    from fairfold.flower.local_data import LocalFile
    from fairfold.privacy.secure.keys import point_of
    from fairfold.privacy.secure.log import device_name

    link.parse_address(node.server)
    if (node.folder / node.FILE).exists():
        raise InvalidState(f"{node.folder}, where a device has enrolled", "a new folder", "Name another with --folder.")
    for path in [] if node.app else filter(None, [node.data, node.test]):
        if not Path(path).is_file():
            raise InvalidSettings(f"{path}, which is no file", "the device's own CSV or SQLite file", "Check the path.")
        LocalFile(path).require_readable()
    make_private_folder(node.folder)
    try:
        certificate = _fetch_authority(node.server, time.monotonic() + wait_timeout)
        if fingerprint(certificate) != token.authority:
            raise RefusedByServer("authority", "wrong authority: this is not the server that issued this token")
        write_atomically(node.authority, certificate)
        if not node.key.exists():  # else an interrupted enrolment is resumed
            make_node_key(node.key)
        private = link.read_key(node.key)
        key = link.public_pem(private)
        save_device_id(node.state, device_name(point_of(private.public_key())))
        body = {"secret": token.secret.hex(), "key": key.decode(), "time": time.time()}
        with contextlib.closing(ServerConnection(node.server, node.authority)) as connection:
            response = json_object(connection.request("POST", API_PREFIX + "enrol", json.dumps(body).encode()))
            if response.get("catalogue"):
                write_atomically(node.catalogue, connection.stream("GET", API_PREFIX + "catalogue"))
    except RefusedByServer as refused:
        needed = "a server that accepts this device"
        raise InvalidState(refused.detail or str(refused), needed, "Nothing was enrolled.") from None
    users = response.get("users", 0)
    signer, users = str(response.get("signer", "")), users if type(users) is int and users >= 0 else 0
    replace(node, signer=signer, users=users).save()
    return int(response.get("items", 0))


def read_server_roster(
    node: NodeFolder, compared: tuple[int, str] | None = None
) -> tuple[list["Enrolled"], "LogHead", int]:
    """Fetch the server's roster and check it; returns the devices, the head, and how many the owner has not yet seen.

    It has to begin with the lines that the owner saw before, with those that invitations to sums have named, and with
    those of another device (their number and head), if given; the server's signer signed them all, and this device's
    key is on one.
    """
    from fairfold.privacy.secure.keys import point_of
    from fairfold.privacy.secure.log import read_log
    from fairfold.privacy.secure.messages import LogHead

    seen = node.roster_seen()
    content = b"".join(link.stream_roster(node.server, node.authority))
    entries, heads = read_log(content, bytes.fromhex(node.signer))
    for known in (seen, node.log_copy().head()):
        if len(heads) <= known.lines or heads[known.lines] != known:
            given = f"a roster that does not begin with the {known.lines} lines that were known"
            raise InvalidState(given, "a log that only grows", "Ask its operator: a line was changed or left out.")
    if compared is not None and len(heads) <= compared[0]:
        given = f"a roster of {len(entries)} lines where the other device was shown {compared[0]}"
        raise InvalidState(given, "one log for all", "Try again; if it stays so, do not trust the server.")
    if compared is not None and heads[compared[0]] != LogHead(*compared):
        given = f"another head of the first {compared[0]} lines than the other device was shown"
        raise InvalidState(given, "one log for all", "The server shows devices different rosters: do not trust it.")
    if point_of(link.read_key(node.key).public_key()) not in {one.key for one in entries}:
        raise InvalidState("a roster without this device's key", "all that have enrolled", "Ask its operator.")
    write_atomically(node.known_roster, json.dumps(heads[-1]).encode())
    return entries, heads[-1], len(entries) - seen.lines


def _fetch_authority(server: str, deadline: float) -> bytes:
    """Fetch the authority's certificate of a server that is not trusted yet."""
    with contextlib.closing(ServerConnection(server, None)) as connection:
        while True:
            try:
                return connection.request("GET", API_PREFIX + "authority")
            except RefusedByServer as refused:
                if refused.kind != "unreachable" or time.monotonic() > deadline:
                    raise
            time.sleep(1.0)
