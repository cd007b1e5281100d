"""What travels for a secure sum. Every message is read by :class:`.reader.Reader` alone.

Every message begins with what it is and with the digest of its session, so none of them means anything in another run,
round or sum. Numbers are big-endian; words of a vector are little-endian, as they lie in memory.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy

from fairfold.secure.layout import MOST_SEGMENTS, MOST_SIZES, MOST_WORDS, Layout
from fairfold.secure.masks import Words
from fairfold.secure.reader import MOST_DEVICES, Reader, set_bytes, set_in, unreadable
from fairfold.secure.shamir import SHARE_BYTES

VERSION = 3
MAGIC = b"fairsum"
POINT, KEY, SIGNATURE, CERTIFICATE, DIGEST = 49, 32, 64, 96, 32
SEALED = 2 * SHARE_BYTES + 16  # two shares and the tag of their encryption
SEED, MASK_KEY = 0, 1  # kinds of shares: of a survivor's own mask, of the key of one that left


class Message:
    """What all have in common."""

    KIND: ClassVar[int]

    def body(self) -> bytes:
        """All but the beginning."""
        raise NotImplementedError

    @classmethod
    def read(cls, reader: Reader) -> "Message":
        """The same from its bytes, but for its end."""
        raise NotImplementedError

    def packed(self, session: bytes) -> bytes:
        """As it travels."""
        return MAGIC + bytes([VERSION, self.KIND]) + session + self.body()


@dataclass(frozen=True)
class Session(Message):
    """What a sum is of: this invites a device to it.

    Attributes:
        run: Number of the run.
        round: Of what is summed for this purpose.
        purpose: What is summed.
        smallest: A device is not to take part in a sum over fewer devices, in any of its segments.
        layout: Segments and sizes.
        staying: Of a hundred owners of a segment so many have to stay, or its sum is not opened.
        sigma: Noise that devices add to it together, over the norm of a user's part; 0 where they add none.
        turn: It rises with every sum of a run and purpose: a round whose sum was lost is asked again in a later turn.
    """

    KIND: ClassVar[int] = 1
    run: int
    round: int
    purpose: str
    smallest: int
    layout: Layout
    staying: int = 0
    sigma: float = 0.0
    turn: int = 0

    @property
    def digest(self) -> bytes:
        """What every message of this sum is bound to."""
        return hashlib.sha256(b"fairfold session" + self.body()).digest()

    def body(self) -> bytes:  # noqa: D102
        purpose, layout = self.purpose.encode("ascii"), self.layout
        numbers = (self.run, self.round, self.turn, self.smallest, self.staying, self.sigma, len(purpose))
        parts = [struct.pack(">QQQIBdB", *numbers), purpose]
        parts.append(struct.pack(f">I{len(layout.lengths)}Q", len(layout.lengths), *layout.lengths))
        parts.append(struct.pack(">I", len(layout.sizes)))
        parts += [struct.pack(f">I{len(of)}H", len(of), *of) for of in layout.sizes]
        return b"".join(parts)

    @classmethod
    def read(cls, reader: Reader) -> "Session":  # noqa: D102
        run, number, turn = (reader.number(8, most) for most in (2**64 - 1, 2**63, 2**63))
        smallest = reader.number(4, MOST_DEVICES, 2)
        staying, (sigma,) = reader.number(1, 100), struct.unpack(">d", reader.take(8))
        if not (math.isfinite(sigma) and sigma >= 0):
            raise unreadable("noise that is none")
        try:
            purpose = reader.take(reader.number(1, 32, 1)).decode("ascii")
        except UnicodeDecodeError:
            raise unreadable("a purpose that is no text") from None
        if not purpose.isidentifier():
            raise unreadable("a purpose that is no name")
        lengths = tuple(reader.number(8, MOST_WORDS) for _ in range(reader.count(8, MOST_SEGMENTS)))
        sizes = tuple(
            tuple(reader.number(2, MOST_SEGMENTS - 1) for _ in range(reader.count(2, MOST_SEGMENTS)))
            for _ in range(reader.count(4, MOST_SIZES))
        )
        layout = Layout(lengths, sizes)
        problem = layout.problem()
        if problem is not None:
            raise unreadable(problem)
        return cls(run, number, purpose, smallest, layout, staying, sigma, turn)


@dataclass(frozen=True)
class Advert(Message):
    """Who a device is, and its keys of this round.

    Attributes:
        name: Its number, which it chose.
        enrolled: Its enrolled public key (P-384).
        signer: The public key (Ed25519) by which it signs.
        certificate: The enrolled key's signature of that.
        mask_key: Its public key (X25519) of this round for masks.
        share_key: The same for encrypting shares.
        nonce: Its part of the randomness of the graph.
        signature: Of all this and the session, by ``signer``.
    """

    KIND: ClassVar[int] = 2
    BYTES: ClassVar[int] = 8 + POINT + KEY + CERTIFICATE + 3 * KEY + SIGNATURE
    name: int
    enrolled: bytes
    signer: bytes
    certificate: bytes
    mask_key: bytes
    share_key: bytes
    nonce: bytes
    signature: bytes = bytes(SIGNATURE)

    def signed(self, session: bytes) -> bytes:
        """What the signature is of."""
        return b"fairfold advert" + session + self.body()[:-SIGNATURE]

    def body(self) -> bytes:  # noqa: D102
        keys = self.enrolled + self.signer + self.certificate + self.mask_key + self.share_key
        return struct.pack(">Q", self.name) + keys + self.nonce + self.signature

    @classmethod
    def read(cls, reader: Reader) -> "Advert":  # noqa: D102
        name = reader.number(8, 2**64 - 1)
        return cls(name, *(reader.take(many) for many in (POINT, KEY, CERTIFICATE, KEY, KEY, KEY, SIGNATURE)))


@dataclass(frozen=True)
class Cohort(Message):
    """Who takes part, each with a size; a member is named by its place here from now on."""

    KIND: ClassVar[int] = 3
    members: tuple[Advert, ...]
    sizes: tuple[int, ...]

    def body(self) -> bytes:  # noqa: D102
        each = (advert.body() + bytes([size]) for advert, size in zip(self.members, self.sizes, strict=True))
        return struct.pack(">I", len(self.members)) + b"".join(each)

    @classmethod
    def read(cls, reader: Reader) -> "Cohort":  # noqa: D102
        many = reader.count(Advert.BYTES + 1, MOST_DEVICES)
        found = [(Advert.read(reader), reader.number(1, MOST_SIZES - 1)) for _ in range(many)]
        return cls(tuple(advert for advert, _ in found), tuple(size for _, size in found))

    def digest(self, session: bytes) -> bytes:
        """What shares, masks and signatures are bound to."""
        return hashlib.sha256(b"fairfold cohort" + session + self.body()).digest()

    @property
    def by_size(self) -> dict[int, int]:
        """Everybody's size."""
        return dict(enumerate(self.sizes))


