"""Launching of kernels: the device, the tile, contiguous tensors, and a layout in pieces."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairfold.errors import InvalidSubspace
from fairfold.kernels.hashing import WORD, Layout, mix

CHECKED: dict[str, Any] = {"debug": True, "sanitize_overflow": False}
"""Options of kernels that read row ids: an id outside of the table stops the program, as in torch's own layers.

Triton's other check, for integer overflow, must stay off: overflow is what a hash is made of."""


class Tile(NamedTuple):
    """The work of one program: how many coordinates (a power of two), and the warps of 32 threads that share them."""

    elements: int
    warps: int


TILES: dict[str, Tile] = {
    "recover_range": Tile(2048, 4),
    "recover_rows": Tile(1024, 4),
    "accumulate_range": Tile(2048, 4),
    "accumulate_rows": Tile(1024, 4),
    "segment_mean": Tile(512, 4),
    "count": Tile(1024, 4),
    "touched": Tile(1024, 4),
}
"""How much one program of each kernel handles: ``benchmarks/kernels_gpu.py --tune`` prints the best for a machine."""


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch on the device of this tensor, which need not be the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch(
    kernel: Any, tile: str, count: int, width: int, /, *tensors: Tensor, programs: int = 1, **arguments: Any
) -> None:
    """Run a kernel over ``count`` pieces of ``width`` numbers, by one program a tile or several."""
    if count == 0:
        return
    elements, warps = TILES[tile]
    pieces = max(elements // width, 1)
    with on_device(tensors[0]):
        kernel[(-(-count // pieces) * programs,)](*tensors, count=count, **arguments, pieces=pieces, num_warps=warps)


@contextmanager
def writable(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The tensor without gaps and in ``dtype``: itself where it is so, else a copy that is written back afterwards."""
    work = tensor.detach().to(dtype or tensor.dtype).contiguous()
    yield work
    if work.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(work)
    elif not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)  # autograd must know that it was written


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of this dtype are formed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- A layout in *pieces*: a piece is a run of neighboring coordinates in one chunk, wholly inside or outside the
# head, whose signs are neighboring bits of one word. So a piece has one slot to find, its values are read and written
# as one vector, and the hash is computed once for all of them. The widest piece is gcd(chunk, head, 32), and the row
# length where rows are handled: 8 for the common chunk of 8, 1 where every coordinate is hashed alone.

_SHORT = 2**31
SIGN_BITS = 32
"""Signs are bits of 32-bit words, so no piece is wider than one word."""


class PieceLayout(NamedTuple):
    """A layout in pieces of ``width`` coordinates: the arguments of the same names of a kernel.

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
def piece_layout(layout: Layout, row_size: int = 0, width: int = 0) -> PieceLayout:
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
    head = layout.head // width
    low = _as_signed(low)
    high = _as_signed(high)
    return PieceLayout(width, parts, head, layout.blocks, low, high, wide, layout.signed, head > 0)


def _as_signed(word: int) -> int:
    """The signed number of the same 32 bits, so that Triton sees one type whatever the seed."""
    return word - ((word >> 31) << 32)
