"""The routes that the gateway answers itself: enrolment of devices, and the status for the server's operator.

A device fetches the authority's certificate; then, over a connection that it trusts by that, it sends its token and its
public key. What a person has to know before joining is there for everybody, all else needs the secret of the folder.
"""

import json
import logging
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

from fairfold.flower.fleet.connection import API_PREFIX, CLOCK_AHEAD, CLOCK_BEHIND, clock_difference
from fairfold.flower.fleet.credentials import SECRET_BYTES, Invitations, TokenRefused, fingerprint
from fairfold.flower.fleet.server import PRIVACY, SETTINGS, ServerFolder
from fairfold.flower.roster import Roster
from fairfold.privacy.secure.keys import point_of
from fairfold.privacy.secure.log import Enrolled

MAX_REQUEST_BYTES = 4096
RECENT_RUNS = 5
SAMPLE = "sample.csv"
KEY_FORM = b"-----BEGIN PUBLIC KEY-----\n"
log = logging.getLogger("fairfold.flower")


class HttpResponse(NamedTuple):
    """A status, and the content: an object to send as JSON, a file, or bytes with headers of their own."""

    status: int
    content: dict[str, Any] | Path | bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    start: int = 0  # the first byte of a file to send


class Route(NamedTuple):
    """The handler of a path: a function of Flower's state, and of the request's body (of a GET, its query)."""

    method: str
    handler: Callable[[Any, bytes], HttpResponse]
    control: bool = False


