"""What reductions keep of a layout, as it depends on no values: how many chunks a place has, or which.

The first reduction by a layout counts the chunks of each place, adds values up by atomics and keeps the counts, one
int32 a chunk of the compact vector. The second sorts the chunk numbers by place and keeps that order instead; from then
on each slot is summed by one program, in a fixed order. So a hash that is used for one round never pays for the sort.

Three kinds of layouts stay with their counts: those of at most :data:`CACHED` slots, whose atomics never leave the
cache, those of 2**31 chunks or more, and those whose sort the device has no memory for.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fairfold.kernels.gpu import device_segments
from fairfold.kernels.gpu.launch import launch, sum_dtype
from fairfold.kernels.gpu.placement import placement
from fairfold.kernels.hashing import Layout

CACHED = 2**23
"""Slots up to which counts are kept and no order: 32 MB of float32, of 50 MB of cache on an NVIDIA H200.

With chunks of 8, atomics took 0.86 copies of the full vector on 16 MB where an order took 1.55; 1.82 against 1.35 on
64 MB (docs/speed.md)."""

_LONGEST = 2**31
"""Chunk numbers are kept as int32."""


@dataclass(frozen=True, slots=True)
class Order:
    """The hashed chunks of the full vector by the place they share; int32, n/Z and m/Z + 1 of them."""

    chunks: Tensor  # chunk numbers, sorted by place and ascending within a place
    starts: Tensor  # where the chunks of each place begin, and where the last ones end


@dataclass(slots=True)
class Kept:
    """What is known of a layout on one device: its counts (at least 1 each) or its order."""

    asked: int = 0
    counts: Tensor | None = None
    order: Order | None = None


@lru_cache(maxsize=8)
def _kept(layout: Layout, where: torch.device) -> Kept:  # noqa: ARG001 (they are the key)
    return Kept()


def counts_or_order(layout: Layout, where: torch.device) -> Tensor | Order:
    """What a reduction should use, kept for the next one."""
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # While a graph is captured nothing is computed, so nothing may be kept; and what is kept may be forgotten while
        # the graph is alive.
        return _counts(layout, where)
    kept = _kept(layout, where)
    kept.asked += 1
    if kept.asked == 2 and layout.size > CACHED and layout.full_size // layout.chunk < _LONGEST:
        with suppress(torch.OutOfMemoryError):  # sorting takes several times the memory of the order, atomics none
            kept.order, kept.counts = order_of(layout, where), None
    if kept.order is not None:
        return kept.order
    if kept.counts is None:
        kept.counts = _counts(layout, where)
    return kept.counts


def _counts(layout: Layout, where: torch.device) -> Tensor:
    return tally(layout, *_hashed(layout), where).clamp_(min=1)


def _hashed(layout: Layout) -> tuple[int, int]:
    """The number of the first hashed chunk, and how many there are."""
    first = layout.head // layout.chunk
    return first, layout.full_size // layout.chunk - first


def tally(layout: Layout, first: int, count: int, where: torch.device) -> Tensor:
    """How many of ``count`` hashed chunks from number ``first`` on live in each chunk of the compact vector."""
    found = torch.zeros(layout.blocks, dtype=torch.int32, device=where)
    _launch(device_segments.count_kernel, layout, found, first, count)
    return found


def order_of(layout: Layout, where: torch.device) -> Order:
    """The order of a layout whose head and full size are whole chunks. The sort takes several times its memory."""
    first, count = _hashed(layout)
    places = torch.empty(count, dtype=torch.int32, device=where)
    _launch(device_segments.block_kernel, layout, places, first, count)
    places, chunks = torch.sort(places, stable=True)  # stable, so that the sums of a layout are always the same
    every = torch.arange(layout.blocks + 1, dtype=torch.int32, device=where)
    return Order(chunks.add_(first).int(), torch.searchsorted(places, every, out_int32=True))


def _launch(kernel: Any, layout: Layout, found: Tensor, first: int, count: int) -> None:
    """Run a kernel over numbers of hashed chunks."""
    place = placement(layout, width=1)
    keys = {"blocks": place.blocks, "key_low": place.key_low, "key_high": place.key_high, "wide": place.wide}
    launch(kernel, "count", count, 1, found, first=first, **keys)


def segment_means(layout: Layout, full: Tensor, order: Order) -> Tensor:
    """The signed mean of each slot, in the type that sums are formed in: no atomics, the same bits every time."""
    means = torch.empty(layout.size, dtype=sum_dtype(full.dtype), device=full.device)
    full = full.detach().contiguous()
    means[: layout.head] = full[: layout.head]
    place, tensors = placement(layout), (full, order.chunks, order.starts, means)
    kernel, arguments = device_segments.segment_mean_kernel, place._asdict()
    launch(kernel, "segment_mean", layout.blocks, place.width, *tensors, programs=place.parts, **arguments)
    return means
