"""What every launch shares: the device, the tile, and tensors as kernels can take them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fairfold.kernels.gpu.placement import Placement
from fairfold.kernels.gpu.tuning import TILES

CHECKED: dict[str, Any] = {"debug": True, "sanitize_overflow": False}
"""Options of kernels that read row ids: an id outside of the table stops the program, as in torch's own layers.

Triton's other check, for integer overflow, must stay off: overflow is what a hash is made of."""


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch on the device of this tensor, which need not be the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def tiled(name: str, count: int, width: int = 1) -> tuple[tuple[int], int, int]:
    """The grid, the pieces of a program and its warps, for ``count`` pieces of ``width`` coordinates."""
    tile = TILES[name]
    pieces = max(tile.elements // width, 1)
    return ((count + pieces - 1) // pieces,), pieces, tile.warps


def place_arguments(place: Placement) -> dict[str, Any]:
    """A placement as keyword arguments of a kernel."""
    return {
        "head": place.head,
        "blocks": place.blocks,
        "key_low": place.key_low,
        "key_high": place.key_high,
        "parts": place.parts,
        "width": place.width,
        "signed": place.signed,
        "wide": place.wide,
        "has_head": place.head > 0,
    }


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
    """What sums of this dtype are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
