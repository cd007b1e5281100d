"""Device code: a step on the slots of a cohort, and its weights brought up to date. No atomics."""

import triton
import triton.language as tl

from fairfold.kernels.gpu.device import number


@triton.jit
def move(
    at, inside, slope, values, first, second, rate, root,
    kept: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr,
):  # fmt: skip
    """One step of an optimiser on some numbers, by the number of moments kept."""
    kind: tl.constexpr = values.dtype.element_ty
    value = tl.load(values + at, mask=inside, other=0)
    direction = slope
    if kept == 1:
        square = tl.load(first + at, mask=inside, other=0) + slope * slope
        tl.store(first + at, square, mask=inside)
        direction = slope / (tl.sqrt(square) + number(epsilon, kind))
    if kept == 2:
        mean = tl.load(first + at, mask=inside, other=0)
        mean += (slope - mean) * number(1 - beta1, kind)
        square = tl.load(second + at, mask=inside, other=0) * number(beta2, kind)
        square += slope * slope * number(1 - beta2, kind)
        tl.store(first + at, mean, mask=inside)
        tl.store(second + at, square, mask=inside)
        direction = mean / (tl.sqrt(square) / root + number(epsilon, kind))
    tl.store(values + at, value - direction * rate, mask=inside)


@triton.jit
def move_slots_kernel(
    gradient, values, first, second, slots, starts, pieces, signs, used, rates, number_of_step,
    slot_count, piece_count,
    kept: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr,
    width: tl.constexpr, few: tl.constexpr, many: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Gradients of every slot's pieces added up, and a step taken.

    Slots stand by how many pieces they hold, so those of a program have about as many. Where they hold few, a program
    takes ``few`` slots and walks down their lists; where they hold many, ``many`` slots, ``at_once`` pieces at a time.
    """
    kind: tl.constexpr = values.dtype.element_ty
    client = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, width)
    step = tl.load(number_of_step)
    rate, root = tl.load(rates + 2 * step), tl.load(rates + 2 * step + 1)
    gradient += client * piece_count * width
    signs += client * piece_count * width
    pieces += client * piece_count
    values += client * slot_count * width
    first += client * slot_count * width
    second += client * slot_count * width
    slots += client * slot_count
    starts += client * (slot_count + 1)
    in_use = tl.load(used + 2 * client)
    block = tl.program_id(0)
    if tl.load(used + 2 * client + 1) == 0:
        while block * few < in_use:
            index = block * few + tl.arange(0, few)
            real = index < in_use
            slot = tl.load(slots + index, mask=real, other=0)
            begin = tl.load(starts + index, mask=real, other=0)
            count = tl.load(starts + index + 1, mask=real, other=0) - begin
            longest = tl.max(count, 0)
            slope = tl.zeros((few, width), kind)
            turn = 0
            while turn < longest:
                there = (turn < count)[:, None]
                piece = tl.load(pieces + begin + turn, mask=turn < count, other=0)
                where = piece[:, None] * width + lane[None, :]
                sign = tl.load(signs + where, mask=there, other=0)
                found = tl.load(gradient + where, mask=there, other=0)
                slope += tl.where(sign != 0, found * sign.to(kind), 0)
                turn += 1
            move(slot[:, None] * width + lane[None, :], real[:, None], slope, values, first, second, rate, root,
                 kept, beta1, beta2, epsilon)  # fmt: skip
            block += tl.num_programs(0)
    else:
        while block * many < in_use:
            index = block * many + tl.arange(0, many)
            real = index < in_use
            slot = tl.load(slots + index, mask=real, other=0)
            begin = tl.load(starts + index, mask=real, other=0)
            count = tl.load(starts + index + 1, mask=real, other=0) - begin
            longest = tl.max(count, 0)
            slope = tl.zeros((many, width), kind)
            turn = 0
            while turn < longest:
                entry = turn + tl.arange(0, at_once)[None, :]
                there = entry < count[:, None]
                piece = tl.load(pieces + begin[:, None] + entry, mask=there, other=0)
                where = piece[:, :, None] * width + lane[None, None, :]
                sign = tl.load(signs + where, mask=there[:, :, None], other=0)
                found = tl.load(gradient + where, mask=there[:, :, None], other=0)
                slope += tl.sum(tl.where(sign != 0, found * sign.to(kind), 0), 1)
                turn += at_once
            move(slot[:, None] * width + lane[None, :], real[:, None], slope, values, first, second, rate, root,
                 kept, beta1, beta2, epsilon)  # fmt: skip
            block += tl.num_programs(0)


@triton.jit
def recover_pieces_kernel(
    full, values, slot_of, signs, slot_count, piece_count, width: tl.constexpr, tile: tl.constexpr
):
    """Full = every coordinate's slot with its sign."""
    client = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0) * tile + tl.arange(0, tile)
    lane = tl.arange(0, width)
    real = piece < piece_count
    slot = tl.load(slot_of + client * piece_count + piece, mask=real, other=0)
    at = client * piece_count * width + piece[:, None] * width + lane[None, :]
    sign = tl.load(signs + at, mask=real[:, None], other=0)
    value = tl.load(values + client * slot_count * width + slot[:, None] * width + lane[None, :])
    tl.store(full + at, value * sign.to(value.dtype), mask=real[:, None])
