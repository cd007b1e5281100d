"""Device code: lookups by position, their backward, and an optimiser's step on the front part of a vector."""

import triton
import triton.language as tl

from fairfold.kernels.gpu.device import number


@triton.jit
def recover_kernel(source, found, signs, lines, out, count, width: tl.constexpr, block: tl.constexpr):
    """Out = the signed values at the positions of some lines."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    where = tl.load(lines + at // width, mask=inside, other=0).to(tl.int64) * width + at % width
    place = tl.load(found + where, mask=inside, other=0)
    sign = tl.load(signs + where, mask=inside, other=0)
    value = tl.load(source + place, mask=inside, other=0)
    tl.store(out + at, value * sign.to(value.dtype), mask=inside)


@triton.jit
def accumulate_kernel(values, found, signs, lines, sums, count, width: tl.constexpr, block: tl.constexpr):
    """Sums += the signed values, at the positions of some lines."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    where = tl.load(lines + at // width, mask=inside, other=0).to(tl.int64) * width + at % width
    place = tl.load(found + where, mask=inside, other=0)
    sign = tl.load(signs + where, mask=inside, other=0)
    value = tl.load(values + at, mask=inside, other=0)
    # Padding has no gradient: leaving zeros out keeps it from queueing for one address.
    tl.atomic_add(sums + place, value * sign.to(value.dtype), mask=inside & (value != 0), sem="relaxed")


@triton.jit
def step_kernel(
    values, gradient, first, second, rates, moving, number_of_step,
    kept: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One step on the front part that moves, by the number of moments kept; see the reference."""
    kind: tl.constexpr = values.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    step = tl.load(number_of_step)
    inside = at < tl.load(moving + step)
    slope = tl.load(gradient + at, mask=inside, other=0)
    value = tl.load(values + at, mask=inside, other=0)
    rate = tl.load(rates + 2 * step)
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
        direction = mean / (tl.sqrt(square) / tl.load(rates + 2 * step + 1) + number(epsilon, kind))
    tl.store(values + at, value - direction * rate, mask=inside)
    tl.store(gradient + at, tl.zeros_like(slope), mask=inside & (slope != 0))  # most are 0 already
