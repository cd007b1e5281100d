"""The operations on CUDA tensors: ranges of the full vector and rows of a table.

Names, arguments and results are those of :mod:`fairfold.kernels.reference`, slots and signs bit for bit. Sums of
float16 and bfloat16 are formed in float32. Atomic additions come in an order that the hardware chooses: sums may differ
in their last bits from run to run. Reductions by a cached order (:func:`reduce`) do not.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fairfold.kernels import reference
from fairfold.kernels.gpu import device
from fairfold.kernels.gpu import device as device_segments
from fairfold.kernels.gpu.launch import CHECKED, PieceLayout, launch, piece_layout, sum_dtype, writable
from fairfold.kernels.hashing import Layout

_MIN_CACHED_CHUNK = 8
"""Counts or orders of chunks at least this long are cached: an eighth of the memory of their vectors, or less."""

_SHORT = 2**31


def slots_and_signs(layout: Layout, coordinates: Tensor, width: int = 1) -> tuple[Tensor, Tensor]:
    """Slots (int64) and signs (int8) of coordinates, found in pieces of ``width`` as the other kernels find them."""
    coordinates = coordinates.contiguous()
    slots, signs = torch.empty_like(coordinates), torch.empty_like(coordinates, dtype=torch.int8)
    place, count = piece_layout(layout, width=width), coordinates.numel()
    launch(device.place_kernel, "count", count, 1, coordinates, slots, signs, **place._asdict())
    return slots, signs


# -- ranges of the full vector ---------------------------------------------------------------------------------------


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> None:
    """Add the signed values of a range of coordinates into their slots."""
    stop = start + values.numel()
    if counts is not None:
        count_range(layout, start, stop, counts)
    place = piece_layout(layout)
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
    """Count the coordinates of a range in each slot; only chunks that the range cuts are counted slot by slot."""
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

    With chunks of 8 and more, the second reduction by a layout sorts its chunks by their place and caches the order:
    n/Z + m/Z int32 numbers for each of the last eight layouts. By an order the result has the same bits every time.
    """
    whole = layout.head % layout.chunk == layout.full_size % layout.chunk == 0
    known = (
        cached_counts_or_order(layout, full.device)
        if layout.tail and layout.chunk >= _MIN_CACHED_CHUNK and whole
        else None
    )
    if isinstance(known, Order):
        return segment_means(layout, full, known).to(full.dtype)
    sums = torch.zeros(layout.size, dtype=sum_dtype(full.dtype), device=full.device)
    if known is not None:
        accumulate_range(layout, full, 0, sums)
        sums[layout.head :].view(-1, layout.chunk).div_(known[:, None])
    else:  # single slots or a cut chunk: counts of every slot, which are not worth caching
        counts = torch.zeros(layout.size, dtype=torch.int32, device=full.device)
        accumulate_range(layout, full, 0, sums, counts)
        sums.div_(counts.clamp_(min=1))
    return sums.to(full.dtype)


def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> None:
    """Write the values of a range of coordinates."""
    place, stop = piece_layout(layout), start + out.numel()
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


def _row_arguments(layout: Layout, place: PieceLayout, row_size: int) -> dict[str, Any]:
    counts = {"row_count": layout.full_size // row_size, "row_pieces": row_size // place.width}
    return {**counts, **place._asdict(), **CHECKED}


def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
    """The values of chosen rows of a table, recovered from its compact vector."""
    out = torch.empty(len(rows), row_size, dtype=compact.dtype, device=compact.device)
    place = piece_layout(layout, row_size)
    count, arguments = out.numel() // place.width, _row_arguments(layout, place, row_size)
    tensors = compact.detach().contiguous(), rows.contiguous(), out
    launch(device.recover_rows_kernel, "recover_rows", count, place.width, *tensors, **arguments)
    return out


def accumulate_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor, scale: float = 1.0) -> None:
    """Add the signed values of chosen rows, times ``scale``, into their slots (with ``-rate``: a step of SGD)."""
    if values.numel() == 0:
        return
    place = piece_layout(layout, values.shape[1])
    count, arguments = values.numel() // place.width, _row_arguments(layout, place, values.shape[1])
    values, rows = values.detach().contiguous(), rows.contiguous()
    with writable(sums, sum_dtype(sums.dtype)) as work:
        kernel = device.accumulate_rows_kernel
        launch(kernel, "accumulate_rows", count, place.width, values, rows, work, scale=scale, **arguments)


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The touched slots of a batch of rows, and their sums; waits for the device to learn how many there are."""
    if values.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device), values.new_empty(0)
    where, row_size = values.device, values.shape[1]
    place = piece_layout(layout, row_size)
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


# -- What reductions cache of a layout, as it depends on no values: the number of chunks in each place, or their
# order. The first reduction by a layout counts the chunks of each place, adds values up by atomics and caches the
# counts, one int32 per chunk of the compact vector. The second sorts the chunk numbers by place and caches that order
# instead; from then on each slot is summed by one program, in a fixed order. So a hash that is used for one round
# never pays for the sort. Three kinds of layouts stay with their counts: those of at most MAX_COUNTED_SLOTS slots,
# whose atomics never leave the cache of the GPU, those of 2**31 chunks or more, and those whose sort the device has
# no memory for.

MAX_COUNTED_SLOTS = 2**23
"""Slots up to which counts are cached and no order: 32 MB of float32, of 50 MB of cache on an NVIDIA H200.

