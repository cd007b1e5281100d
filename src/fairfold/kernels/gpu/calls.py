"""The operations on CUDA tensors: ranges of the full vector and rows of a table.

Names, arguments and results are those of :mod:`fairfold.kernels.reference`. Slots and signs equal it bit for bit.
Values are float32, float64, float16 or bfloat16; sums of the two short types are formed in float32. Sums are formed by
atomic additions, whose order the hardware chooses: they may differ in their last bits from run to run. Reductions by a
kept order (:func:`reduce`) do not.
"""

from typing import Any

import torch
from torch import Tensor

from fairfold.kernels import reference
from fairfold.kernels.gpu import device
from fairfold.kernels.gpu.launch import CHECKED, launch, sum_dtype, writable
from fairfold.kernels.gpu.placement import Placement, placement
from fairfold.kernels.gpu.segments import Order, counts_or_order, segment_means, tally
from fairfold.kernels.hashing import Layout

_KEPT_CHUNK = 8
"""Counts or orders of chunks at least this long are kept: an eighth of the memory of their vectors, or less."""

_SHORT = 2**31


def slots_and_signs(layout: Layout, coordinates: Tensor, width: int = 1) -> tuple[Tensor, Tensor]:
    """Slots (int64) and signs (int8) of coordinates, found in pieces of ``width`` as the other kernels find them."""
    coordinates = coordinates.contiguous()
    slots, signs = torch.empty_like(coordinates), torch.empty_like(coordinates, dtype=torch.int8)
    place, count = placement(layout, width=width), coordinates.numel()
    launch(device.place_kernel, "count", count, 1, coordinates, slots, signs, **place._asdict())
    return slots, signs


# -- ranges of the full vector ---------------------------------------------------------------------------------------


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> None:
    """See :func:`.reference.accumulate_range`."""
    stop = start + values.numel()
    if counts is not None:
        count_range(layout, start, stop, counts)
    place = placement(layout)
    low, high = _whole(start, stop, place.width)
    for begin, end in _edges(start, low, high, stop):
        reference.accumulate_range(layout, values[begin - start : end - start], begin, sums)
    if low < high:
        first, count = low // place.width, (high - low) // place.width
        inner = values.detach()[low - start : high - start].contiguous()
        with writable(sums, sum_dtype(sums.dtype)) as work:
            kernel, arguments = device.accumulate_range_kernel, place._asdict()
            launch(kernel, "accumulate_range", count, place.width, inner, work, first=first, **arguments)


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> None:
    """See :func:`.reference.count_range`; only slots of chunks that the range cuts are counted one by one."""
    owned = min(stop, layout.head)
    if start < owned:
        counts[start:owned] += 1
        start = owned
    low, high = _whole(start, stop, layout.chunk)
    for begin, end in _edges(start, low, high, stop):
        reference.count_range(layout, begin, end, counts)
    if low < high:
        found = tally(layout, low // layout.chunk, (high - low) // layout.chunk, counts.device)
        counts[layout.head :].view(-1, layout.chunk).add_(found[:, None])


def reduce(layout: Layout, full: Tensor) -> Tensor:
    """The signed mean of each slot over the whole full vector, 0 if it is empty.

    With chunks of 8 and more, the second reduction by a layout sorts its chunks by their place; the order is kept for
    those that follow (:mod:`.segments` says when not). It takes n/Z + m/Z int32 numbers on the device of the full
    vector, the server's, for each of the last eight layouts. By an order the result has the same bits every time, by
    atomics it may differ in the last ones.
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
    """See :func:`.reference.recover_range`."""
    place, stop = placement(layout), start + out.numel()
    low, high = _whole(start, stop, place.width)
    for begin, end in _edges(start, low, high, stop):
        reference.recover_range(layout, compact, begin, out[begin - start : end - start])
    if low < high:
        first, count = low // place.width, (high - low) // place.width
        compact = compact.detach().contiguous()
        with writable(out[low - start : high - start]) as work:
            kernel, arguments = device.recover_range_kernel, place._asdict()
            launch(kernel, "recover_range", count, place.width, compact, work, first=first, **arguments)


def _whole(start: int, stop: int, unit: int) -> tuple[int, int]:
    """The part of a range that consists of whole units; empty (stop, stop) if there is none."""
    low, high = -(-start // unit) * unit, stop // unit * unit
    return (low, high) if low < high else (stop, stop)


def _edges(start: int, low: int, high: int, stop: int) -> list[tuple[int, int]]:
    """What is left of [start, stop) before low and after high: less than a unit each, plain torch will do."""
    return [(begin, end) for begin, end in ((start, low), (high, stop)) if begin < end]


# -- rows of a table -------------------------------------------------------------------------------------------------


def _row_arguments(layout: Layout, place: Placement, row_size: int) -> dict[str, Any]:
    counts = {"row_count": layout.full_size // row_size, "row_pieces": row_size // place.width}
    return {**counts, **place._asdict(), **CHECKED}


def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
    """See :func:`.reference.recover_rows`."""
    out = torch.empty(len(rows), row_size, dtype=compact.dtype, device=compact.device)
    place = placement(layout, row_size)
    count, arguments = out.numel() // place.width, _row_arguments(layout, place, row_size)
    tensors = compact.detach().contiguous(), rows.contiguous(), out
    launch(device.recover_rows_kernel, "recover_rows", count, place.width, *tensors, **arguments)
    return out


def accumulate_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor, scale: float = 1.0) -> None:
    """See :func:`.reference.accumulate_rows`.

    With ``scale = -rate`` a step of SGD whose cost does not depend on the size of the vector. Sums in float16 or
    bfloat16 are formed in a float32 vector of their size.
    """
    if values.numel() == 0:
        return
    place = placement(layout, values.shape[1])
    count, arguments = values.numel() // place.width, _row_arguments(layout, place, values.shape[1])
    values, rows = values.detach().contiguous(), rows.contiguous()
    with writable(sums, sum_dtype(sums.dtype)) as work:
        kernel = device.accumulate_rows_kernel
        launch(kernel, "accumulate_rows", count, place.width, values, rows, work, scale=scale, **arguments)


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.reference.touched_rows`.

    The batch is sorted by place, whole pieces at a time, so there are few keys, and added up in a buffer of the batch's
    size. Waits for the device to learn how many slots there are.
    """
    if values.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device), values.new_empty(0)
    where, row_size = values.device, values.shape[1]
    place = placement(layout, row_size)
    rows, values = rows.contiguous(), values.detach().contiguous()
    count, arguments = values.numel() // place.width, _row_arguments(layout, place, row_size)
    key_type = torch.int32 if layout.size // place.width < _SHORT else torch.int64
    places = torch.empty(count, dtype=key_type, device=where)
    launch(device.place_rows_kernel, "count", count, 1, rows, places, **arguments)
    ordered, order = torch.sort(places)
    positions = torch.zeros(count, dtype=torch.int32, device=where)
    torch.cumsum(ordered[1:] != ordered[:-1], 0, dtype=torch.int32, out=positions[1:])
    touched = torch.empty(count, dtype=torch.int64, device=where)
    sums = torch.zeros(count, place.width, dtype=sum_dtype(values.dtype), device=where)
    tensors = values, rows, order, positions, touched, sums
    launch(device.gather_touched_kernel, "touched", count, place.width, *tensors, **arguments)
    number = int(positions[-1]) + 1
    slots = touched[:number, None] * place.width + torch.arange(place.width, device=where)
    return slots.view(-1), sums[:number].to(values.dtype).view(-1)
