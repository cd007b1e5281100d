"""Messages of secure aggregation; :class:`Reader`, the only parser, checks bytes before anything is built from them.

Every message begins with its kind and with the digest of its session, so it means nothing in another run, round or sum.
Integers are big-endian; vectors are little-endian, as they lie in memory.
"""

import hashlib
import math
import struct
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

from fairfold.errors import InvalidMessage
from fairfold.privacy.secure.masking import FixedPointVector
from fairfold.privacy.secure.segments import MAX_LENGTH, MAX_SEGMENTS, MAX_SIZES, SegmentLayout
from fairfold.privacy.secure.shamir import SHARE_BYTES

MAX_CLIENTS = 1 << 16
VERSION, MAGIC = 3, b"fairsum"
POINT, KEY, SIGNATURE, CERTIFICATE, DIGEST = 49, 32, 64, 96, 32  # bytes of each
SEALED = 2 * SHARE_BYTES + 16  # two shares and the tag of their encryption
SEED, MASK_KEY = 0, 1  # kinds of shares: of a survivor's own seed, of the mask key of a client that left
Kind = TypeVar("Kind", bound="Message")


class Reader:
    """Cursor over a message that refuses missing, excess or out-of-range content."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.rest = memoryview(data)

    def take(self, num_bytes: int) -> bytes:
        """Consume and copy the next bytes."""
        return bytes(self.view(num_bytes))

    def view(self, num_bytes: int) -> memoryview:
        """Consume the next bytes without a copy."""
        if num_bytes > len(self.rest):
            raise unreadable("a message that ends too early")
        taken, self.rest = self.rest[:num_bytes], self.rest[num_bytes:]
        return taken

    def number(self, size: int, most: int, least: int = 0) -> int:
        """Consume a big-endian unsigned integer of ``size`` bytes within bounds."""
        value = int.from_bytes(self.view(size), "big")
        if not least <= value <= most:
            raise unreadable(f"{value} out of range")
        return value

    def count(self, size: int, most: int) -> int:
        """Consume the number of parts that follow, each of ``size`` bytes; never more than there are bytes for."""
        parts = self.number(4, most)
        if parts * size > len(self.rest):
            raise unreadable("fewer parts than announced")
        return parts

    def by_member(self, size: int) -> dict[int, bytes]:
        """Consume byte strings of one size, each with the member that it belongs to; none may come twice."""
        parts = self.count(4 + size, MAX_CLIENTS)
        found = {self.number(4, MAX_CLIENTS): self.take(size) for _ in range(parts)}
        if len(found) < parts:
            raise unreadable("two parts for one member")
        return found

    def members(self) -> tuple[frozenset[int], int]:
        """Consume a set of cohort members, written by :func:`pack_members`, and the size of the cohort."""
        cohort_size = self.number(4, MAX_CLIENTS, 1)
        bits = "".join(f"{byte:08b}" for byte in self.view((cohort_size + 7) // 8))
        if "1" in bits[cohort_size:]:
            raise unreadable("members beyond the cohort")
        return frozenset(member for member, bit in enumerate(bits) if bit == "1"), cohort_size

    def end(self) -> None:
        """Refuse bytes beyond the end of the message."""
        if len(self.rest):
            raise unreadable("more than a message has")


def unreadable(given: str) -> InvalidMessage:
    """The error for a message that cannot be parsed."""
    return InvalidMessage(given, "a message of secure aggregation", "Both sides must run the same fairfold.")


def pack_members(members: Set[int], cohort_size: int) -> bytes:
    """A set of cohort members as a bit mask, preceded by the size of the cohort."""
    bits = bytearray((cohort_size + 7) // 8)
    for member in members:
        bits[member // 8] |= 128 >> member % 8
    return struct.pack(">I", cohort_size) + bits


def pack_by_member(parts: dict[int, bytes]) -> bytes:
    """Byte strings of one size, each preceded by its member; read by :meth:`Reader.by_member`."""
    return struct.pack(">I", len(parts)) + b"".join(struct.pack(">I", member) + part for member, part in parts.items())


class Message:
    """Base of all messages."""

    KIND: ClassVar[int]

    def __init_subclass__(cls, kind: int) -> None:
        cls.KIND = kind

    def body(self) -> bytes:
        """Serialize everything but the header."""
        raise NotImplementedError

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """Parse the body; the caller checks that nothing follows."""
        raise NotImplementedError

    def packed(self, session: bytes) -> bytes:
        """Serialize with the header: magic, version, kind and the session's digest."""
        return MAGIC + bytes([VERSION, self.KIND]) + session + self.body()