With chunks of 8, atomics took 0.86 copies of the full vector on 16 MB where an order took 1.55; 1.82 against 1.35 on
64 MB (docs/speed.md)."""

_MAX_CHUNKS = 2**31
"""Chunk numbers are stored as int32."""


@dataclass(frozen=True, slots=True)
class Order:
    """The hashed chunks of the full vector by the place they share; int32, n/Z and m/Z + 1 of them."""

    chunks: Tensor  # chunk numbers, sorted by place and ascending within a place
    starts: Tensor  # where the chunks of each place begin, and where the last ones end


@dataclass(slots=True)
class ReductionCache:
    """The cached counts (at least 1 each) or the order of a layout on one device."""

    asked: int = 0
    counts: Tensor | None = None
    order: Order | None = None


@lru_cache(maxsize=8)
def _reduction_cache(layout: Layout, where: torch.device) -> ReductionCache:  # noqa: ARG001 (they are the key)
    return ReductionCache()


def cached_counts_or_order(layout: Layout, where: torch.device) -> Tensor | Order:
    """The counts or the order that a reduction should use, cached for the next one."""
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # While a graph is captured nothing is computed, so nothing may be cached; and what is cached may go while
        # the graph is alive.
        return _counts(layout, where)
    cache = _reduction_cache(layout, where)
    cache.asked += 1
    if cache.asked == 2 and layout.size > MAX_COUNTED_SLOTS and layout.full_size // layout.chunk < _MAX_CHUNKS:
        with suppress(torch.OutOfMemoryError):  # sorting takes several times the memory of the order, atomics none
            cache.order, cache.counts = make_order(layout, where), None
    if cache.order is not None:
        return cache.order
    if cache.counts is None:
        cache.counts = _counts(layout, where)
    return cache.counts


def _counts(layout: Layout, where: torch.device) -> Tensor:
    return tally(layout, *_hashed(layout), where).clamp_(min=1)


def _hashed(layout: Layout) -> tuple[int, int]:
    """The number of the first hashed chunk, and how many there are."""
    first = layout.head // layout.chunk
    return first, layout.full_size // layout.chunk - first


def tally(layout: Layout, first: int, count: int, where: torch.device) -> Tensor:
    """Count the hashed chunks from number ``first`` on that live in each chunk of the compact vector."""
    found = torch.zeros(layout.blocks, dtype=torch.int32, device=where)
    _launch(device_segments.count_kernel, layout, found, first, count)
    return found


def make_order(layout: Layout, where: torch.device) -> Order:
    """The order of a layout whose head and full size are whole chunks. The sort takes several times its memory."""
    first, count = _hashed(layout)
    places = torch.empty(count, dtype=torch.int32, device=where)
    _launch(device_segments.block_kernel, layout, places, first, count)
    places, chunks = torch.sort(places, stable=True)  # stable, so that the sums of a layout are always the same
    every = torch.arange(layout.blocks + 1, dtype=torch.int32, device=where)
    return Order(chunks.add_(first).int(), torch.searchsorted(places, every, out_int32=True))


def _launch(kernel: Any, layout: Layout, found: Tensor, first: int, count: int) -> None:
    """Run a kernel over numbers of hashed chunks."""
    place = piece_layout(layout, width=1)
    keys = {"blocks": place.blocks, "key_low": place.key_low, "key_high": place.key_high, "wide": place.wide}
    launch(kernel, "count", count, 1, found, first=first, **keys)


def segment_means(layout: Layout, full: Tensor, order: Order) -> Tensor:
    """The signed mean of each slot, in the type that sums are formed in: no atomics, the same bits every time."""
    means = torch.empty(layout.size, dtype=sum_dtype(full.dtype), device=full.device)
    full = full.detach().contiguous()
    means[: layout.head] = full[: layout.head]
    place, tensors = piece_layout(layout), (full, order.chunks, order.starts, means)
    kernel, arguments = device_segments.segment_mean_kernel, place._asdict()
    launch(kernel, "segment_mean", layout.blocks, place.width, *tensors, programs=place.parts, **arguments)
    return means
