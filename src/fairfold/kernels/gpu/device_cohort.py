"""Device code of cohort training: lookups by position, their backward, optimizer steps, losses.

Of the pairwise loss a program has some samples of one client. What is the user's alone, half of the first layer's
inputs, is computed once a program; gradients of what all samples use are added up in registers and leave once.
"""

import triton
import triton.language as tl

from fairfold.kernels.gpu.device import number


@triton.jit
def read(values, found, signs, at, inside):
    """The signed values of some numbers; 0 where there is none."""
    place = tl.load(found + at, mask=inside, other=0)
    sign = tl.load(signs + at, mask=inside, other=0)
    value = tl.load(values + place, mask=inside, other=0)
    return value * sign.to(value.dtype)


@triton.jit
def add(gradient, found, signs, at, inside, slope):
    """Add the gradient of some numbers to that of the values they are read from."""
    place = tl.load(found + at, mask=inside, other=0)
    sign = tl.load(signs + at, mask=inside, other=0)
    # Padding has no gradient: leaving zeros out keeps it from queueing for one address.
    tl.atomic_add(gradient + place, slope * sign.to(slope.dtype), mask=inside & (slope != 0), sem="relaxed")


@triton.jit
def recover_kernel(source, found, signs, lines, out, count, width: tl.constexpr, block: tl.constexpr):
    """Out = the signed values at the positions of some lines."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    where = tl.load(lines + at // width, mask=inside, other=0).to(tl.int64) * width + at % width
    tl.store(out + at, read(source, found, signs, where, inside), mask=inside)


@triton.jit
def accumulate_kernel(values, found, signs, lines, sums, count, width: tl.constexpr, block: tl.constexpr):
    """Sums += the signed values, at the positions of some lines."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    where = tl.load(lines + at // width, mask=inside, other=0).to(tl.int64) * width + at % width
    add(sums, found, signs, where, inside, tl.load(values + at, mask=inside, other=0))


