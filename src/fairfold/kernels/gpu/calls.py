"""The operations on CUDA tensors: ranges of the full vector and rows of a table.

Names, arguments and results are those of :mod:`fairfold.kernels.reference`. Slots and signs equal it bit for bit.
Values are float32, float64, float16 or bfloat16; sums of the two short types are formed in float32. Sums are formed by
atomic additions, whose order the hardware chooses: they may differ in their last bits from run to run. Reductions by a
kept order (:func:`reduce`) do not.
"""

import torch
from torch import Tensor

from fairfold.kernels import reference
from fairfold.kernels.gpu import device
from fairfold.kernels.gpu.chain import fold_groups, unfold_groups, weighted_sum
from fairfold.kernels.gpu.launch import CHECKED, on_device, place_arguments, sum_dtype, tiled, writable
from fairfold.kernels.gpu.placement import placement
from fairfold.kernels.gpu.positions import accumulate_lines, recover_lines, step_prefix
from fairfold.kernels.gpu.segments import Order, counts_or_order, forget_layouts, segment_means, tally
from fairfold.kernels.gpu.slopes import add_slopes
from fairfold.kernels.gpu.stacked import step_slots
from fairfold.kernels.gpu.steps import adagrad_rows, add_rows, sgd_rows, touched_rows
from fairfold.kernels.hashing import Layout

_KEPT_CHUNK = 8
"""Counts or orders of chunks at least this long are kept: an eighth of the memory of their vectors, or less."""

__all__ = [
    "accumulate_lines",
    "accumulate_range",
    "accumulate_rows",
    "adagrad_rows",
    "add_slopes",
    "count_range",
    "fold_groups",
    "forget_layouts",
    "recover_lines",
    "recover_range",
    "recover_rows",
    "reduce",
    "sgd_rows",
    "slots_and_signs",
    "step_prefix",
    "step_slots",
    "touched_rows",
    "unfold_groups",
    "weighted_sum",
]


