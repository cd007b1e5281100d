"""A narrower network as a projection: the leading part of every tensor, HeteroFL for layers."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fairfold.federation.projection import Projection, Totals


@dataclass(frozen=True)
class LeadingBlock(Projection):
    """The leading part of a tensor along each of its sides; the rest is zero on the device."""

    shape: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def size(self) -> int:  # type: ignore[override]
        """Numbers the device holds."""
        return prod(self.kept)

    def _cut(self, full: Tensor) -> Tensor:
        return full.view(self.shape)[tuple(slice(side) for side in self.kept)]

    def reduce(self, full: Tensor) -> Tensor:
        """Cut."""
        return self._cut(full).reshape(-1)

    def recover(self, compact: Tensor) -> Tensor:
        """Pad with zeros."""
        missing = [whole - kept for whole, kept in zip(self.shape, self.kept, strict=True)]
        sides = [side for extra in reversed(missing) for side in (0, extra)]
        return torch.nn.functional.pad(compact.view(self.kept), sides).view(-1)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        """Rows, padded with zeros."""
        return self.recover(compact).view(self.shape[0], -1)[ids]

    def whole(self, compact: Tensor) -> Tensor:
        """Pad with zeros."""
        return self.recover(compact)

    @classmethod
    def totals(cls, full: Tensor) -> Totals:
        """A number is averaged over the devices that hold it; one that nobody holds stays as it is."""
        return BlockTotals(full)


class BlockTotals(Totals):
    """Sums by block, each number divided by the weight of those who hold it."""

    def __init__(self, full: Tensor) -> None:
        self._full = full
        self._sums: dict[LeadingBlock, tuple[Tensor, float]] = {}

    def add(self, projection: Projection, compact: Tensor, weight: float) -> None:
        """See the base class."""
        assert isinstance(projection, LeadingBlock)
        total, before = self._sums.get(projection, (torch.zeros_like(compact), 0.0))
        self._sums[projection] = (total.add_(compact, alpha=weight), before + weight)

    def mean(self, *, changes: bool = False) -> Tensor:
        """See the base class."""
        sums, weights = torch.zeros_like(self._full), torch.zeros_like(self._full)
        for projection, (total, weight) in self._sums.items():
            projection._cut(sums).add_(total.view(projection.kept))
            projection._cut(weights).add_(weight)
        otherwise = torch.zeros_like(self._full) if changes else self._full
        return torch.where(weights > 0, sums / weights.clamp(min=1e-30), otherwise)