@triton.jit
def move(
    at, inside, slope, values, first, second, rate, root,
    kept: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr,
):  # fmt: skip
    """One step of an optimizer on some numbers, by the number of moments kept."""
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
def step_kernel(
    values, gradient, first, second, rates, moving, number_of_step,
    kept: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One step on the front part that moves; see the reference."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    step = tl.load(number_of_step)
    inside = at < tl.load(moving + step)
    slope = tl.load(gradient + at, mask=inside, other=0)
    rate, root = tl.load(rates + 2 * step), tl.load(rates + 2 * step + 1)
    move(at, inside, slope, values, first, second, rate, root, kept, beta1, beta2, epsilon)
    tl.store(gradient + at, tl.zeros_like(slope), mask=inside & (slope != 0))  # most are 0 already


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


@triton.jit
def hidden_units(of_network, weights, base):
    """Outputs of the network's layer for items, before the rectifier: [samples, units]."""
    return base[None, :] + tl.sum(of_network[:, None, :] * weights[None, :, :], 2)


@triton.jit
def pairwise_kernel(
    values, gradient, rows, row_signs, fixed, fixed_signs, places, shares, number_of_step, clients, batch, used,
    l2: tl.constexpr, width: tl.constexpr, product: tl.constexpr, user: tl.constexpr, item: tl.constexpr,
    units: tl.constexpr, output: tl.constexpr, product_lanes: tl.constexpr, user_lanes: tl.constexpr,
    item_lanes: tl.constexpr, unit_lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Gradient += that of one step's batches; see :func:`fairfold.kernels.gpu.training.add_gradients`."""
    kind: tl.constexpr = values.dtype.element_ty
    step = tl.load(number_of_step)
    client = tl.program_id(1)
    sample = tl.program_id(0) * block + tl.arange(0, block)
    line = (step * clients + client) * batch + sample
    share = tl.load(shares + line, mask=sample < batch, other=0)
    if tl.max(share, 0) > 0:  # else the client has finished
        inside = share > 0
        p, u, i = tl.arange(0, product_lanes), tl.arange(0, user_lanes), tl.arange(0, item_lanes)
        unit = tl.arange(0, unit_lanes)
        has_p, has_u, has_i = p < product, u < user, i < item
        has_unit = unit < units
        # A client's line of ``fixed``: its vectors, weights and biases of the layer, weights and bias of the output.
        start = client * used
        layer = start + product + user
        at_user = layer + unit[:, None] * (user + item) + u[None, :]
        at_item = layer + unit[:, None] * (user + item) + user + i[None, :]
        has_user_weight, has_item_weight = has_unit[:, None] & has_u[None, :], has_unit[:, None] & has_i[None, :]
        at_bias = layer + units * (user + item) + unit
        at_output = layer + units * (user + item + 1)
        of_user = read(values, fixed, fixed_signs, start + p, has_p)
        into_network = read(values, fixed, fixed_signs, start + product + u, has_u)
        user_weights = read(values, fixed, fixed_signs, at_user, has_user_weight)
        item_weights = read(values, fixed, fixed_signs, at_item, has_item_weight)
        base = read(values, fixed, fixed_signs, at_bias, has_unit)
        base += tl.sum(user_weights * into_network[None, :], 1)
        if output:
            of_product = read(values, fixed, fixed_signs, at_output + p, has_p)
            of_units = read(values, fixed, fixed_signs, at_output + product + unit, has_unit)
        else:
            of_product = tl.full((product_lanes,), 1, kind)
            of_units = tl.full((unit_lanes,), 1, kind)
        weights = of_user * of_product

        decay = share * number(l2, kind)
        product_sums = tl.zeros((product_lanes,), kind)
        unit_sums = tl.zeros((unit_lanes,), kind)
        bias_sums = tl.zeros((unit_lanes,), kind)
        weight_sums = tl.zeros((unit_lanes, item_lanes), kind)
        first = tl.zeros((block,), kind)  # the slope of the sample's own item: minus those of its negatives
        own_row = tl.load(places + line * width, mask=inside, other=0).to(tl.int64)[:, None] * (product + item)
        in_product, in_network = inside[:, None] & has_p[None, :], inside[:, None] & has_i[None, :]
        own_p = read(values, rows, row_signs, own_row + p[None, :], in_product)
        own_i = read(values, rows, row_signs, own_row + product + i[None, :], in_network)
        own_units = hidden_units(own_i, item_weights, base)
        own_score = tl.sum(own_p * weights[None, :], 1)
        own_score += tl.sum(tl.maximum(own_units, 0) * of_units[None, :], 1)
        for which in tl.static_range(1, width + 1):
            # The sample's own item comes last, when its slope is known.
            if which < width:
                row = tl.load(places + line * width + which, mask=inside, other=0).to(tl.int64)[:, None]
                row = row * (product + item)
                numbers_p = read(values, rows, row_signs, row + p[None, :], in_product)
                numbers_i = read(values, rows, row_signs, row + product + i[None, :], in_network)
                before = hidden_units(numbers_i, item_weights, base)
                score = tl.sum(numbers_p * weights[None, :], 1)
                score += tl.sum(tl.maximum(before, 0) * of_units[None, :], 1)
                slope = share / (width - 1) / (1 + tl.exp(own_score - score))
                first -= slope
            else:
                row, numbers_p, numbers_i = own_row, own_p, own_i
                before, slope = own_units, first
            product_sums += tl.sum(slope[:, None] * numbers_p, 0)
            back = slope[:, None] * weights[None, :] + decay[:, None] * numbers_p
            add(gradient, rows, row_signs, row + p[None, :], in_product, back)
            if units > 0:
                unit_sums += tl.sum(slope[:, None] * tl.maximum(before, 0), 0)
                through = tl.where(before > 0, slope[:, None] * of_units[None, :], 0)
                bias_sums += tl.sum(through, 0)
                weight_sums += tl.sum(through[:, :, None] * numbers_i[:, None, :], 0)
                down = tl.sum(through[:, :, None] * item_weights[None, :, :], 1) + decay[:, None] * numbers_i
                add(gradient, rows, row_signs, row + product + i[None, :], in_network, down)

        total = tl.sum(decay, 0)
        add(gradient, fixed, fixed_signs, start + p, has_p, product_sums * of_product + total * of_user)
        if output:  # its bias cancels out of every pair
            add(gradient, fixed, fixed_signs, at_output + p, has_p, product_sums * of_user)
            add(gradient, fixed, fixed_signs, at_output + product + unit, has_unit, unit_sums)
        if units > 0:
            add(gradient, fixed, fixed_signs, at_bias, has_unit, bias_sums)
            add(gradient, fixed, fixed_signs, at_item, has_item_weight, weight_sums)
            through_user = bias_sums[:, None] * into_network[None, :]
            add(gradient, fixed, fixed_signs, at_user, has_user_weight, through_user)
            of_inputs = tl.sum(bias_sums[:, None] * user_weights, 0) + total * into_network
            add(gradient, fixed, fixed_signs, start + product + u, has_u, of_inputs)