def _sealed_bytes(sealed: Iterable[tuple[int, bytes]]) -> bytes:
    parts = [struct.pack(">I", member) + box for member, box in sealed]
    return struct.pack(">I", len(parts)) + b"".join(parts)


def _sealed_in(reader: Reader) -> dict[int, bytes]:
    many = reader.count(4 + SEALED, MOST_DEVICES)
    found = {reader.number(4, MOST_DEVICES): reader.take(SEALED) for _ in range(many)}
    if len(found) < many:
        raise unreadable("two boxes for one member")
    return found


@dataclass(frozen=True)
class Shares(Message):
    """A device's shares for its neighbours, encrypted, by member; and a commitment to the seed of its own mask."""

    KIND: ClassVar[int] = 4
    commitment: bytes
    sealed: dict[int, bytes]

    def body(self) -> bytes:  # noqa: D102
        return self.commitment + _sealed_bytes(self.sealed.items())

    @classmethod
    def read(cls, reader: Reader) -> "Shares":  # noqa: D102
        return cls(reader.take(DIGEST), _sealed_in(reader))


@dataclass(frozen=True)
class Delivery(Message):
    """Who gave shares, of how many members, and the boxes for this device, by sender."""

    KIND: ClassVar[int] = 5
    sharing: frozenset[int]
    of: int
    sealed: dict[int, bytes]

    def body(self) -> bytes:  # noqa: D102
        return set_bytes(self.sharing, self.of) + _sealed_bytes(self.sealed.items())

    @classmethod
    def read(cls, reader: Reader) -> "Delivery":  # noqa: D102
        return cls(*set_in(reader), _sealed_in(reader))


