"""Training of a cohort as one program on a CUDA device.

The specifications are :mod:`fairfold.kernels.reference`, :mod:`fairfold.kernels.training` and, for chains of linear
layers, :mod:`fairfold.backends.image_layers`. Shapes are fixed and nothing is read back, so all of it can be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairfold.kernels.gpu import device_affine, device_cohort
from fairfold.kernels.gpu.launch import on_device
from fairfold.kernels.reference import ADAGRAD_EPSILON, ADAM_EPSILON, BETAS
from fairfold.kernels.training import LookupBuffers, ModelForm, SlotTables

BLOCK = 1024

SAMPLES = 8
"""Samples of a program of losses, which is one warp: of blocks of 8 to 64 the smallest was fastest on an H200."""
MAX_WEIGHTS = 1024
"""Such a program holds a layer's weights, and their gradient, in registers."""
MAX_NUMBERS = 4096
"""Weights times samples of a program, likewise."""

TILE = 128
"""Numbers of slots that a warp takes at a time."""
AT_ONCE = 16
"""Pieces of a slot that are added up at a time, where slots hold many."""
MIN_PROGRAMS = 256


def recover_lines(source: Tensor, positions: Tensor, signs: Tensor, lines: Tensor) -> Tensor:
    """Signed values at the positions of chosen lines; all tensors are contiguous."""
    width = positions.shape[1]
    count = lines.numel() * width
    out = torch.empty(*lines.shape, width, dtype=source.dtype, device=source.device)
    if count:
        with on_device(source):
            device_cohort.recover_kernel[(-(-count // BLOCK),)](
                source, positions, signs, lines, out, count, width, block=BLOCK
            )
    return out


def accumulate_lines(values: Tensor, positions: Tensor, signs: Tensor, lines: Tensor, sums: Tensor) -> None:
    """Add signed values at the positions of chosen lines; all tensors are contiguous."""
    width = positions.shape[1]
    count = lines.numel() * width
    values = values.to(sums.dtype).contiguous()
    if count:
        with on_device(sums):
            device_cohort.accumulate_kernel[(-(-count // BLOCK),)](
                values, positions, signs, lines, sums, count, width, block=BLOCK
            )


def _optimizer(values: Tensor, moments: Sequence[Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The two moments and the constants of a step; the kernel does not touch moments that are not there."""
    first, second = (*moments, values, values)[:2]
    epsilon = ADAM_EPSILON if len(moments) == 2 else ADAGRAD_EPSILON
    return first, second, {"kept": len(moments), "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": epsilon}


def step_prefix(
    values: Tensor, gradient: Tensor, moments: Sequence[Tensor], rates: Tensor, moving: Tensor, number: Tensor
) -> None:
    """One optimizer step on a front part of the values."""
    first, second, constants = _optimizer(values, moments)
    with on_device(values):
        device_cohort.step_kernel[(-(-values.numel() // BLOCK),)](
            values, gradient, first, second, rates, moving, number, **constants, block=BLOCK
        )


def step_slots(
    full: Tensor,
    gradient: Tensor,
    values: Tensor,
    moments: Sequence[Tensor],
    tables: SlotTables,
    rates: Tensor,
    number: Tensor,
) -> None:
    """One optimizer step on compact vectors, recovered into ``full``; contiguous, without atomics."""
    first, second, constants = _optimizer(values, moments)
    width = tables.width
    pieces = tables.pieces.shape[1]
    slots = tables.slots.shape[1]
    few = TILE // width
    many = max(4 * TILE // (AT_ONCE * width), 1)
    with on_device(values):
        device_cohort.move_slots_kernel[max(-(-slots // few), MIN_PROGRAMS), len(full)](
            gradient, values, first, second, tables.slots, tables.starts, tables.pieces, tables.signs, tables.used,
            rates, number, slots, pieces, **constants, width=width, few=few, many=many, at_once=AT_ONCE, num_warps=1,
        )  # fmt: skip
        tile = 4 * TILE // width
        device_cohort.recover_pieces_kernel[-(-pieces // tile), len(full)](
            full, values, tables.slot_of, tables.signs, slots, pieces, width=width, tile=tile, num_warps=4
        )


def add_gradients(form: ModelForm, l2: float, values: Tensor, gradient: Tensor, lookups: LookupBuffers) -> bool:
    """Add the gradient of the pairwise loss of a step's batches, as ``backends/cuda_graph.py``; False if too large."""
    units = sum(form.layers)
    weights = _lanes(units) * _lanes(form.item)
    if len(form.layers) > 1 or weights > MAX_WEIGHTS:
        return False
    _, clients, batch, width = lookups.sample_rows.shape
    block = min(SAMPLES, MAX_NUMBERS // weights)
    rows = lookups.rows
    fixed = lookups.fixed
    with on_device(values):
        device_cohort.pairwise_kernel[(-(-batch // block), clients)](
            values, gradient, rows.positions, rows.signs, fixed.positions, fixed.signs,
            lookups.sample_rows, lookups.shares, lookups.step, clients, batch, fixed.positions.shape[1],
            l2=l2, width=width, product=form.product, user=form.user, item=form.item,
            units=units, output=form.output, product_lanes=_lanes(form.product),
            user_lanes=_lanes(form.user), item_lanes=_lanes(form.item), unit_lanes=_lanes(units),
            block=block, num_warps=1,
        )  # fmt: skip
    return True


def _lanes(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()


# -- chains of linear layers -----------------------------------------------------------------------------------------

PRECISION = "tf32x3"
"""How a product of float32 is formed: by three products of tensor cores, as exact as one of float32."""

CHAIN_TILES: dict[str, dict[str, int]] = {
    "forward": {"tall": 64, "wide": 32, "deep": 64, "num_warps": 4, "num_stages": 3},
    "weights": {"tall": 128, "wide": 64, "deep": 64, "num_warps": 8, "num_stages": 2},
    "inputs": {"tall": 64, "wide": 64, "deep": 32, "num_warps": 4, "num_stages": 2},
}
"""The work of one program: rows and columns of the result, terms of a sum at a time, warps, loads under way."""
MIN_SIDE = 16
"""The smallest side of a product on tensor cores; layers of so few units are one tile wide."""


@dataclass(frozen=True)
class StackedLinear:
    """A linear layer of all clients."""

    weight: Tensor  # [clients, outputs, inputs]; clients need not be adjacent in memory
    weight_gradient: Tensor  # where its gradient goes
    bias: Tensor | None  # [clients, outputs]
    bias_gradient: Tensor | None
    rectify: bool  # whether a ReLU follows


@dataclass(frozen=True)
class Batches:
    """The batches of all steps of a round."""

    pixels: Tensor  # [images, inputs]
    labels: Tensor  # int64 [images]
    rows: Tensor  # int32 [steps, all clients, batch]: which images
    shares: Tensor  # like rows: the weight of each image in the loss
    number: Tensor  # int64 [1]: which step it is


def chain_gradients(chain: Sequence[StackedLinear], batches: Batches) -> None:
    """Write the gradients of the cross-entropy of the next step's batches, for the clients of the chain."""
    outputs = batches.pixels
    inputs = []
    with on_device(outputs):
        for layer in chain:
            inputs.append(outputs)
            outputs = _forward(layer, outputs, batches, first=len(inputs) == 1)
        _cross_entropy(outputs, batches)
        gradient = outputs
        for number in range(len(chain) - 1, -1, -1):
            _weight_gradient(chain[number], gradient, inputs[number], batches, first=number == 0)
            if number:
                rectified = chain[number - 1].rectify
                gradient = _input_gradient(chain[number], gradient, inputs[number], rectified=rectified)


def _tile(name: str, outputs: int, side: str) -> dict[str, int]:
    """The tile of a product, on the side of the outputs as small as a layer of few units."""
    return CHAIN_TILES[name] | ({side: MIN_SIDE} if outputs <= MIN_SIDE else {})


def _forward(layer: StackedLinear, inputs: Tensor, batches: Batches, *, first: bool) -> Tensor:
    working, num_outputs, num_inputs = layer.weight.shape
    _, clients, batch = batches.rows.shape
    out = torch.empty(working, batch, num_outputs, device=inputs.device)
    tile = _tile("forward", num_outputs, "wide")
    device_affine.forward_kernel[-(-num_outputs // tile["wide"]), working, -(-batch // tile["tall"])](
        inputs, batches.rows, batches.number, layer.weight, layer.weight if layer.bias is None else layer.bias, out,
        layer.weight.stride(0), batch=batch, clients=clients, inputs=num_inputs, outputs=num_outputs,
        looked_up=first, has_bias=layer.bias is not None, rectify=layer.rectify, precision=PRECISION, **tile,
    )  # fmt: skip
    return out


def _cross_entropy(logits: Tensor, batches: Batches) -> None:
    """Replace logits by the gradient of the cross-entropy."""
    working, batch, classes = logits.shape
    tall = 64
    wide = max(16, 1 << (classes - 1).bit_length())
    device_affine.cross_entropy_kernel[working, -(-batch // tall)](
        logits, batches.labels, batches.rows, batches.shares, batches.number,
        batch=batch, clients=batches.rows.shape[1], classes=classes, tall=tall, wide=wide,
    )  # fmt: skip


def _weight_gradient(layer: StackedLinear, gradient: Tensor, inputs: Tensor, batches: Batches, *, first: bool) -> None:
    working, num_outputs, num_inputs = layer.weight.shape
    _, clients, batch = batches.rows.shape
    tile = _tile("weights", num_outputs, "tall")
    device_affine.weight_slope_kernel[-(-num_inputs // tile["wide"]), working, -(-num_outputs // tile["tall"])](
        gradient, inputs, batches.rows, batches.number, layer.weight_gradient,
        layer.weight_gradient if layer.bias_gradient is None else layer.bias_gradient,
        layer.weight.stride(0), batch=batch, clients=clients, inputs=num_inputs, outputs=num_outputs,
        looked_up=first, has_bias=layer.bias_gradient is not None, precision=PRECISION, **tile,
    )  # fmt: skip


def _input_gradient(layer: StackedLinear, gradient: Tensor, inputs: Tensor, *, rectified: bool) -> Tensor:
    working, num_outputs, num_inputs = layer.weight.shape
    batch = gradient.shape[1]
    out = torch.empty(working, batch, num_inputs, device=gradient.device)
    tile = _tile("inputs", num_outputs, "deep")
    device_affine.input_slope_kernel[-(-num_inputs // tile["wide"]), working, -(-batch // tile["tall"])](
        gradient, layer.weight, inputs, out, layer.weight.stride(0), batch=batch, inputs=num_inputs,
        outputs=num_outputs, rectified=rectified, precision=PRECISION, **tile,
    )  # fmt: skip
    return out