@dataclass(frozen=True)
class Session(Message, kind=1):
    """Invitation to one secure sum: what is summed, under which conditions."""

    run: int
    round: int
    purpose: str  # which sum of the run this is; rounds are counted for each
    min_cohort: int  # fewest clients that may own a segment of the sum
    layout: SegmentLayout
    staying: int = 0  # percentage of a segment's owners that must stay, or its sum is not unmasked
    sigma: float = 0.0  # of the clients' joint noise, over the norm of one user's part; 0 without noise
    turn: int = 0  # rises with every sum of a run and purpose; a round whose sum was lost is repeated in a later turn

    @property
    def digest(self) -> bytes:
        """SHA-256 that every message of this sum is bound to."""
        return hashlib.sha256(b"fairfold session" + self.body()).digest()

    def body(self) -> bytes:
        purpose = self.purpose.encode("ascii")
        lengths, sizes = self.layout.lengths, self.layout.sizes
        numbers = (self.run, self.round, self.turn, self.min_cohort, self.staying, self.sigma, len(purpose))
        parts = [struct.pack(">QQQIBdB", *numbers), purpose]
        parts += [struct.pack(f">I{len(lengths)}Q", len(lengths), *lengths), struct.pack(">I", len(sizes))]
        return b"".join(parts + [struct.pack(f">I{len(owned)}H", len(owned), *owned) for owned in sizes])

    @classmethod
    def read(cls, reader: Reader) -> Self:
        run, number, turn = (reader.number(8, most) for most in (2**64 - 1, 2**63, 2**63))
        min_cohort, staying = reader.number(4, MAX_CLIENTS, 2), reader.number(1, 100)
        (sigma,) = struct.unpack(">d", reader.take(8))
        if not (math.isfinite(sigma) and sigma >= 0):
            raise unreadable("noise that is none")
        encoded = reader.take(reader.number(1, 32, 1))
        if not encoded.isascii():
            raise unreadable("a purpose that is no text")
        if not (purpose := encoded.decode("ascii")).isidentifier():
            raise unreadable("a purpose that is no name")
        lengths = tuple(reader.number(8, MAX_LENGTH) for _ in range(reader.count(8, MAX_SEGMENTS)))
        sizes = tuple(
            tuple(reader.number(2, MAX_SEGMENTS - 1) for _ in range(reader.count(2, MAX_SEGMENTS)))
            for _ in range(reader.count(4, MAX_SIZES))
        )
        layout = SegmentLayout(lengths, sizes)
        if (error := layout.error()) is not None:
            raise unreadable(error)
        return cls(run, number, purpose, min_cohort, layout, staying, sigma, turn)


@dataclass(frozen=True)
class Advert(Message, kind=2):
    """A client's identity and its public keys for one round."""

    BYTES: ClassVar[int] = 8 + POINT + KEY + CERTIFICATE + 3 * KEY + SIGNATURE
    UNIQUE: ClassVar[tuple[str, ...]] = ("name", "enrolled", "signer", "mask_key", "share_key")
    name: int  # chosen by the client itself
    enrolled: bytes  # public key (P-384)
    signer: bytes  # public key (Ed25519) with which it signs
    certificate: bytes  # the enrolled key's signature of ``signer``
    mask_key: bytes  # public key (X25519) of this round for masks
    share_key: bytes  # public key (X25519) of this round for encrypting shares
    nonce: bytes  # its part of the randomness of the graph
    signature: bytes = bytes(SIGNATURE)  # of all of these and the session, by ``signer``

    def signed(self, session: bytes) -> bytes:
        """The bytes that the signature covers."""
        return b"fairfold advert" + session + self.body()[:-SIGNATURE]

    def body(self) -> bytes:
        keys = self.enrolled + self.signer + self.certificate + self.mask_key + self.share_key
        return struct.pack(">Q", self.name) + keys + self.nonce + self.signature

    @classmethod
    def read(cls, reader: Reader) -> Self:
        name = reader.number(8, 2**64 - 1)
        return cls(name, *(reader.take(size) for size in (POINT, KEY, CERTIFICATE, KEY, KEY, KEY, SIGNATURE)))