class Enrolment:
    """Enrols devices with the server of a folder (:mod:`.server`), and lists its nodes and runs."""

    def __init__(self, folder: Path, items: int, roster: Roster, operator: str = "") -> None:
        self.folder, self.items, self.roster = folder, items, roster
        self.operator = operator
        self.catalogue, self.sample = folder / "catalogue.txt", folder / SAMPLE
        self.invitations = Invitations(folder / "invites")
        self.secret = folder / "control"
        self.routes = {
            API_PREFIX + "authority": Route("GET", lambda _state, _body: HttpResponse(200, folder / "keys" / "ca.crt")),
            API_PREFIX + "fleet": Route("GET", self.describe),
            API_PREFIX + "catalogue": Route("GET", self.send_catalogue),
            API_PREFIX + "sample": Route("GET", self.send_sample),
            API_PREFIX + "enrol": Route("POST", self.enrol),
            API_PREFIX + "roster": Route("GET", self.send_roster),
            API_PREFIX + "nodes": Route("GET", self.nodes, control=True),
            API_PREFIX + "states": Route("GET", self.states, control=True),
            API_PREFIX + "runs": Route("GET", self.runs, control=True),
        }

    @classmethod
    def of(cls, folder: Path) -> "Enrolment":
        """Open the server's folder."""
        server = ServerFolder.open(folder)
        return cls(folder, server.items, server.roster(), server.operator)

    def describe(self, _state: Any, _body: bytes) -> HttpResponse:
        """Describe the fleet: who runs it, its catalogue, and the privacy level of its runs ("" if not decided)."""
        level = ""
        for path in (self.folder / SETTINGS, self.folder / PRIVACY):
            if path.exists() and not level:
                content = tomllib.loads(path.read_text(encoding="utf-8"))
                level = str(content.get("privacy", content).get("level", ""))
        authority = fingerprint((self.folder / "keys" / "ca.crt").read_bytes()).hex()
        there = {"catalogue": self.catalogue.exists(), "sample": self.sample.exists()}
        content = {"operator": self.operator, "items": self.items, "privacy": level, "authority": authority, **there}
        return HttpResponse(200, content)

    def send_sample(self, _state: Any, _body: bytes) -> HttpResponse:
        """Example data for who has none: a CSV file that the operator may put into the folder."""
        if not self.sample.exists():
            return error_response(404, "there is no example data here")
        return HttpResponse(200, self.sample)

    def send_catalogue(self, _state: Any, _body: bytes) -> HttpResponse:
        """The names of the items."""
        if not self.catalogue.exists():
            return error_response(404, "items have numbers here, and no names")
        return HttpResponse(200, self.catalogue)

    def send_roster(self, _state: Any, query: bytes) -> HttpResponse:
        """The signed log of enrolled keys, from a byte on: a device fetches the lines that it lacks."""
        if not self.roster.path.exists():
            return error_response(404, "no device has enrolled")
        if (start := re.fullmatch(rb"(?:from=(\d{1,18}))?", query)) is None:
            return error_response(400, "not a place in the roster: write roster?from=BYTES")
        return HttpResponse(200, self.roster.path, start=int(start[1] or 0))

    def enrol(self, state: Any, body: bytes) -> HttpResponse:
        """Register a device's key for a token."""
        try:
            secret, key, clock = _parse_request(body)
            ahead = clock - time.time()
            if not 5 - CLOCK_BEHIND < ahead < CLOCK_AHEAD - 1:  # else Flower would refuse its signatures
                difference = clock_difference(ahead)
                raise TokenRefused(403, f"wrong clock: this device's is {difference}. Set it, and try again")
            with self.invitations.use(secret, key) as invitation:
                node = self._register(state, key, first=invitation.used is None)
                one = self.roster.add(Enrolled(_point(key), node, invitation.users))
        except TokenRefused as refused:
            log.warning("a device was not enrolled: %s", refused)
            return error_response(refused.status, str(refused))
        log.info("a device was enrolled as node %d", node)
        content = {"node": str(node), "items": self.items, "catalogue": self.catalogue.exists()}
        return HttpResponse(200, content | {"users": one.users, "signer": self.roster.public.hex()})

    def _register(self, state: Any, key: bytes, *, first: bool) -> int:
        known = state.get_node_id_by_public_key(key)
        if known is None:
            known = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL)
        elif first:
            message = "this device's key is registered already: the token is still good for another device"
            raise TokenRefused(409, message)
        return int(known)

    def nodes(self, state: Any, _body: bytes) -> HttpResponse:
        """All registered nodes with their states, and the number of invitations."""
        nodes = [
            {"node": str(one.node_id), "state": one.status, "since": one.last_activated_at or one.registered_at}
            for one in state.get_node_info()
        ]
        return HttpResponse(200, {"nodes": nodes, "invites": self.invitations.counts()})

    def states(self, state: Any, _body: bytes) -> HttpResponse:
        """The number of registered nodes in each state, and of invitations."""
        states = Counter(one.status for one in state.get_node_info())
        return HttpResponse(200, {"states": dict(states), "invites": self.invitations.counts()})

    def runs(self, state: Any, _body: bytes) -> HttpResponse:
        """The most recent runs."""
        runs = [
            {"run": str(run.run_id), "state": run.status.status, "end": run.status.sub_status}
            | {"details": run.status.details, "started": run.pending_at, "ended": run.finished_at}
            for run in state.get_run_info(order_by="pending_at", ascending=False, limit=RECENT_RUNS)
        ]
        return HttpResponse(200, {"runs": runs})


def _point(key: bytes) -> bytes:
    loaded = load_pem_public_key(key)
    assert isinstance(loaded, EllipticCurvePublicKey)
    return point_of(loaded)


def error_response(status: int, reason: str) -> HttpResponse:
    """A refusal in the form of Flower's own."""
    return HttpResponse(status, {"detail": reason})


def _parse_request(body: bytes) -> tuple[bytes, bytes, float]:
    """Parse the token's secret, the public key in the form that Flower stores, and the device's clock."""
    try:
        content = json.loads(body)
        secret, clock = bytes.fromhex(content["secret"]), content["time"]
        text = content["key"].encode("ascii")
        if len(secret) != SECRET_BYTES or type(clock) not in (int, float) or not text.startswith(KEY_FORM):
            raise ValueError
        key = load_pem_public_key(text)
        if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
            raise ValueError
        # Encoded again: Flower finds a key by its bytes, so it needs one form.
        return secret, key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), float(clock)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, UnsupportedAlgorithm):
        raise TokenRefused(400, "not a request to enrol: needed are a token, a P-384 key and a time") from None
