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


def recover_positions(source: Tensor, found: Tensor, signs: Tensor) -> Tensor:
    """See :func:`fairfold.kernels.reference_active.recover_positions`."""
    source, found, signs = source.contiguous(), found.contiguous(), signs.contiguous()
    out = torch.empty(found.shape, dtype=source.dtype, device=source.device)
    if found.numel():
        with on_device(source):
            device.recover_kernel[_grid(found.numel())](
                source.contiguous(), found, signs, out, found.numel(), block=BLOCK
            )
    return out


def accumulate_positions(values: Tensor, found: Tensor, signs: Tensor, sums: Tensor) -> None:
    """See :func:`fairfold.kernels.reference_active.accumulate_positions`; ``sums`` has no gaps."""
    values, found, signs = values.to(sums.dtype).contiguous(), found.contiguous(), signs.contiguous()
    if found.numel():
        with on_device(sums):
            device.accumulate_kernel[_grid(found.numel())](values, found, signs, sums, found.numel(), block=BLOCK)


def step_prefix(values: Tensor, gradient: Tensor, moments: Sequence[Tensor], rates: Tensor, moving: Tensor) -> None:
    """See :func:`fairfold.kernels.reference_active.step_prefix`."""
    first, second = (*moments, values, values)[:2]  # those that are not there are not touched
    epsilon = ADAM_EPSILON if len(moments) == 2 else ADAGRAD_EPSILON
    with on_device(values):
        device.step_kernel[_grid(values.numel())](
            values, gradient, first, second, rates, moving,
            kept=len(moments), beta1=BETAS[0], beta2=BETAS[1], epsilon=epsilon, block=BLOCK,
        )  # fmt: skip
