"""Messages of secure aggregation; :class:`.reader.Reader`, the only parser, checks bytes before they are used.

Every message begins with its kind and with the digest of its session, so it means nothing in another run, round or sum.
Integers are big-endian; vectors are little-endian, as they lie in memory.
"""

import hashlib
import math
import struct
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self, TypeVar

from fairfold.privacy.secure.masking import FixedPointVector
from fairfold.privacy.secure.reader import MAX_CLIENTS, Reader, pack_by_member, pack_members, unreadable
from fairfold.privacy.secure.segments import MAX_LENGTH, MAX_SEGMENTS, MAX_SIZES, SegmentLayout
from fairfold.privacy.secure.shamir import SHARE_BYTES

VERSION, MAGIC = 4, b"fairsum"
POINT, KEY, SIGNATURE, CERTIFICATE, DIGEST = 49, 32, 64, 96, 32  # bytes of each
SEALED = 2 * SHARE_BYTES + 16  # two shares and the tag of their encryption
SEED, MASK_KEY = 0, 1  # kinds of shares: of a survivor's own seed, of the mask key of a client that left
Kind = TypeVar("Kind", bound="Message")


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


class LogHead(NamedTuple):
    """How far a server's log of enrolled keys goes: its number of lines, and the hash of the last."""

    lines: int = 0
    hash: str = "0" * 64  # SHA-256 in hexadecimal digits

    def after(self, line: bytes) -> "LogHead":
        """The head with one more line."""
        return LogHead(self.lines + 1, hashlib.sha256(line).hexdigest())


NO_LOG = LogHead()


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
    log: LogHead = NO_LOG  # of enrolled keys, as all devices of the sum are shown it; none where there is no log

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
        parts += [struct.pack(f">I{len(owned)}H", len(owned), *owned) for owned in sizes]
        return b"".join([*parts, struct.pack(">I", self.log.lines), bytes.fromhex(self.log.hash)])

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
        log = LogHead(reader.number(4, 2**32 - 1), reader.take(DIGEST).hex())
        if not log.lines and log != NO_LOG:
            raise unreadable("the hash of no line")
        return cls(run, number, purpose, min_cohort, layout, staying, sigma, turn, log)


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
    if reader.take(len(MAGIC)) != MAGIC:
        raise unreadable("no message of secure aggregation")
    if (version := reader.number(1, 255)) != VERSION:
        raise unreadable(f"a message of version {version} where this is version {VERSION}")
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
