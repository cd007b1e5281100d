"""A cohort's realised weights on a CUDA device: the step of its slots. No atomics: the order of every sum is fixed."""

from collections.abc import Sequence

from torch import Tensor

from fairfold.kernels.gpu import device_stacked as device
from fairfold.kernels.gpu.launch import on_device
from fairfold.kernels.reference_active import ADAGRAD_EPSILON, ADAM_EPSILON, BETAS
from fairfold.kernels.reference_stacked import SlotTables

TILE = 128
"""Numbers that a warp takes at a time."""
AT_ONCE = 16
"""Pieces of a slot that are added up at a time, where slots hold many."""
FEWEST_PROGRAMS = 256


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
    width, pieces, slots = tables.width, tables.pieces.shape[1], tables.slots.shape[1]
    few, many = TILE // width, max(4 * TILE // (AT_ONCE * width), 1)
    with on_device(values):
        device.move_slots_kernel[max(-(-slots // few), FEWEST_PROGRAMS), len(full)](
            gradient, values, first, second, tables.slots, tables.starts, tables.pieces, tables.signs, tables.used,
            rates, number, slots, pieces,
            kept=len(moments), beta1=BETAS[0], beta2=BETAS[1],
            epsilon=ADAM_EPSILON if len(moments) == 2 else ADAGRAD_EPSILON,
            width=width, few=few, many=many, at_once=AT_ONCE, num_warps=1,
        )  # fmt: skip
        tile = 4 * TILE // width
        device.recover_pieces_kernel[-(-pieces // tile), len(full)](
            full, values, tables.slot_of, tables.signs, slots, pieces, width=width, tile=tile, num_warps=4
        )
