"""The roster of a server: its signed, append-only log of enrolled keys (:mod:`fairfold.privacy.secure.log`).

A device's name follows from its key, so no device can take another's.
"""

from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fairfold.atomic_io import write_atomically
from fairfold.device.stored_model import signed_model
from fairfold.errors import InvalidState
from fairfold.privacy.secure.log import Enrolled, line_of, read_log, signed_entry
from fairfold.privacy.secure.messages import NO_LOG, LogHead


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


@dataclass
class Roster:
    """The roster in a file, as the server reads and writes it."""

    path: Path
    signer: Ed25519PrivateKey
    _size: int = -1  # of the file when it was last read
    _head: LogHead = NO_LOG
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
            entries, heads = read_log(self.content(), self.public)
            self._entries = {one.key: one for one in entries}
            self._by_node = {one.node: one for one in entries}
            self._head, self._size = heads[-1], size
        return list(self._entries.values())

    def head(self) -> LogHead:
        """The number of lines, and the hash of the last."""
        self.entries()
        return self._head

    def add(self, one: Enrolled) -> Enrolled:
        """Append a device, unless its key is there; returns its entry."""
        head = self.head()
        if one.key in self._entries:
            return self._entries[one.key]
        line = line_of(one, head, self.signer.sign(signed_entry(one, head)))
        write_atomically(self.path, self.content() + line + b"\n")
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
