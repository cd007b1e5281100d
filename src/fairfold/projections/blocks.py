"""Parts of tensors as they are: some columns of a table, or the leading part along every side. HeteroFL."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.projections.base import Coordinatewise, Part, Projection


class _Cut(Projection):
    """Some numbers of a tensor as they are; the others are zero on the device."""

    @classmethod
    def mean(cls, full: Tensor, parts: Sequence[Part], *, changes: bool) -> Tensor:
        """A number is averaged over the devices that hold it; one that nobody holds stays as it is."""
        sums, weights = torch.zeros_like(full), torch.zeros_like(full)
        for part in parts:
            sums += part.projection.recover(part.total)
            weights += part.projection.recover(torch.full_like(part.total, part.weight))
        otherwise = torch.zeros_like(full) if changes else full
        return torch.where(weights > 0, sums / weights.clamp(min=1e-30), otherwise)


@dataclass(frozen=True)
class LeadingBlock(_Cut):
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

    def facts(self) -> dict[str, Any]:
        """What is kept of every side."""
        return {"kept": list(self.kept)}

    @classmethod
    def of_facts(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        kept = tuple(int(side) for side in facts["kept"])
        if len(kept) != len(shape) or not all(1 <= side <= of for side, of in zip(kept, shape, strict=True)):
            raise ValueError(f"a block {kept} of a tensor of shape {shape}")
        return cls(shape, kept)


@dataclass(frozen=True)
class KeptColumns(_Cut, Coordinatewise):
    """Some columns of a matrix, in runs from a first to a last, excluded; the others are zero on the device."""

    kind: ClassVar[str] = "columns"
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def within(cls, shape: tuple[int, ...], limit: int) -> Self | None:
        """As many leading columns as fit ``limit`` numbers; None if not even one does."""
        kept = min(limit // shape[0], shape[1])
        return cls(shape, ((0, kept),)) if kept >= 1 else None

    @property
    def kept(self) -> int:
        """How many columns the device holds."""
        return sum(stop - start for start, stop in self.runs)

    @property
    def size(self) -> int:  # type: ignore[override]
        """Numbers the device holds."""
        return self.shape[0] * self.kept

    def columns(self, device: torch.device) -> Tensor:
        """Which ones."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.runs])

    def reduce(self, full: Tensor) -> Tensor:
        """Cut."""
        return full.view(self.shape).index_select(1, self.columns(full.device)).view(-1)

    def recover(self, compact: Tensor) -> Tensor:
        """Zeros for the others."""
        return self._widened(compact.view(self.shape[0], self.kept)).view(-1)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        """Rows, with zeros for the others."""
        return self._widened(compact.view(self.shape[0], self.kept)[ids])

    def _widened(self, rows: Tensor) -> Tensor:
        zeros = rows.new_zeros(*rows.shape[:-1], self.shape[1])
        return zeros.index_copy(-1, self.columns(rows.device), rows)

    def places(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """A slot for every column that is held; the others point to a slot of their row, with sign 0."""
        device = coordinates.device
        place = torch.zeros(self.shape[1], dtype=torch.int64, device=device)
        sign = torch.zeros(self.shape[1], dtype=torch.int8, device=device)
        held = self.columns(device)
        place[held], sign[held] = torch.arange(self.kept, device=device), 1
        row = coordinates // self.shape[1]
        column = coordinates - row * self.shape[1]
        return row * self.kept + place[column], sign[column]

    def counts(self, slots: Tensor) -> Tensor:
        return torch.ones_like(slots)

    def facts(self) -> dict[str, Any]:
        """The runs."""
        return {"runs": [list(run) for run in self.runs]}

    @classmethod
    def of_facts(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        runs = tuple((int(start), int(stop)) for start, stop in facts["runs"])
        ends = [0, *(end for run in runs for end in run), shape[1]]
        if ends != sorted(ends):
            raise ValueError(f"runs {runs} of {shape[1]} columns")
        return cls(shape, runs)
