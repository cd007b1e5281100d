"""FairLinear: ``nn.Linear`` in the memory a device has."""

from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from fairfold.errors import InvalidVector
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout
from fairfold.nn.blocks import BLOCK_WEIGHTS, FairLayer, recover_block, without_autocast
from fairfold.nn.placement import Placement
from fairfold.subspace.checks import SUM_DTYPE, whole_number


class FairLinear(FairLayer):
    """x·Wᵀ + b with W recovered from a compact vector block by block, in the forward and again in the backward.

    Args:
        in_features: Columns of W.
        out_features: Rows of W.
        bias: Whether there is a b; it is kept as it is.
        device: Where the vectors live.
        dtype: Of the vectors.
        placement: See :class:`~fairfold.nn.placement.Placement`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **placement: Unpack[Placement],
    ) -> None:
        rows, columns = whole_number("out_features", out_features), whole_number("in_features", in_features)
        super().__init__((rows, columns), bias, device, dtype, placement)
        self.in_features = columns
        self.out_features = rows

    def forward(self, features: Tensor) -> Tensor:
        """(*, in_features) to (*, out_features)."""
        features = self._operand(features)
        if features.dim() == 0 or features.shape[-1] != self.in_features:
            raise InvalidVector(
                f"input of shape {tuple(features.shape)}",
                f"(*, {self.in_features})",
                "Check the layer before this one.",
            )
        product: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            features.reshape(-1, self.in_features),
            self.memory,
            None if self.bias is None else self.bias.to(features.dtype),
            self.subspace.layout,
            self.offset,
            self.out_features,
        )
        return product.view(*features.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, as torch's modules show them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self._placement_repr()}"
        )


def _row_blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, BLOCK_WEIGHTS // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class _Linear(torch.autograd.Function):
    """x·Wᵀ, block by block. The memory is saved, by reference, so that torch notices a change before the backward."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, memory: Tensor, bias: Tensor | None, layout: Layout, offset: int, rows: int
    ) -> Tensor:
        ctx.save_for_backward(features, memory)
        ctx.layout, ctx.offset, ctx.rows = layout, offset, rows
        columns = features.shape[1]
        product = torch.empty(len(features), rows, dtype=features.dtype, device=features.device)
        with without_autocast(features):
            for block in _row_blocks(rows, columns):
                shape = (block.stop - block.start, columns)
                weight = recover_block(layout, memory, offset + block.start * columns, shape, features.dtype)
                product[:, block] = F.linear(features, weight, None if bias is None else bias[block])
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        features, memory = ctx.saved_tensors
        columns = features.shape[1]
        wants_features, wants_memory, wants_bias = ctx.needs_input_grad[:3]
        of_features = torch.zeros_like(features) if wants_features else None
        sums = torch.zeros(memory.numel(), dtype=SUM_DTYPE[memory.dtype], device=memory.device)
        for block in _row_blocks(ctx.rows, columns):
            start = ctx.offset + block.start * columns
            part = gradient[:, block]
            if of_features is not None:
                shape = (block.stop - block.start, columns)
                of_features.addmm_(part, recover_block(ctx.layout, memory, start, shape, features.dtype))
            if wants_memory:
                of_weight = (part.T @ features).view(-1)
                ops.accumulate_range(ctx.layout, of_weight, start, sums)
        of_memory = sums.to(memory.dtype) if wants_memory else None
        return of_features, of_memory, gradient.sum(0) if wants_bias else None, None, None, None
