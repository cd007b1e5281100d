"""Device code: the touched slots of a batch, optimiser steps on them, and steps along a chain of nested sizes.

Arguments are those of :mod:`.device`.
"""

import triton
import triton.language as tl

from fairfold.kernels.gpu.device import PLAIN, flip, locate, number, row_piece


@triton.jit(do_not_specialize=[*PLAIN, "row_count"])
def place_rows_kernel(
    rows,
    places,
    row_count: tl.int64,
    count,
    head: tl.int64,
    blocks,
    key_low,
    key_high,
    row_pieces: tl.constexpr,
    parts: tl.constexpr,
    width: tl.constexpr,
    signed: tl.constexpr,
    wide: tl.constexpr,
    has_head: tl.constexpr,
    pieces: tl.constexpr,
):
    """Places = where each piece of the chosen rows lives, counted in pieces."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    inside = index < count
    piece = row_piece(rows, index, inside, row_count, row_pieces)
    place, _ = locate(piece, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    tl.store(places + index, place.to(places.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*PLAIN, "row_count"])
def gather_touched_kernel(
    values,
    rows,
    order,
    positions,
    touched,
    sums,
    row_count: tl.int64,
    count,
    head: tl.int64,
    blocks,
    key_low,
    key_high,
    row_pieces: tl.constexpr,
    parts: tl.constexpr,
    width: tl.constexpr,
    signed: tl.constexpr,
    wide: tl.constexpr,
    has_head: tl.constexpr,
    pieces: tl.constexpr,
):
    """Add up the pieces of a batch, taken in the order of their places: one sum a touched place."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    lane = tl.arange(0, width)
    inside = index < count
    origin = tl.load(order + index, mask=inside, other=0)
    position = tl.load(positions + index, mask=inside, other=0).to(tl.int64)
    piece = row_piece(rows, origin, inside, row_count, row_pieces)
    place, flips = locate(piece, head, blocks, key_low, key_high, parts, width, signed, wide, has_head)
    tl.store(touched + position, place, mask=inside)  # all that share a position store the same number
    source = values + (origin[:, None] * width + lane[None, :])
    value = tl.load(source, mask=inside[:, None], other=0).to(sums.dtype.element_ty)
    target = sums + (position[:, None] * width + lane[None, :])
    tl.atomic_add(target, flip(value, flips, lane), mask=inside[:, None], sem="relaxed")


@triton.jit(do_not_specialize=["rate", "epsilon"])
def step_kernel(
    compact,
    state,
    touched,
    positions,
    sums,
    rate: tl.float64,
    epsilon: tl.float64,
    count,
    adagrad: tl.constexpr,
    width: tl.constexpr,
    pieces: tl.constexpr,
):
    """One step of SGD or Adagrad on the touched places; how many there are is known on the device alone."""
    index = tl.program_id(0).to(tl.int64) * pieces + tl.arange(0, pieces)
    lane = tl.arange(0, width)
    kind: tl.constexpr = sums.dtype.element_ty
    inside = index <= tl.load(positions + (count - 1)).to(tl.int64)
    place = tl.load(touched + index, mask=inside, other=0)
    within = inside[:, None]
    gradient = tl.load(sums + (index[:, None] * width + lane[None, :]), mask=within, other=0)
    slot = place[:, None] * width + lane[None, :]
    value = tl.load(compact + slot, mask=within, other=0).to(kind)
    if adagrad:
        square = tl.load(state + slot, mask=within, other=0).to(kind) + gradient * gradient
        tl.store(state + slot, square, mask=within)
        gradient = gradient / (tl.sqrt(square) + number(epsilon, kind))
    tl.store(compact + slot, value - number(rate, kind) * gradient, mask=within)


@triton.jit
def fold_kernel(values, out, count, repeats: tl.constexpr, chunk: tl.constexpr, elements: tl.constexpr):
    """Out = ``repeats`` neighbouring chunks of values added up."""
    index = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    inside = index < count
    group = index // chunk
    source = values + (group * repeats * chunk + (index - group * chunk))
    real = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    kind: tl.constexpr = out.dtype.element_ty if out.dtype.element_ty.is_int() else real
    total = tl.full((elements,), 0, kind)
    for repeat in range(repeats):
        total += tl.load(source + repeat * chunk, mask=inside, other=0).to(kind)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def unfold_kernel(values, out, count, repeats, add: tl.constexpr, chunk: tl.constexpr, elements: tl.constexpr):
    """Out = (or +=) each chunk of values, ``repeats`` times over."""
    index = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    inside = index < count
    block = index // chunk
    value = tl.load(values + ((block // repeats) * chunk + (index - block * chunk)), mask=inside, other=0)
    if add:
        value = tl.load(out + index, mask=inside, other=0) + value.to(out.dtype.element_ty)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weighted_sum_kernel(total, like, addresses, weights, count, vectors: tl.constexpr, elements: tl.constexpr):
    """Total += Σ weights[i] · vector i, in one pass; ``addresses`` says where each vector begins."""
    index = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    inside = index < count
    kind: tl.constexpr = tl.float64 if total.dtype.element_ty == tl.float64 else tl.float32
    running = tl.load(total + index, mask=inside, other=0).to(kind)
    for each in tl.static_range(vectors):
        # The caller sees to it that every vector begins on 16 bytes.
        vector = tl.multiple_of(tl.load(addresses + each), 16).to(like.dtype)
        weight = tl.load(weights + each).to(kind)
        running += weight * tl.load(vector + index, mask=inside, other=0, eviction_policy="evict_first").to(kind)
    tl.store(total + index, running.to(total.dtype.element_ty), mask=inside)
