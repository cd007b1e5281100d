"""Device code: linear layers of many clients at once, forward and backward; the last one with the cross-entropy.

A first layer reads its batch straight from the table of all images: ``rows`` says which image each sample is, a line a
step, and ``number_of_step`` which line; else (``looked_up`` false) samples stand one after the other. Weights of
neighboring clients are ``line`` numbers apart.
"""

import triton
import triton.language as tl


@triton.jit
def samples_of(given, rows, number_of_step, client, sample, batch: tl.constexpr, clients: tl.constexpr,
               inputs: tl.constexpr, looked_up: tl.constexpr):  # fmt: skip
    """Pointers to the samples of a client."""
    if looked_up:
        line = tl.load(number_of_step) * clients + client
        image = tl.load(rows + line * batch + sample, mask=sample < batch, other=0)
    else:
        image = client * batch + sample
    return given + image.to(tl.int64) * inputs


@triton.jit
def forward_kernel(
    given, rows, number_of_step, weight, bias, out, line,
    batch: tl.constexpr, clients: tl.constexpr, inputs: tl.constexpr, outputs: tl.constexpr,
    looked_up: tl.constexpr, has_bias: tl.constexpr, rectify: tl.constexpr, precision: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr,
):  # fmt: skip
    """Out[client, sample, unit] = weight · given + bias, negative values cut where ``rectify``."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * wide + tl.arange(0, wide)
    sample = tl.program_id(2) * tall + tl.arange(0, tall)
    source = samples_of(given, rows, number_of_step, client, sample, batch, clients, inputs, looked_up)
    weight += client * line
    total = tl.zeros((tall, wide), tl.float32)
    for start in range(0, inputs, deep):
        at = start + tl.arange(0, deep)
        left = tl.load(source[:, None] + at[None, :], mask=(sample < batch)[:, None] & (at < inputs)[None, :], other=0)
        inside = (unit < outputs)[None, :] & (at < inputs)[:, None]
        right = tl.load(weight + unit[None, :] * inputs + at[:, None], mask=inside, other=0)
        total = tl.dot(left, right, total, input_precision=precision)
    if has_bias:
        total += tl.load(bias + client * line + unit, mask=unit < outputs, other=0)[None, :]
    if rectify:
        total = tl.maximum(total, 0)
    target = out + (client * batch + sample[:, None]) * outputs + unit[None, :]
    tl.store(target, total, mask=(sample < batch)[:, None] & (unit < outputs)[None, :])


@triton.jit
def cross_entropy_kernel(
    logits, labels, rows, shares, number_of_step,
    batch: tl.constexpr, clients: tl.constexpr, classes: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The gradient of the cross-entropy in the place of the logits: (softmax - wanted) · share."""
    client = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1) * tall + tl.arange(0, tall)
    unit = tl.arange(0, wide)
    real = sample < batch
    line = tl.load(number_of_step) * clients + client
    image = tl.load(rows + line * batch + sample, mask=real, other=0)
    share = tl.load(shares + line * batch + sample, mask=real, other=0)
    label = tl.load(labels + image, mask=real, other=0)
    at = logits + (client * batch + sample[:, None]) * classes + unit[None, :]
    inside = real[:, None] & (unit < classes)[None, :]
    score = tl.load(at, mask=inside, other=-float("inf"))
    score = tl.where(real[:, None], score, 0)
    raised = tl.exp(score - tl.max(score, 1)[:, None])
    slope = raised / tl.sum(raised, 1)[:, None] - tl.where(unit[None, :] == label[:, None], 1.0, 0.0)
    tl.store(at, slope * share[:, None], mask=inside)


@triton.jit
def weight_slope_kernel(
    slope, given, rows, number_of_step, weight_gradient, bias_gradient, line,
    batch: tl.constexpr, clients: tl.constexpr, inputs: tl.constexpr, outputs: tl.constexpr,
    looked_up: tl.constexpr, has_bias: tl.constexpr, precision: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr,
):  # fmt: skip
    """Weight_slope[client, unit, input] = Σ over samples of slope · given, and bias_slope their sum of slopes."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(2) * tall + tl.arange(0, tall)
    at = tl.program_id(0) * wide + tl.arange(0, wide)
    total = tl.zeros((tall, wide), tl.float32)
    sums = tl.zeros((tall,), tl.float32)
    for start in range(0, batch, deep):
        sample = start + tl.arange(0, deep)
        source = samples_of(given, rows, number_of_step, client, sample, batch, clients, inputs, looked_up)
        of = slope + (client * batch + sample[None, :]) * outputs + unit[:, None]
        left = tl.load(of, mask=(sample < batch)[None, :] & (unit < outputs)[:, None], other=0)
        inside = (sample < batch)[:, None] & (at < inputs)[None, :]
        right = tl.load(source[:, None] + at[None, :], mask=inside, other=0)
        total = tl.dot(left, right, total, input_precision=precision)
        sums += tl.sum(left, 1)
    target = weight_gradient + client * line + unit[:, None] * inputs + at[None, :]
    tl.store(target, total, mask=(unit < outputs)[:, None] & (at < inputs)[None, :])
    if has_bias:  # noqa: SIM102 (known when compiled, the other is not)
        if tl.program_id(0) == 0:
            tl.store(bias_gradient + client * line + unit, sums, mask=unit < outputs)


@triton.jit
def input_slope_kernel(
    slope, weight, given, out, line,
    batch: tl.constexpr, inputs: tl.constexpr, outputs: tl.constexpr,
    rectified: tl.constexpr, precision: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr,
):  # fmt: skip
    """Out[client, sample, input] = slope · weight, 0 where the input was cut (``rectified``)."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * wide + tl.arange(0, wide)
    sample = tl.program_id(2) * tall + tl.arange(0, tall)
    weight += client * line
    total = tl.zeros((tall, wide), tl.float32)
    for start in range(0, outputs, deep):
        unit = start + tl.arange(0, deep)
        of = slope + (client * batch + sample[:, None]) * outputs + unit[None, :]
        left = tl.load(of, mask=(sample < batch)[:, None] & (unit < outputs)[None, :], other=0)
        inside = (unit < outputs)[:, None] & (at < inputs)[None, :]
        right = tl.load(weight + unit[:, None] * inputs + at[None, :], mask=inside, other=0)
        total = tl.dot(left, right, total, input_precision=precision)
    place = (client * batch + sample[:, None]) * inputs + at[None, :]
    inside = (sample < batch)[:, None] & (at < inputs)[None, :]
    if rectified:
        total = tl.where(tl.load(given + place, mask=inside, other=0) > 0, total, 0)
    tl.store(out + place, total, mask=inside)
