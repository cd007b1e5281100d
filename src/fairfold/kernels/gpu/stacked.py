"""A cohort's realised weights on a CUDA device: the step of its slots. No atomics: the order of every sum is fixed."""

from collections.abc import Sequence

from torch import Tensor

from fairfold.kernels.gpu import device_stacked as device
from fairfold.kernels.gpu.launch import on_device
from fairfold.kernels.reference_active import ADAGRAD_EPSILON, ADAM_EPSILON, BETAS
from fairfold.kernels.reference_stacked import SlotTables

TILE, FEW, MANY = 1024, 4, 16
"""Coordinates of a program, and pieces of a slot that it takes at a time where slots hold few or many."""


def step_slots(
    full: Tensor,
    gradient: Tensor,
    values: Tensor,
    moments: Sequence[Tensor],
    tables: SlotTables,
    rates: Tensor,
    number: Tensor,
) -> None:
    """See :func:`fairfold.kernels.reference_stacked.step_slots`; all without gaps."""
    first, second = (*moments, values, values)[:2]  # those that are not there are not touched
    slots, width = values.shape[1] // tables.width, tables.width
    grid = (-(-slots * MANY * width // TILE), len(full))
    with on_device(values):
        device.step_slots_kernel[grid](
            full, gradient, values, first, second, tables.starts, tables.pieces, tables.signs, tables.crowded,
            rates, number, slots, tables.pieces.shape[1],
            kept=len(moments), beta1=BETAS[0], beta2=BETAS[1],
            epsilon=ADAM_EPSILON if len(moments) == 2 else ADAGRAD_EPSILON,
            width=width, few=FEW, many=MANY, tile=TILE,
        )  # fmt: skip
