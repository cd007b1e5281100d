"""Weights a block at a time: what linear and convolution recover, use and forget."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout

BLOCK_WEIGHTS = 2**20
"""Weights recovered at once (4 MB of float32): enough for a fast product, little beside a model worth folding."""


def recover_block(layout: Layout, memory: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Weights [start, start + their number), recovered and shaped."""
    block = torch.empty(shape, dtype=memory.dtype, device=memory.device)
    ops.recover_range(layout, memory, start, block.view(-1))
    return block.to(dtype)


def computing_dtype(operand: Tensor) -> torch.dtype | None:
    """The dtype autocast asks for, None outside of it: torch does not cast inside functions of our own."""
    kind = operand.device.type
    if not is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(operand: Tensor) -> AbstractContextManager[object]:
    """A block in which autocast casts nothing: operands have the dtype they should have."""
    kind = operand.device.type
    return torch.autocast(kind, enabled=False) if is_autocast_available(kind) else nullcontext()
