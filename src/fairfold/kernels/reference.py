"""The loops over coordinates in plain torch: short, on any device, and the specification for every faster body.

Each function handles a contiguous *range* of the full vector, or chosen *rows* of it, a row being ``row_size``
coordinates. They work in blocks of :data:`BLOCK` coordinates, so that temporary memory stays below
:data:`TEMPORARY_BYTES` however many are asked for.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fairfold.kernels.hashing import Layout, slots_and_signs

BLOCK = 2**17
"""Coordinates handled at once: long enough to hide torch's cost of a call, short enough to stay in cache."""

TEMPORARY_BYTES = 128 * BLOCK
"""Upper bound of temporary memory of one call here: at most sixteen 8-byte words a coordinate are alive at a time."""


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> None:
    """Add the signed values of coordinates [start, start + len(values)) into their slots of ``sums``, in place.

    ``counts``, where given, is raised by one for every coordinate that lands in a slot.
    """
    for part in _blocks(values.numel()):
        coordinates = torch.arange(start + part.start, start + part.stop, device=sums.device)
        slots, signs = slots_and_signs(layout, coordinates)
        sums.index_add_(0, slots, values[part].to(sums.dtype) * signs)
        if counts is not None:
            counts.index_add_(0, slots, torch.ones_like(slots, dtype=counts.dtype))


def reduce(layout: Layout, full: Tensor) -> Tensor:
    """The signed mean of each slot over the whole full vector, 0 if it is empty; halves are summed in float32."""
    dtype = torch.promote_types(full.dtype, torch.float32)
    sums = torch.zeros(layout.size, dtype=dtype, device=full.device)
    counts = torch.zeros(layout.size, dtype=torch.int32, device=full.device)
    accumulate_range(layout, full, 0, sums, counts)
    return sums.div_(counts.clamp_(min=1)).to(full.dtype)


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> None:
    """Raise ``counts`` by how many coordinates of [start, stop) live in each slot, in place."""
    for part in _blocks(stop - start):
        coordinates = torch.arange(start + part.start, start + part.stop, device=counts.device)
        slots, _ = slots_and_signs(layout, coordinates)
        counts.index_add_(0, slots, torch.ones_like(slots, dtype=counts.dtype))


def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> None:
    """Write the values of coordinates [start, start + len(out)) into ``out``."""
    for part in _blocks(out.numel()):
        coordinates = torch.arange(start + part.start, start + part.stop, device=compact.device)
        out[part] = _values(layout, compact, coordinates)


def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
    """The values of chosen rows, shape (len(rows), row_size)."""
    out = torch.empty(len(rows), row_size, dtype=compact.dtype, device=compact.device)
    for part in _blocks(len(rows), row_size):
        out[part] = _values(layout, compact, row_coordinates(rows[part], row_size))
    return out


def accumulate_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Add the signed ``values`` (len(rows), row_size) of chosen rows, which may repeat, into ``sums``, in place."""
    for part in _blocks(len(rows), values.shape[1]):
        slots, signs = slots_and_signs(layout, row_coordinates(rows[part], values.shape[1]))
        sums.index_add_(0, slots.reshape(-1), (values[part].to(sums.dtype) * signs).reshape(-1))


def row_coordinates(rows: Tensor, row_size: int) -> Tensor:
    """The coordinates of chosen rows, shape (len(rows), row_size)."""
    return rows.long()[:, None] * row_size + torch.arange(row_size, device=rows.device)


def _values(layout: Layout, compact: Tensor, coordinates: Tensor) -> Tensor:
    slots, signs = slots_and_signs(layout, coordinates)
    return compact[slots] * signs.to(compact.dtype)


def _blocks(length: int, coordinates_each: int = 1) -> Iterator[slice]:
    """Slices that cover ``length`` things, at most BLOCK coordinates (but at least one thing) at a time."""
    step = max(1, BLOCK // max(coordinates_each, 1))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
