"""The loops over coordinates in plain torch: short, on any device, and the specification for every faster body.

Each function handles one contiguous *range* of the full vector, or a list of *chosen* coordinates. Callers keep ranges
at most :data:`BLOCK` long, so that temporary memory stays below :data:`TEMPORARY_BYTES` whatever n is.
"""

import torch
from torch import Tensor

from fairfold.kernels.hashing import Layout, slots_and_signs

BLOCK = 2**17
"""Coordinates handled at once. Their hashes fit a core's cache, where the arithmetic runs fastest."""

TEMPORARY_BYTES = 128 * BLOCK
"""Upper bound of temporary memory of one call here: at most sixteen 8-byte words a coordinate are alive at a time."""


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor) -> None:
    """Add the signed ``values`` of coordinates [start, start + len) into their slots of ``sums``, in place."""
    slots, signs = slots_and_signs(layout, _range(start, start + values.numel(), values.device))
    sums.index_add_(0, slots, values.to(sums.dtype) * signs)


def accumulate_chosen(layout: Layout, values: Tensor, coordinates: Tensor, sums: Tensor) -> None:
    """The same for chosen coordinates, which may repeat."""
    slots, signs = slots_and_signs(layout, coordinates)
    sums.index_add_(0, slots, values.to(sums.dtype) * signs)


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> None:
    """Add to ``counts`` how many coordinates of [start, stop) live in each slot, in place."""
    slots, _ = slots_and_signs(layout, _range(start, stop, counts.device))
    counts.index_add_(0, slots, torch.ones_like(slots, dtype=counts.dtype))


def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> None:
    """Write the values of coordinates [start, start + len(out)) into ``out``."""
    slots, signs = slots_and_signs(layout, _range(start, start + out.numel(), compact.device))
    torch.mul(compact[slots], signs.to(compact.dtype), out=out)


def recover_chosen(layout: Layout, compact: Tensor, coordinates: Tensor) -> Tensor:
    """The values of chosen coordinates."""
    slots, signs = slots_and_signs(layout, coordinates)
    return compact[slots] * signs.to(compact.dtype)


def _range(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start, stop, device=device)
