"""Device code: a step on the slots of a cohort, their pieces' gradients added up and brought up to date in one pass."""

import triton
import triton.language as tl

from fairfold.kernels.gpu.device import number


@triton.jit
def step_tile(
    block, full, gradient, values, first, second, starts, pieces, signs, rate, root, slots,
    kept: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr,
    width: tl.constexpr, at_once: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Some slots of one client, ``at_once`` pieces of each at a time; all pointers are the client's own."""
    kind: tl.constexpr = values.dtype.element_ty
    many: tl.constexpr = tile // (at_once * width)
    lane = tl.arange(0, width)
    slot = block * many + tl.arange(0, many)
    real = slot < slots
    begin = tl.load(starts + slot, mask=real, other=0)
    end = tl.load(starts + slot + 1, mask=real, other=0)
    most = tl.max(end - begin, 0)
    slope = tl.zeros((many, width), kind)
    turn = 0
    while turn < most:
        entry = begin[:, None] + turn + tl.arange(0, at_once)[None, :]
        inside = entry < end[:, None]
        piece = tl.load(pieces + entry, mask=inside, other=0)
        where = piece[:, :, None] * width + lane[None, None, :]
        sign = tl.load(signs + where, mask=inside[:, :, None], other=0)
        found = tl.load(gradient + where, mask=inside[:, :, None], other=0)
        slope += tl.sum(tl.where(sign != 0, found * sign.to(kind), 0), 1)
        turn += at_once
    at = slot[:, None] * width + lane[None, :]
    moved = real[:, None]
    value = tl.load(values + at, mask=moved, other=0)
    direction = slope
    if kept == 1:
        square = tl.load(first + at, mask=moved, other=0) + slope * slope
        tl.store(first + at, square, mask=moved)
        direction = slope / (tl.sqrt(square) + number(epsilon, kind))
    if kept == 2:
        mean = tl.load(first + at, mask=moved, other=0)
        mean += (slope - mean) * number(1 - beta1, kind)
        square = tl.load(second + at, mask=moved, other=0) * number(beta2, kind)
        square += slope * slope * number(1 - beta2, kind)
        tl.store(first + at, mean, mask=moved)
        tl.store(second + at, square, mask=moved)
        direction = mean / (tl.sqrt(square) / root + number(epsilon, kind))
    value -= direction * rate
    tl.store(values + at, value, mask=moved)
    turn = 0
    while turn < most:
        entry = begin[:, None] + turn + tl.arange(0, at_once)[None, :]
        inside = entry < end[:, None]
        piece = tl.load(pieces + entry, mask=inside, other=0)
        where = piece[:, :, None] * width + lane[None, None, :]
        sign = tl.load(signs + where, mask=inside[:, :, None], other=0)
        tl.store(full + where, value[:, None, :] * sign.to(kind), mask=inside[:, :, None])
        turn += at_once


@triton.jit
def step_slots_kernel(
    full, gradient, values, first, second, starts, pieces, signs, crowded, rates, number_of_step,
    slots, piece_count,
    kept: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr,
    width: tl.constexpr, few: tl.constexpr, many: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One step of every client; see the reference. Crowded slots get more of a program's lanes each."""
    client = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    step = tl.load(number_of_step)
    rate, root = tl.load(rates + 2 * step), tl.load(rates + 2 * step + 1)
    full += client * piece_count * width
    gradient += client * piece_count * width
    signs += client * piece_count * width
    pieces += client * piece_count
    values += client * slots * width
    first += client * slots * width
    second += client * slots * width
    starts += client * (slots + 1)
    if tl.load(crowded + client) == 1:
        step_tile(block, full, gradient, values, first, second, starts, pieces, signs, rate, root, slots,
                  kept, beta1, beta2, epsilon, width, many, tile)  # fmt: skip
    elif block * (tile // (few * width)) < slots:
        step_tile(block, full, gradient, values, first, second, starts, pieces, signs, rate, root, slots,
                  kept, beta1, beta2, epsilon, width, few, tile)  # fmt: skip
