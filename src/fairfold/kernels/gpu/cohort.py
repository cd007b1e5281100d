"""What a cohort trains as one program, on a CUDA device: lookups by position, their backward, and optimiser steps.

Shapes are fixed and nothing is read back, so all of it can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairfold.kernels.form import Form, Lines
from fairfold.kernels.gpu import device_cohort as device
from fairfold.kernels.gpu.launch import on_device
from fairfold.kernels.reference import ADAGRAD_EPSILON, ADAM_EPSILON, BETAS
from fairfold.kernels.reference_stacked import SlotTables

BLOCK = 1024

SAMPLES = 8
"""Samples of a program of losses, which is one warp: of blocks of 8 to 64 the smallest was fastest on an H200."""
MOST_WEIGHTS = 1024
"""Such a program keeps a layer's weights, and their gradient, in registers."""
MOST_NUMBERS = 4096
"""Weights times samples of a program, likewise."""

TILE = 128
"""Numbers of slots that a warp takes at a time."""
AT_ONCE = 16
"""Pieces of a slot that are added up at a time, where slots hold many."""
FEWEST_PROGRAMS = 256


def recover_lines(source: Tensor, found: Tensor, signs: Tensor, lines: Tensor) -> Tensor:
    """See :func:`.reference.recover_lines`; all without gaps."""
    width, count = found.shape[1], lines.numel() * found.shape[1]
    out = torch.empty(*lines.shape, width, dtype=source.dtype, device=source.device)
    if count:
        with on_device(source):
            device.recover_kernel[(-(-count // BLOCK),)](source, found, signs, lines, out, count, width, block=BLOCK)
    return out


def accumulate_lines(values: Tensor, found: Tensor, signs: Tensor, lines: Tensor, sums: Tensor) -> None:
    """See :func:`.reference.accumulate_lines`; all without gaps."""
    width, count = found.shape[1], lines.numel() * found.shape[1]
    values = values.to(sums.dtype).contiguous()
    if count:
        with on_device(sums):
            device.accumulate_kernel[(-(-count // BLOCK),)](
                values, found, signs, lines, sums, count, width, block=BLOCK
            )


def _optimiser(values: Tensor, moments: Sequence[Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The moments and constants of a step; moments that are not there are not touched."""
    first, second = (*moments, values, values)[:2]
    epsilon = ADAM_EPSILON if len(moments) == 2 else ADAGRAD_EPSILON
    return first, second, {"kept": len(moments), "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": epsilon}


def step_prefix(
    values: Tensor, gradient: Tensor, moments: Sequence[Tensor], rates: Tensor, moving: Tensor, number: Tensor
) -> None:
    """See :func:`.reference.step_prefix`."""
    first, second, constants = _optimiser(values, moments)
    with on_device(values):
        device.step_kernel[(-(-values.numel() // BLOCK),)](
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
    """See :func:`.reference_stacked.step_slots`; all without gaps. No atomics: the order of every sum is fixed."""
    first, second, constants = _optimiser(values, moments)
    width, pieces, slots = tables.width, tables.pieces.shape[1], tables.slots.shape[1]
    few, many = TILE // width, max(4 * TILE // (AT_ONCE * width), 1)
    with on_device(values):
        device.move_slots_kernel[max(-(-slots // few), FEWEST_PROGRAMS), len(full)](
            gradient, values, first, second, tables.slots, tables.starts, tables.pieces, tables.signs, tables.used,
            rates, number, slots, pieces, **constants, width=width, few=few, many=many, at_once=AT_ONCE, num_warps=1,
        )  # fmt: skip
        tile = 4 * TILE // width
        device.recover_pieces_kernel[-(-pieces // tile), len(full)](
            full, values, tables.slot_of, tables.signs, slots, pieces, width=width, tile=tile, num_warps=4
        )


def add_slopes(form: Form, regulariser: float, values: Tensor, gradient: Tensor, lines: Lines) -> bool:
    """Add the gradient of the pairwise loss of a step's batches; False where a form is not served.

    The specification is the same step under autograd, in ``backends/cuda_graph.py``.
    """
    units = sum(form.layers)
    weights = _lanes(units) * _lanes(form.item)
    if len(form.layers) > 1 or weights > MOST_WEIGHTS:
        return False
    _, clients, batch, width = lines.places.shape
    block = min(SAMPLES, MOST_NUMBERS // weights)
    with on_device(values):
        device.pairwise_kernel[(-(-batch // block), clients)](
            values, gradient, lines.rows.positions, lines.rows.signs, lines.fixed.positions, lines.fixed.signs,
            lines.places, lines.shares, lines.step, clients, batch, lines.fixed.positions.shape[1],
            regulariser=regulariser, width=width, product=form.product, user=form.user, item=form.item,
            units=units, output=form.output, product_lanes=_lanes(form.product),
            user_lanes=_lanes(form.user), item_lanes=_lanes(form.item), unit_lanes=_lanes(units),
            block=block, num_warps=1,
        )  # fmt: skip
    return True


def _lanes(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
