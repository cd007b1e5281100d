"""What every launch shares: the device, the tile, and tensors as kernels can take them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    """What sums of this dtype are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