@dataclass(frozen=True)
class Cohort(Message, kind=3):
    """The clients of a sum, each with its size; from here on a member is named by its position."""

    members: tuple[Advert, ...]
    sizes: tuple[int, ...]

    def body(self) -> bytes:
        each = (advert.body() + bytes([size]) for advert, size in zip(self.members, self.sizes, strict=True))
        return struct.pack(">I", len(self.members)) + b"".join(each)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        num_members = reader.count(Advert.BYTES + 1, MAX_CLIENTS)
        pairs = [(Advert.read(reader), reader.number(1, MAX_SIZES - 1)) for _ in range(num_members)]
        return cls(tuple(advert for advert, _ in pairs), tuple(size for _, size in pairs))

    def digest(self, session: bytes) -> bytes:
        """SHA-256 that shares, masks and signatures are bound to."""
        return hashlib.sha256(b"fairfold cohort" + session + self.body()).digest()

    @property
    def by_size(self) -> dict[int, int]:
        """Size by member."""
        return dict(enumerate(self.sizes))


@dataclass(frozen=True)
class Shares(Message, kind=4):
    """A client's encrypted shares by receiving member, and a commitment to the seed of its own mask."""

    commitment: bytes
    sealed: dict[int, bytes]

    def body(self) -> bytes:
        return self.commitment + pack_by_member(self.sealed)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(reader.take(DIGEST), reader.by_member(SEALED))


@dataclass(frozen=True)
class Delivery(Message, kind=5):
    """The members that gave shares, the size of the cohort, and the encrypted shares for one client by sender."""

    sharing: frozenset[int]
    cohort_size: int
    sealed: dict[int, bytes]

    def body(self) -> bytes:
        return pack_members(self.sharing, self.cohort_size) + pack_by_member(self.sealed)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(*reader.members(), reader.by_member(SEALED))


@dataclass(frozen=True)
class Masked(Message, kind=6):
    """A client's masked vector."""

    vector: FixedPointVector

    def body(self) -> bytes:
        return memoryview(self.vector).tobytes()

    @classmethod
    def read(cls, reader: Reader) -> Self:
        if not 0 < len(reader.rest) <= 4 * MAX_LENGTH or len(reader.rest) % 4:
            raise unreadable("no vector of 32-bit integers")
        return cls(reader.view(len(reader.rest)).cast("I"))


@dataclass(frozen=True)
class Survivors(Message, kind=7):
    """The members whose vectors are in the sum, and the size of the cohort."""

    staying: frozenset[int]
    cohort_size: int

    def body(self) -> bytes:
        return pack_members(self.staying, self.cohort_size)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(*reader.members())

    def signed(self, cohort: bytes, sharing: Set[int]) -> bytes:
        """The bytes that survivors sign: the cohort, who gave shares, and who survives."""
        return b"fairfold survivors" + cohort + pack_members(sharing, self.cohort_size) + self.body()


@dataclass(frozen=True)
class Signed(Message, kind=8):
    """A client's signature of the survivors."""

    signature: bytes

    def body(self) -> bytes:
        return self.signature

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(reader.take(SIGNATURE))


@dataclass(frozen=True)
class Signatures(Message, kind=9):
    """The signatures of the survivors, by member."""

    by_member: dict[int, bytes]

    def body(self) -> bytes:
        return pack_by_member(self.by_member)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(reader.by_member(SIGNATURE))


@dataclass(frozen=True)
class Revealed(Message, kind=10):
    """One share of each neighbor's secret, with its kind (seed or mask key)."""

    shares: dict[int, tuple[int, bytes]]

    def body(self) -> bytes:
        return pack_by_member({member: bytes([kind]) + share for member, (kind, share) in self.shares.items()})

    @classmethod
    def read(cls, reader: Reader) -> Self:
        found = reader.by_member(1 + SHARE_BYTES)
        if any(part[0] > MASK_KEY for part in found.values()):
            raise unreadable("a share of an unknown kind")
        return cls({member: (part[0], part[1:]) for member, part in found.items()})


def parse_message(kind: type[Kind], data: bytes | memoryview, session: bytes | None) -> Kind:
    """Parse a message of one kind that belongs to a session; None accepts any session, for an invitation."""
    reader = Reader(data)
    if reader.take(len(MAGIC)) != MAGIC or reader.number(1, 255) != VERSION:
        raise unreadable("no message of this version")
    if reader.number(1, 255) != kind.KIND:
        raise unreadable(f"another message than {kind.__name__}")
    digest = reader.take(DIGEST)
    if session is not None and digest != session:
        raise unreadable("a message of another run, round or sum")
    message = kind.read(reader)
    reader.end()
    if session is None and isinstance(message, Session) and message.digest != digest:
        raise unreadable("an invitation that contradicts itself")
    return message
