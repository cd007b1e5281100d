"""The log of enrolled keys as test vectors: invitations and cohorts one after another, and what a device replies."""

import hashlib
import tempfile
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fairfold.errors import RequestRefused
from fairfold.privacy.secure import keys
from fairfold.privacy.secure.client import Memory, SecureClient
from fairfold.privacy.secure.keys import Identity
from fairfold.privacy.secure.log import Enrolled, Fetch, LogCopy, device_name, line_of, signed_entry
from fairfold.privacy.secure.messages import NO_LOG, Advert, Cohort, LogHead, Session
from fairfold.privacy.secure.segments import SegmentLayout
from tests.vectors.sessions import drawn, fixed_randomness, make_identity

SIGNER, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (3, 4))
MANY = 6  # devices; the recorded one is the first

# What is tried, the head that is named, the log that is shown, the members beside the device, a part of the refusal
Planned = tuple[str, LogHead, bytes, tuple[int, ...], str]


class Log:
    """A log with the keys of some devices, by their numbers."""

    def __init__(self, identities: list[Identity], *numbers: int, signer: Ed25519PrivateKey = SIGNER) -> None:
        self.heads, self.text = [NO_LOG], b""
        for number in numbers:
            one = Enrolled(identities[number].enrolled, 2**63 + 17 * number, 1 + 7 * number)
            line = line_of(one, self.heads[-1], signer.sign(signed_entry(one, self.heads[-1])))
            self.text += line + b"\n"
            self.heads.append(self.heads[-1].after(line))

    @property
    def head(self) -> LogHead:
        """Of all lines."""
        return self.heads[-1]


def identity_of(given: dict[str, str]) -> Identity:
    """The identity of a device as the vectors have it."""
    point, certificate = bytes.fromhex(given["enrolled"]), bytes.fromhex(given["certificate"])
    signer = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(given["signer"]))
    return Identity(device_name(point), point, signer, certificate)


def advert_of(one: Identity, session: Session, draw: bytes) -> Advert:
    """Another device's advert, from some bytes."""
    secrets = [hashlib.sha256(draw + bytes([part])).digest() for part in (0, 1)]
    return one.advert(session.digest, *map(keys.public_of, secrets))


def shown_as(text: bytes, asked: list[int]) -> Fetch:
    """A server whose log is a text, and the bytes from which on it was asked for that."""

    def fetch(start: int) -> Generator[bytes]:
        asked.append(start)
        yield text[start:]

    return fetch


def log_vectors() -> dict[str, Any]:
    """Messages to one device with what its server's log is meanwhile, and its replies or refusals."""
    given = [make_identity(number + 40) for number in range(MANY)]
    identities = [identity_of(one) for one in given]
    log = partial(Log, identities)
    first, grown, forked, changed = log(0, 1, 2), log(0, 1, 2, 3), log(0, 1, 2, 4, 5), log(0, 2, 1, 3, 4)
    foreign, without = log(0, 1, 2, 3, 4, signer=OTHER), log(1, 2, 3)
    spaced = log(0, 1, 2, 3, 4)
    spaced.text = spaced.text.replace(b'": ', b'":')
    plan: list[Planned] = [
        ("an invitation without the log", NO_LOG, first.text, (), "without the roster"),
        ("a log without this device", without.head, without.text, (), "without this device's key"),
        ("another log from then on", first.head, first.text, (), "another roster of 3 lines"),
    ]  # fmt: skip
    later: list[Planned] = [
        ("an invitation without the log", NO_LOG, first.text, (), "without the roster"),
        ("the first log, signed by another", foreign.head, foreign.text, (), "did not sign"),
        ("the first log", first.head, first.text, (1, 2), ""),
        ("the same log", first.head, b"", (1, 2), ""),
        ("a member that is not in it", first.head, b"", (1, 2, 3), "not in the server's roster of 3 lines"),
        ("more lines", grown.head, grown.text, (1, 2, 3), ""),
        ("fewer lines than before", first.head, first.text, (), "after one of 4"),
        ("as many other lines", forked.heads[4], forked.text, (), "another roster of 4 lines"),
        ("more lines of another log", forked.head, forked.text, (), "does not follow"),
        ("lines that are changed", changed.head, changed.text, (), "does not follow"),
        ("more lines than the server shows", spaced.head, grown.text, (), "names 5"),
        ("a line that another signed", foreign.head, grown.text + foreign.text[len(grown.text) :], (), "line 5"),
        ("a line in other bytes", spaced.head, grown.text + spaced.text.splitlines()[-1] + b"\n", (), "line 5"),
        ("a line without its end", spaced.head, log(0, 1, 2, 3, 4).text[:-1], (), "4 lines"),
        ("another head than the lines'", LogHead(5, "ab" * 32), log(0, 1, 2, 3, 4).text, (), "another roster than"),
        ("no log again", NO_LOG, grown.text, (), "without the roster"),
        ("members that were shown another log", grown.head, b"", (-1, -2), "did not sign for this round"),
        ("the log as it was", grown.head, b"", (1, 2), ""),
    ]  # fmt: skip
    return {
        "signer": SIGNER.public_key().public_bytes_raw().hex(),
        "devices": [{"identity": given[0], "name": f"{identities[0].name:x}", "steps": steps_of(identities, steps)}
                    for steps in (plan, later)],
    }  # fmt: skip


def steps_of(identities: list[Identity], plan: list[Planned]) -> list[dict[str, Any]]:
    """The messages of a plan, with a device's replies and refusals."""
    steps, asked = list[dict[str, Any]](), list[int]()

    def take(kind: str, what: str, log: bytes, message: bytes, refusal: str, reply: Callable[[], bytes]) -> None:
        """Record a message, and what the device makes of it."""
        refused, content = "", b""
        try:
            content = reply()
        except RequestRefused as error:
            refused = error.given
        if bool(refused) != bool(refusal) or refusal not in refused:
            raise AssertionError(f"{what}: {refused!r} where {refusal!r} was planned")
        step = {"what": what, "kind": kind, "message": message.hex(), "log": log.decode(), "draws": drawn(kind, draws)}
        steps.append(step | {"asked": list(asked), "refused": refused, "reply": content.hex()})
        asked.clear()

    with tempfile.TemporaryDirectory() as folder, fixed_randomness(7) as draws:
        for turn, (what, head, shown, members, refusal) in enumerate(plan):
            session = Session(5, turn, "train", 3, SegmentLayout.nested((4,)), turn=turn, log=head)
            log = LogCopy(Path(folder) / "log", SIGNER.public_key().public_bytes_raw(), shown_as(shown, asked))
            draws.clear()
            client = SecureClient(session, identities[0], Memory(min_cohort=3, log=log))
            invitation = session.packed(session.digest)
            take("query.secure_keys", what, shown, invitation, "" if members else refusal, client.advertise)
            if not members:
                continue
            others = []
            for number in members:  # below 0: of a device that was shown another log
                lied = replace(session, log=LogHead(head.lines, "cd" * 32)) if number < 0 else session
                others.append(advert_of(identities[abs(number)], lied, bytes([turn, abs(number)])))
            message = Cohort((others[0], client.advert, *others[1:]), (0,) * len((0, *others))).packed(session.digest)
            draws.clear()
            take("query.secure_shares", what, shown, message, refusal, partial(client.share, message))
    return steps
