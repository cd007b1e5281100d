"""Where the rows of a hashed tensor stand: ``kernels.hashing`` for one coordinate after another (docs/export.md)."""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from fairfold.errors import InvalidMessage

LONG, WORD = 2**64 - 1, 2**32 - 1


class DeviceLayout(NamedTuple):
    """How the numbers of a full tensor stand in a compact one."""

    full_size: int
    head: int  # coordinates with a slot each
    tail: int  # slots that all others are hashed into
    chunk: int  # neighbors that share one hash
    key: int
    is_signed: int

    @property
    def size(self) -> int:
        """Length of the compact tensor."""
        return self.head + self.tail

    def row(self, row: int) -> int:
        """The compact row of a row of the tensor; of layouts whose chunks are rows."""
        head = self.head // self.chunk
        if row < head or not self.tail:
            return row
        return head + (hash_block(self.key, row) * (self.tail // self.chunk) >> 32)


def expand_seed(seed: int) -> int:
    """A seed as 64 well-mixed bits."""
    word = (seed + 0x9E3779B97F4A7C15) & LONG
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & LONG
    return word ^ (word >> 31)


def mix(word: int, inner_key: int = 0) -> int:
    """Mix 32 bits bijectively; the inner key is added between two multiplications."""
    word = ((word ^ word >> 16) * 0x7FEB352D + inner_key) & WORD
    word = ((word ^ word >> 15) * 0x846CA68B) & WORD
    return word ^ word >> 16


def hash_block(key: int, block: int) -> int:
    """The hash of a block of coordinates, of 32 bits."""
    high = block >> 32
    return mix((block & WORD) ^ mix(high ^ key & WORD), mix((high + (key >> 32)) & WORD))


def layout_of(held: Mapping[str, Any]) -> DeviceLayout:
    """The layout of a tensor that is held hashed, or whole; refuses any other."""
    numbers = full_size, size, seed, chunk, head = [held[key] for key in ("full_size", "size", "seed", "chunk", "head")]
    if held["kind"] != "hashed" or not all(type(number) is int for number in numbers):
        raise _invalid("a tensor of unknown kind")
    if not 1 <= size <= full_size < 2**48 or prod(held["shape"]) != full_size or not 0 <= seed <= LONG or chunk < 1:
        raise _invalid("a subspace of no size")
    if size == full_size:
        return DeviceLayout(full_size, full_size, 0, chunk, expand_seed(seed), int(bool(held["sign"])))
    if held["mapping"] == "ranked" and not head:
        head = size // 2 // chunk * chunk
    if not 0 <= head < size or (size - head) % chunk or (head and held["mapping"] != "ranked"):
        raise _invalid("a subspace of no size")
    return DeviceLayout(full_size, head, size - head, chunk, expand_seed(seed), int(bool(held["sign"])))


def _invalid(given: str) -> InvalidMessage:
    return InvalidMessage(given, "what FairStrategy sends", "Both sides must run the same fairfold.")
