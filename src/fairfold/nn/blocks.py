"""What linear and convolution have in common: weights recovered a block at a time, used and forgotten."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod, sqrt

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from fairfold.errors import InvalidDtype
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout
from fairfold.nn.base import FairModule, check_same_device
from fairfold.nn.placement import Placement

BLOCK_WEIGHTS = 2**20
"""Weights recovered at once (4 MB of float32): enough for a fast product, little beside a model worth folding."""


class FairLayer(FairModule):
    """A layer of weights and, if asked for, a bias, which is kept as it is; other arguments as for the base.

    Args:
        shape: Of the full weight tensor, outputs first.
        bias: Whether a bias is added.
        device: Where the vectors live.
        dtype: Of the vectors.
        placement: See :class:`~fairfold.nn.placement.Placement`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        placement: Placement,
    ) -> None:
        super().__init__(shape, device, dtype, placement)
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1/√(inputs of an output), as torch's layers draw weights and bias."""
        bound = 1 / sqrt(prod(self.shape[1:]))
        for parameter in (self.compact, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def _operand(self, operand: Tensor) -> Tensor:
        """The input, in the dtype that autocast asks for: torch does not cast inside functions of our own.

        Outside of autocast what torch's layers refuse is refused: another device or another dtype than the weights'.
        """
        kind = operand.device.type
        if is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return operand.to(torch.get_autocast_dtype(kind))
        check_same_device("input", operand, self.memory)
        if operand.dtype != self.memory.dtype:
            raise InvalidDtype(
                f"input of dtype {operand.dtype}",
                f"{self.memory.dtype}, the layer's",
                f"Convert one of them, e.g. layer.to({operand.dtype}).",
            )
        return operand


def recover_block(layout: Layout, memory: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Weights [start, start + their number), recovered and shaped."""
    block = torch.empty(shape, dtype=memory.dtype, device=memory.device)
    ops.recover_range(layout, memory, start, block.view(-1))
    return block.to(dtype)


def without_autocast(operand: Tensor) -> AbstractContextManager[object]:
    """A block in which autocast casts nothing: operands have the dtype they should have."""
    kind = operand.device.type
    return torch.autocast(kind, enabled=False) if is_autocast_available(kind) else nullcontext()
