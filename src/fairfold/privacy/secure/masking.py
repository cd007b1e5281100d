"""Masks that cancel in a sum, and the graph of who is masked with whom.

A mask is the stream of a cipher, added modulo 2³² to a vector. A key serves one segment of one round, between two
clients or for a client's own mask, so its stream is used once.

Clients form a ring, in an order that follows from the hash of all that they advertised, each with a random nonce; each
is a neighbor of the ``degree / 2`` before and behind it, and neighbors keep each other's shares. In a small cohort all
are neighbors. The degree is the smallest (40 at least) at which, with 30 % of clients leaving and 10 % colluding with
the server, some client has as many colluding neighbors as the threshold with a probability below 1e-6, and fewer
remaining ones with a probability below 1e-3: 40 and a threshold of 16 at 200 clients, 56 and 23 at 1,000. A client that
advertises last can try out nonces and so choose among orders (docs/privacy-protocol.md).
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import comb
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

FixedPointVector = Any  # 32-bit numbers in a row: an array of numpy or of the standard library

BLOCK = 1 << 16  # numbers at a time: they stay within the processor's cache
_ZEROS = bytes(4 * BLOCK)
_NONCE = bytes(16)  # counter and nonce: a key is never used twice


def add_masks(vector: FixedPointVector, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """Add the streams of the ``plus`` keys to a vector in place, and subtract those of the ``minus`` keys."""
    if not len(vector):
        return
    content = memoryview(vector).cast("B")
    ciphers = [
        (Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor(), sign)
        for sign, keys in ((1, plus), (-1, minus))
        for key in keys
    ]
    stream = memoryview(bytearray(min(4 * BLOCK, len(content))))

    def streams(size: int) -> Iterator[tuple[memoryview, int]]:
        for cipher, sign in ciphers:
            cipher.update_into(memoryview(_ZEROS)[:size], stream[:size])
            yield stream[:size], sign

    # A device needs no numpy; where others have loaded it, it is six times as fast.
    add = _add_by_numpy if "numpy" in sys.modules else _add_by_integers
    for start in range(0, len(content), 4 * BLOCK):
        block = content[start : start + 4 * BLOCK]
        add(block, streams(len(block)))


def _add_by_numpy(block: memoryview, streams: Iterator[tuple[memoryview, int]]) -> None:
    import numpy

    numbers = numpy.frombuffer(block, dtype="<u4")
    for stream, sign in streams:
        (numpy.add if sign > 0 else numpy.subtract)(numbers, numpy.frombuffer(stream, dtype="<u4"), out=numbers)


def _add_by_integers(block: memoryview, streams: Iterator[tuple[memoryview, int]]) -> None:
    # Two numbers to 64 bits in a long integer: the lower ones, and what keeps a difference of them positive
    pairs = (len(block) + 7) // 8
    lower = int.from_bytes(b"\xff\xff\xff\xff\0\0\0\0" * pairs, "little")
    spare = lower + int.from_bytes(b"\1\0\0\0\0\0\0\0" * pairs, "little")
    total = int.from_bytes(block, "little")
    low, high = total & lower, total >> 32 & lower
    for stream, sign in streams:
        mask = int.from_bytes(stream, "little")
        if sign > 0:
            low, high = low + (mask & lower), high + (mask >> 32 & lower)
        else:
            low, high = low + spare - (mask & lower), high + spare - (mask >> 32 & lower)
    block[:] = (low & lower | (high & lower) << 32).to_bytes(8 * pairs, "little")[: len(block)]


LEAVING, COLLUDING = 0.3, 0.1  # shares of a cohort
UNSAFE, UNFINISHED = 1e-6, 1e-3  # accepted probabilities
MIN_DEGREE = 40


@dataclass(frozen=True)
class Degrees:
    """Neighbors of a client, how many of them can recover its secret, and how many must stay on either side."""

    degree: int
    threshold: int
    staying: int


def quorum(cohort_size: int) -> int:
    """Signatures that a set of survivors needs: no two sets can have them, even if colluders sign both."""
    return (cohort_size + int(COLLUDING * cohort_size)) // 2 + 1


@lru_cache(maxsize=64)
def degrees(cohort_size: int) -> Degrees:
    """Choose degree and threshold for a cohort of a given size."""
    others = cohort_size - 1
    if others <= MIN_DEGREE:
        return Degrees(others, others // 2 + 1, 0)  # two disjoint sets of neighbors cannot both recover a secret
    colluding = int(COLLUDING * cohort_size)
    remaining = others - int(LEAVING * cohort_size)
    for degree in range(MIN_DEGREE, others, 2):
        around, side = (_at_most(others, remaining, drawn) for drawn in (degree, degree // 2))
        threshold = max((few for few in range(2, degree) if cohort_size * around[few - 1] <= UNFINISHED), default=0)
        if threshold and cohort_size * (1 - _at_most(others, colluding, degree)[threshold - 1]) <= UNSAFE:
            fit = (few for few in range(1, degree // 2) if cohort_size * side[few - 1] <= UNFINISHED)
            return Degrees(degree, threshold, max(fit, default=1))
    return Degrees(others, others // 2 + 1, 0)


def _at_most(others: int, marked: int, drawn: int) -> list[float]:
    """Hypergeometric distribution function: the probability that at most 0, 1, … of those drawn are marked."""
    ways = accumulate(comb(marked, found) * comb(others - marked, drawn - found) for found in range(drawn + 1))
    return [so_far / comb(others, drawn) for so_far in ways]


class Ring:
    """Members of a cohort in a ring, by an order that nobody chooses alone."""

    def __init__(self, digest: bytes, members: Sequence[int]) -> None:
        names = b"".join(member.to_bytes(4, "big") for member in members)
        seed = hashlib.sha256(b"fairfold ring" + digest + names).digest()
        self.order = sorted(members, key=lambda member: hashlib.sha256(seed + member.to_bytes(4, "big")).digest())
        self.degrees = degrees(len(members))
        self._place = {member: place for place, member in enumerate(self.order)}

    @property
    def _complete(self) -> bool:
        return self.degrees.degree >= len(self.order) - 1

    def neighbors(self, member: int) -> list[int]:
        """The neighbors of a member, ascending."""
        if self._complete:
            return sorted(other for other in self.order if other != member)
        place, half = self._place[member], self.degrees.degree // 2
        return sorted(self.order[(place + step) % len(self.order)] for step in range(-half, half + 1) if step)

    def isolated(self, survivors: Set[int]) -> int | None:
        """A survivor with too few other survivors before or behind it in the ring; None if there is none."""
        # Where each has enough on both sides, survivors form one chain around the ring, and no part can be cut off.
        if self._complete:
            return None
        half, length = self.degrees.degree // 2, len(self.order)
        stays = [member in survivors for member in self.order]
        for place, member in enumerate(self.order):
            behind = sum(stays[(place + step) % length] for step in range(1, half + 1))
            before = sum(stays[(place - step) % length] for step in range(1, half + 1))
            if stays[place] and min(behind, before) < self.degrees.staying:
                return member
        return None