@dataclass(frozen=True)
class Masked(Message):
    """A vector under its masks."""

    KIND: ClassVar[int] = 6
    words: Words

    def body(self) -> bytes:  # noqa: D102
        return self.words.astype("<u4", copy=False).tobytes()

    @classmethod
    def read(cls, reader: Reader) -> "Masked":  # noqa: D102
        if len(reader.left) % 4 or len(reader.left) > 4 * MOST_WORDS:
            raise unreadable("no whole words")
        return cls(numpy.frombuffer(reader.view(len(reader.left)), dtype="<u4"))


@dataclass(frozen=True)
class Survivors(Message):
    """Whose vectors are in the sum, of how many members."""

    KIND: ClassVar[int] = 7
    staying: frozenset[int]
    of: int

    def body(self) -> bytes:  # noqa: D102
        return set_bytes(self.staying, self.of)

    @classmethod
    def read(cls, reader: Reader) -> "Survivors":  # noqa: D102
        return cls(*set_in(reader))

    def signed(self, cohort: bytes, sharing: Set[int]) -> bytes:
        """What survivors sign: the cohort, who gave shares, and who survives."""
        return b"fairfold survivors" + cohort + set_bytes(sharing, self.of) + self.body()


@dataclass(frozen=True)
class Signed(Message):
    """A device's signature of the survivors."""

    KIND: ClassVar[int] = 8
    signature: bytes

    def body(self) -> bytes:  # noqa: D102
        return self.signature

    @classmethod
    def read(cls, reader: Reader) -> "Signed":  # noqa: D102
        return cls(reader.take(SIGNATURE))


@dataclass(frozen=True)
class Signatures(Message):
    """The signatures of the survivors, by member."""

    KIND: ClassVar[int] = 9
    by_member: dict[int, bytes]

    def body(self) -> bytes:  # noqa: D102
        parts = [struct.pack(">I", member) + signature for member, signature in self.by_member.items()]
        return struct.pack(">I", len(parts)) + b"".join(parts)

    @classmethod
    def read(cls, reader: Reader) -> "Signatures":  # noqa: D102
        many = reader.count(4 + SIGNATURE, MOST_DEVICES)
        return cls({reader.number(4, MOST_DEVICES): reader.take(SIGNATURE) for _ in range(many)})


@dataclass(frozen=True)
class Revealed(Message):
    """A device's shares of its neighbours' secrets: one of each, with its kind."""

    KIND: ClassVar[int] = 10
    shares: dict[int, tuple[int, bytes]]

    def body(self) -> bytes:  # noqa: D102
        parts = [struct.pack(">IB", member, kind) + share for member, (kind, share) in self.shares.items()]
        return struct.pack(">I", len(parts)) + b"".join(parts)

    @classmethod
    def read(cls, reader: Reader) -> "Revealed":  # noqa: D102
        many = reader.count(5 + SHARE_BYTES, MOST_DEVICES)
        found = {
            reader.number(4, MOST_DEVICES): (reader.number(1, MASK_KEY), reader.take(SHARE_BYTES)) for _ in range(many)
        }
        if len(found) < many:
            raise unreadable("two shares of one member")
        return cls(found)


Kind = TypeVar("Kind", bound=Message)


def opened(kind: type[Kind], data: bytes | memoryview, session: bytes | None) -> Kind:
    """A message of one kind, of the session given (None: of any, which only an invitation is)."""
    reader = Reader(data)
    if reader.take(len(MAGIC)) != MAGIC or reader.number(1, 255) != VERSION:
        raise unreadable("no message of this version")
    if reader.number(1, 255) != kind.KIND:
        raise unreadable(f"another message than {kind.__name__}")
    bound = reader.take(DIGEST)
    if session is not None and bound != session:
        raise unreadable("a message of another run, round or sum")
    found = kind.read(reader)
    reader.end()
    if session is None and isinstance(found, Session) and found.digest != bound:
        raise unreadable("an invitation that contradicts itself")
    assert isinstance(found, kind)
    return found
