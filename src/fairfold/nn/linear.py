"""FairLinear: ``nn.Linear`` in the memory a device has."""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from fairfold.errors import InvalidVector
from fairfold.nn.blocks import FairLayer, Geometry, Made, Part, Slopes
from fairfold.nn.placement import Placement
from fairfold.subspace.checks import whole_number


class FairLinear(FairLayer):
    """x·Wᵀ + b with W recovered from a compact vector block by block, in the forward and again in the backward pass.

    Args:
        in_features: Columns of W.
        out_features: Rows of W.
        bias: Whether there is a b; it is kept as it is.
        device: Where the vectors live.
        dtype: Type of their numbers.
        placement: See :class:`~fairfold.nn.placement.Placement`.

    Example:
        >>> layer = FairLinear(784, 512, capacity=1 / 8)
        >>> layer(torch.ones(3, 784)).shape, layer.compact.numel(), 784 * 512 // 8
        (torch.Size([3, 512]), 50176, 50176)
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
            given = f"input of shape {tuple(features.shape)}"
            raise InvalidVector(given, f"(*, {self.in_features})", "Check the layer before this one.")
        flat = features.reshape(-1, self.in_features)
        return self._multiplied(flat, _Rows(self.shape, 1)).view(*features.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, as torch's modules show them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self._placement_repr()}"
        )


class _Rows(Geometry):
    """x·Wᵀ."""

    def product(self, given: Tensor, weights: Tensor, bias: Tensor | None, part: Part) -> Tensor:
        return F.linear(given, weights, bias)

    def slopes(
        self, slope: Tensor, given: Tensor, weights: Made, part: Part, of_given: Tensor | None, wants: Sequence[bool]
    ) -> Slopes:
        if wants[0]:
            of_given = slope @ weights() if of_given is None else of_given.addmm_(slope, weights())
        return of_given, slope.T @ given if wants[1] else None, slope.sum(0) if wants[2] else None