def slots_and_signs(layout: Layout, coordinates: Tensor, width: int = 1) -> tuple[Tensor, Tensor]:
    """Slots (int64) and signs (int8) of coordinates, found in pieces of ``width`` as the other kernels find them."""
    coordinates = coordinates.contiguous()
    slots = torch.empty_like(coordinates)
    signs = torch.empty_like(coordinates, dtype=torch.int8)
    count = coordinates.numel()
    if count == 0:
        return slots, signs
    grid, pieces, warps = tiled("count", count)
    arguments = place_arguments(placement(layout, width=width))
    with on_device(coordinates):
        device.place_kernel[grid](coordinates, slots, signs, count=count, **arguments, pieces=pieces, num_warps=warps)
    return slots, signs


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> None:
    """Add the signed values of coordinates [start, start + len(values)) into their slots of ``sums``, in place.

    ``counts``, where given, is raised by one for every coordinate that lands in a slot.
    """
    if counts is not None:
        count_range(layout, start, start + values.numel(), counts)
    place = placement(layout)
    low, high = _whole(start, start + values.numel(), place.width)
    for begin, end in _edges(start, low, high, start + values.numel()):
        reference.accumulate_range(layout, values[begin - start : end - start], begin, sums)
    count = (high - low) // place.width
    if count == 0:
        return
    inner = values.detach()[low - start : high - start].contiguous()
    grid, pieces, warps = tiled("accumulate_range", count, place.width)
    with writable(sums, sum_dtype(sums.dtype)) as work, on_device(work):
        device.accumulate_range_kernel[grid](
            inner,
            work,
            first=low // place.width,
            count=count,
            **place_arguments(place),
            pieces=pieces,
            num_warps=warps,
        )


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> None:
    """Raise ``counts`` by how many coordinates of [start, stop) live in each slot, in place.

    The slots of a chunk are counted once for all of them; only chunks that the range cuts are counted one by one.
    """
    owned = min(stop, layout.head)
    if start < owned:
        counts[start:owned] += 1
        start = owned
    low, high = _whole(start, stop, layout.chunk)
    for begin, end in _edges(start, low, high, stop):
        reference.count_range(layout, begin, end, counts)
    count = (high - low) // layout.chunk
    if count == 0:
        return
    found = tally(layout, low // layout.chunk, count, counts.device)
    counts[layout.head :].view(-1, layout.chunk).add_(found[:, None])


def reduce(layout: Layout, full: Tensor) -> Tensor:
    """The signed mean of each slot over the whole full vector, 0 if it is empty.

    With chunks of 8 and more, the second reduction by a layout sorts its chunks by their place; the order is kept for
    those that follow (:mod:`.segments` says when not). It takes n/Z + m/Z int32 numbers on the device of the full
    vector, the server's, for each of the last eight layouts; :func:`forget_layouts` gives them back. By an order the
    result has the same bits every time, by atomics it may differ in the last ones.
    """
    whole = layout.head % layout.chunk == layout.full_size % layout.chunk == 0
    known = counts_or_order(layout, full.device) if layout.tail and layout.chunk >= _KEPT_CHUNK and whole else None
    if isinstance(known, Order):
        return segment_means(layout, full, known).to(full.dtype)
    sums = torch.zeros(layout.size, dtype=sum_dtype(full.dtype), device=full.device)
    if known is not None:
        accumulate_range(layout, full, 0, sums)
        sums[layout.head :].view(-1, layout.chunk).div_(known[:, None])
    else:  # single slots or a cut chunk: counts of every slot, which are not worth keeping
        counts = torch.zeros(layout.size, dtype=torch.int32, device=full.device)
        accumulate_range(layout, full, 0, sums, counts)
        sums.div_(counts.clamp_(min=1))
    return sums.to(full.dtype)


def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> None:
    """Write the values of coordinates [start, start + len(out)) into ``out``."""
    place = placement(layout)
    stop = start + out.numel()
    low, high = _whole(start, stop, place.width)
    for begin, end in _edges(start, low, high, stop):
        reference.recover_range(layout, compact, begin, out[begin - start : end - start])
    count = (high - low) // place.width
    if count == 0:
        return
    grid, pieces, warps = tiled("recover_range", count, place.width)
    compact = compact.detach().contiguous()
    with writable(out[low - start : high - start]) as work, on_device(work):
        device.recover_range_kernel[grid](
            compact,
            work,
            first=low // place.width,
            count=count,
            **place_arguments(place),
            pieces=pieces,
            num_warps=warps,
        )


def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
    """The values of chosen rows, shape (len(rows), row_size)."""
    out = torch.empty(len(rows), row_size, dtype=compact.dtype, device=compact.device)
    if out.numel() == 0:
        return out
    place = placement(layout, row_size)
    count = out.numel() // place.width
    grid, pieces, warps = tiled("recover_rows", count, place.width)
    with on_device(out):
        device.recover_rows_kernel[grid](
            compact.detach().contiguous(),
            rows.contiguous(),
            out,
            row_count=layout.full_size // row_size,
            count=count,
            row_pieces=row_size // place.width,
            **place_arguments(place),
            pieces=pieces,
            num_warps=warps,
            **CHECKED,
        )
    return out


def accumulate_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Add the signed ``values`` (len(rows), row_size) of chosen rows, which may repeat, into ``sums``, in place.

    Sums in float16 or bfloat16 are formed in a float32 vector of their size.
    """
    if values.numel() == 0:
        return
    with writable(sums, sum_dtype(sums.dtype)) as work:
        add_rows(layout, values, rows, work)


def _whole(start: int, stop: int, unit: int) -> tuple[int, int]:
    """The part of a range that consists of whole units; empty (stop, stop) if there is none."""
    low, high = -(-start // unit) * unit, stop // unit * unit
    return (low, high) if low < high else (stop, stop)


def _edges(start: int, low: int, high: int, stop: int) -> list[tuple[int, int]]:
    """What is left of [start, stop) before low and after high: less than a unit each, plain torch will do."""
    return [(begin, end) for begin, end in ((start, low), (high, stop)) if begin < end]
