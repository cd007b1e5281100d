"""What the gate answers itself, beside Flower's SuperLink: devices that enrol, and questions of the server's operator.

A device asks for the authority's certificate before it trusts anybody; then, over a connection that it trusts, it shows
its token and its public key. All else is for the server's own machine.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairfold.flower.tokens import SECRET, Invitations, Refused

OWN = "/v1/fairfold/"
LARGEST = 4096  # bytes of a request
AHEAD, BEHIND = 4.0, 300.0  # seconds that a device's clock may differ by: Flower's limits for its signatures
RECENT = 5  # runs that are told of
KEY_FORM = b"-----BEGIN PUBLIC KEY-----\n"
log = logging.getLogger("fairfold.flower")


@dataclass(frozen=True)
class Answer:
    """A status, and what is sent: an object as JSON, or a file."""

    status: int
    content: dict[str, Any] | Path


@dataclass(frozen=True)
class Route:
    """What answers a path: a function of Flower's state and of the request's body; for this machine alone, or all."""

    method: str
    answer: Callable[[Any, bytes], Answer]
    home: bool = False


class Reception:
    """Answers from the folder of a server (:mod:`.server`)."""

    def __init__(self, folder: Path, items: int) -> None:
        self.folder, self.items = folder, items
        self.invitations = Invitations(folder / "invites")
        self.routes = {
            OWN + "authority": Route("GET", lambda _state, _body: Answer(200, folder / "keys" / "ca.crt")),
            OWN + "catalogue": Route("GET", lambda _state, _body: self._catalogue()),
            OWN + "enrol": Route("POST", self.enrol),
            OWN + "nodes": Route("GET", self.nodes, home=True),
            OWN + "runs": Route("GET", self.runs, home=True),
        }

    @classmethod
    def of(cls, folder: Path) -> "Reception":
        """Of the server in a folder."""
        from fairfold.flower.server import ServerFolder

        return cls(folder, ServerFolder.open(folder).items)

    def _catalogue(self) -> Answer:
        path = self.folder / "catalogue.txt"
        return Answer(200, path) if path.exists() else refusal(404, "items have numbers here, and no names")

    def enrol(self, state: Any, body: bytes) -> Answer:
        """Register a device's key for a token."""
        try:
            secret, key, clock = _read(body)
            off = clock - time.time()
            if not -BEHIND < off < AHEAD:
                words = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the server's"
                raise Refused(403, f"wrong clock: this device's is {words}. Set it, and try again")
            with self.invitations.use(secret, key) as first:
                node = self._register(state, key, first=first)
        except Refused as refused:
            log.warning("a device was not enrolled: %s", refused)
            return refusal(refused.status, str(refused))
        log.info("a device was enrolled as node %d", node)
        names = (self.folder / "catalogue.txt").exists()
        return Answer(200, {"node": str(node), "items": self.items, "catalogue": names})

    def _register(self, state: Any, key: bytes, *, first: bool) -> int:
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

        known = state.get_node_id_by_public_key(key)
        if known is not None and first:
            raise Refused(409, "this device's key is registered already: the token is still good for another device")
        if known is not None:
            return int(known)
        return int(state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL))

    def nodes(self, state: Any, _body: bytes) -> Answer:
        """Everybody who is registered, and whether they are connected."""
        found = [
            {"node": str(one.node_id), "state": one.status, "since": one.last_activated_at or one.registered_at}
            for one in state.get_node_info()
        ]
        return Answer(200, {"nodes": found, "invites": self.invitations.counts()})

    def runs(self, state: Any, _body: bytes) -> Answer:
        """The newest runs."""
        found = state.get_run_info(order_by="pending_at", ascending=False, limit=RECENT)
        runs = [
            {"run": str(one.run_id), "state": one.status.status, "end": one.status.sub_status,
             "details": one.status.details, "started": one.pending_at, "ended": one.finished_at}
            for one in found
        ]  # fmt: skip
        return Answer(200, {"runs": runs})


def refusal(status: int, reason: str) -> Answer:
    """A refusal in the form that Flower has for its own."""
    return Answer(status, {"detail": reason})


def _read(body: bytes) -> tuple[bytes, bytes, float]:
    """The token's secret, the public key as Flower keeps it, and the device's clock."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    try:
        content = json.loads(body)
        secret, clock = bytes.fromhex(content["secret"]), content["time"]
        text = content["key"].encode("ascii")
        if len(secret) != SECRET or type(clock) not in (int, float) or not text.startswith(KEY_FORM):
            raise ValueError
        key = load_pem_public_key(text)
        if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
            raise ValueError
        # Written out again: one key has one form, by which it is found.
        return secret, key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), float(clock)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, UnsupportedAlgorithm):
        raise Refused(400, "not a request to enrol: needed are a token, a P-384 key and a time") from None
