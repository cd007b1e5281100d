"""The active slots of a cohort on a CUDA device: lookups by position, their backward, and the optimiser's step.

Shapes are fixed and nothing is read back, so all three can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairfold.kernels.gpu import device_positions as device
from fairfold.kernels.gpu.launch import on_device
from fairfold.kernels.reference_active import ADAGRAD_EPSILON, ADAM_EPSILON, BETAS

BLOCK = 1024


def _grid(count: int) -> tuple[int]:
    return ((count + BLOCK - 1) // BLOCK,)


def recover_lines(source: Tensor, found: Tensor, signs: Tensor, lines: Tensor) -> Tensor:
    """See :func:`fairfold.kernels.reference_active.recover_lines`; all without gaps."""
    width, count = found.shape[1], lines.numel() * found.shape[1]
    out = torch.empty(*lines.shape, width, dtype=source.dtype, device=source.device)
    if count:
        with on_device(source):
            device.recover_kernel[_grid(count)](source, found, signs, lines, out, count, width, block=BLOCK)
    return out


def accumulate_lines(values: Tensor, found: Tensor, signs: Tensor, lines: Tensor, sums: Tensor) -> None:
    """See :func:`fairfold.kernels.reference_active.accumulate_lines`; all without gaps."""
    width, count = found.shape[1], lines.numel() * found.shape[1]
    values = values.to(sums.dtype).contiguous()
    if count:
        with on_device(sums):
            device.accumulate_kernel[_grid(count)](values, found, signs, lines, sums, count, width, block=BLOCK)


def step_prefix(
    values: Tensor, gradient: Tensor, moments: Sequence[Tensor], rates: Tensor, moving: Tensor, number: Tensor
) -> None:
    """See :func:`fairfold.kernels.reference_active.step_prefix`."""
    first, second = (*moments, values, values)[:2]  # those that are not there are not touched
    epsilon = ADAM_EPSILON if len(moments) == 2 else ADAGRAD_EPSILON
    with on_device(values):
        device.step_kernel[_grid(values.numel())](
            values, gradient, first, second, rates, moving, number,
            kept=len(moments), beta1=BETAS[0], beta2=BETAS[1], epsilon=epsilon, block=BLOCK,
        )  # fmt: skip
