"""The roster of a server: a signed, append-only log of the keys that it enrolled, with the users that each acts for.

A line names a device's key, its node and its users, and holds the hash of the line before; the server's signer signs
it. So a reader who has seen a line (the *head*) notices when an earlier one is changed, left out or added later: key
transparency in small. A device's name follows from its key, so no device can take another's.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fairfold.atomic_io import write_atomically
from fairfold.checksums import PARSE_ERRORS
from fairfold.device.stored_model import signed_model
from fairfold.errors import InvalidState
from fairfold.privacy.secure.keys import verified

FIRST = "0" * 64  # the head of an empty roster
MAX_USERS = 1_000_000  # of one device
POINT_BYTES = 49  # of a P-384 key, compressed


class Enrolled(NamedTuple):
    """A device of the roster: its key (a compressed point), its node, and the most users that it acts for."""

    key: bytes
    node: int
    users: int

    @property
    def name(self) -> int:
        """The name that follows from its key."""
        return device_name(self.key)


def device_name(key: bytes) -> int:
    """The name of the device with an enrolled key: from 1 to 2⁶³ − 1."""
    digest = hashlib.sha256(b"fairfold device" + key).digest()
    return 1 + int.from_bytes(digest[:8], "big") % (2**63 - 1)


def make_signer(path: Path) -> Ed25519PrivateKey:
    """The key with which a server signs its roster and models; made where there is none."""
    if not path.exists():
        write_atomically(path, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode(), private=True)
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text(encoding="ascii")))
    except (OSError, ValueError) as error:
        needed, remedy = "32 bytes in hexadecimal digits", "Restore it: devices accept nothing that another signs."
        raise InvalidState(f"{path}: {error}", needed, remedy) from None


def openssh_line(one: Enrolled) -> str:
    """A device's public key as in a ``.pub`` file, with its name and users."""
    key = EllipticCurvePublicKey.from_encoded_point(SECP384R1(), one.key)
    line = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return f"{line} {one.name:x} users={one.users}"


def _entry(one: Enrolled, previous: str) -> dict[str, str | int]:
    """Plain values of an enrolment, for a line of the roster's file."""
    return {"key": one.key.hex(), "node": f"{one.node:x}", "users": one.users, "previous": previous}


def _content(entry: dict[str, str | int]) -> bytes:
    return b"fairfold roster" + json.dumps(entry, sort_keys=True).encode()


def head_of(lines: Iterable[bytes]) -> str:
    """The hash of the last line."""
    head = FIRST
    for line in lines:
        head = hashlib.sha256(line).hexdigest()
    return head


def read_lines(content: bytes, signer: bytes, known: tuple[int, str] = (0, FIRST)) -> list[Enrolled]:
    """Check every line of a roster, and that it still begins as it was known (number of lines, and their head)."""
    number, head = known
    lines = content.splitlines()
    if len(lines) < number or head_of(lines[:number]) != head:
        given = f"a roster that does not begin with the {number} lines that were known"
        raise InvalidState(given, "a log that only grows", "Ask its operator: a line was changed or left out.")
    found = list[Enrolled]()
    previous = FIRST
    keys = set[bytes]()
    for place, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            signature = bytes.fromhex(entry.pop("signature"))
            one = Enrolled(bytes.fromhex(entry["key"]), int(entry["node"], 16), entry["users"])
            if len(one.key) != POINT_BYTES or type(one.users) is not int or not 1 <= one.users <= MAX_USERS:
                raise ValueError("no key, or no number of users")
            if entry != _entry(one, previous):
                raise ValueError("it does not follow the line before")
            if not verified(signer, signature, _content(entry)):
                raise ValueError("the server's signer did not sign it")
            if one.key in keys:
                raise ValueError("a key that comes twice")
        except PARSE_ERRORS as error:
            given = f"line {place} of the roster ({str(error)[:100]})"
            raise InvalidState(given, "what the server enrolled and signed", "Ask its operator.") from None
        found.append(one)
        keys.add(one.key)
        previous = hashlib.sha256(line).hexdigest()
    return found


@dataclass
class Roster:
    """The roster in a file, as the server reads and writes it."""

    path: Path
    signer: Ed25519PrivateKey
    _size: int = -1  # of the file when it was last read
    _entries: dict[bytes, Enrolled] = field(default_factory=dict)  # by key
    _by_node: dict[int, Enrolled] = field(default_factory=dict)

    @property
    def public(self) -> bytes:
        """The public half of the signer."""
        return self.signer.public_key().public_bytes_raw()

    def content(self) -> bytes:
        """All lines of the roster's file."""
        return self.path.read_bytes() if self.path.exists() else b""

    def entries(self) -> list[Enrolled]:
        """All devices, in the order in which they were enrolled."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:  # lines are only ever added
            self._entries = {one.key: one for one in read_lines(self.content(), self.public)}
            self._by_node, self._size = {one.node: one for one in self._entries.values()}, size
        return list(self._entries.values())

    def add(self, one: Enrolled) -> Enrolled:
        """Append a device, unless its key is there; returns its entry."""
        self.entries()
        if one.key in self._entries:
            return self._entries[one.key]
        content = self.content()
        entry = _entry(one, head_of(content.splitlines()[-1:]))
        signature = self.signer.sign(_content(entry)).hex()
        write_atomically(self.path, content + json.dumps(entry | {"signature": signature}).encode() + b"\n")
        return one

    def sign_model(self, number: int, content: bytes) -> str:
        """The signature of a model, in hexadecimal digits."""
        return self.signer.sign(signed_model(number, content)).hex()

    def of_node(self, node: int) -> Enrolled | None:
        """The device that acts as a node; None for one whose key was registered without an invitation."""
        self.entries()
        return self._by_node.get(node)

    def allows(self, node: int, name: int) -> bool:
        """Whether a node may have a name: its key's own, or without an invitation any that is no other device's."""
        one = self.of_node(node)
        return one.name == name if one is not None else all(other.name != name for other in self._entries.values())

    def users_of(self, node: int) -> int:
        """The most users that a node may act for."""
        one = self.of_node(node)
        return 1 if one is None else one.users
