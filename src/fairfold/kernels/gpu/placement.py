"""A layout as the kernels take it: in *pieces*.

A piece is a run of neighbouring coordinates that lies in one chunk, wholly inside or outside the head, whose signs are
neighbouring bits of one word. So a piece has one slot to find, its values are read and written as one vector, and the
hash is computed once for all of them. The widest piece is gcd(chunk, head, 32), and the row length where rows are
handled: 8 for the common chunk of 8, 1 where every coordinate is hashed alone.
"""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch

from fairfold.errors import InvalidSubspace
from fairfold.kernels.hashing import WORD, Layout, mix

_SHORT = 2**31
SIGN_BITS = 32
"""Signs are bits of 32-bit words, so no piece is wider than one word."""


class Placement(NamedTuple):
    """What a kernel must know to place pieces of ``width`` coordinates: its arguments of the same names.

    The keys are those of the mixer, or the words of the layout's key if ``wide`` is 2, as signed 32-bit numbers.
    """

    width: int  # coordinates of a piece; a power of two
    parts: int  # pieces of a chunk
    head: int  # how many pieces own their slots
    blocks: int  # into how many chunks the rest is hashed
    key_low: int
    key_high: int
    wide: int  # 0: numbers of pieces and places fit 31 bits; 1: they need more; 2: there may be more than 2**32 chunks
    signed: bool  # whether hashed coordinates carry a random sign
    has_head: bool


@lru_cache(maxsize=4096)
def placement(layout: Layout, row_size: int = 0, width: int = 0) -> Placement:
    """The layout in its widest pieces, or in those of a given width, that divide ``row_size`` (0: any)."""
    chunk = layout.chunk if layout.tail else SIGN_BITS  # the full space has no chunks to respect
    widest = gcd(chunk, layout.head, row_size, SIGN_BITS)
    width = width or widest
    if widest % width:
        raise ValueError(f"pieces of {width} coordinates where the widest have {widest}")
    low, high = layout.key & WORD, layout.key >> 32
    wide = 2 if layout.full_size > chunk << 32 else int(max(layout.full_size, layout.size) // width >= _SHORT)
    parts = chunk // width
    if wide and parts & (parts - 1):
        raise InvalidSubspace(
            f"chunks of {layout.chunk} coordinates in a table of {layout.full_size} on a GPU",
            "chunks of a power of two in tables of more than 2**31 pieces",
            "Use chunk 8, 16 or 32.",
        )
    if wide < 2:  # the keys are the same for all chunks: mix them once, here
        low, high = (int(mix(torch.tensor(word))) for word in (low, high))
    head, low, high = layout.head // width, _as_signed(low), _as_signed(high)
    return Placement(width, parts, head, layout.blocks, low, high, wide, layout.signed, head > 0)


def _as_signed(word: int) -> int:
    """The signed number of the same 32 bits, so that Triton sees one type whatever the seed."""
    return word - ((word >> 31) << 32)
