"""A narrower network as a projection: the leading part of every tensor, HeteroFL for layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.projections.base import Part, Projection


@dataclass(frozen=True)
class LeadingBlock(Projection):
    """The leading part of a tensor along each of its sides; the rest is zero on the device."""

    kind: ClassVar[str] = "leading block"
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

    @classmethod
    def mean(cls, full: Tensor, parts: Sequence[Part], *, changes: bool) -> Tensor:
        """A number is averaged over the devices that hold it; one that nobody holds stays as it is."""
        sums, weights = torch.zeros_like(full), torch.zeros_like(full)
        for part in parts:
            part.projection._cut(sums).add_(part.total.view(part.projection.kept))
            part.projection._cut(weights).add_(part.weight)
        otherwise = torch.zeros_like(full) if changes else full
        return torch.where(weights > 0, sums / weights.clamp(min=1e-30), otherwise)

    def facts(self) -> dict[str, Any]:
        """What is kept of every side."""
        return {"kept": list(self.kept)}

    @classmethod
    def of_facts(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        kept = tuple(int(side) for side in facts["kept"])
        if len(kept) != len(shape) or not all(1 <= side <= of for side, of in zip(kept, shape, strict=True)):
            raise ValueError(f"a block {kept} of a tensor of shape {shape}")
        return cls(shape, kept)
