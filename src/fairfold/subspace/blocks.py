"""Projections of the baselines: columns of tables (HeteroFL), low-rank factors (FedHM)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.subspace.projection import Coordinatewise, Hashed, Projection, SizeSum, ZeroFilled, register_projection


@register_projection
@dataclass(frozen=True)
class KeptColumns(ZeroFilled, Coordinatewise):
    """Some columns of a matrix, as runs (start, stop)."""

    kind: ClassVar[str] = "columns"
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def within(cls, shape: tuple[int, ...], limit: int) -> Self | None:
        """The projection with as many leading columns as fit ``limit`` numbers; None if not even one does."""
        kept = min(limit // shape[0], shape[1])
        return cls(shape, ((0, kept),)) if kept >= 1 else None

    @property
    def kept(self) -> int:
        """Number of columns that are held."""
        return sum(stop - start for start, stop in self.runs)

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.shape[0] * self.kept

    def columns(self, device: torch.device) -> Tensor:
        """Indices of the columns that are held."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.runs])

    def reduce(self, full: Tensor) -> Tensor:
        return full.view(self.shape).index_select(1, self.columns(full.device)).view(-1)

    def recover(self, compact: Tensor) -> Tensor:
        return self._widened(compact.view(self.shape[0], self.kept)).view(-1)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        return self._widened(compact.view(self.shape[0], self.kept)[ids])

    def _widened(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(*rows.shape[:-1], self.shape[1]).index_copy(-1, self.columns(rows.device), rows)

    def places(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Slot and sign of coordinates; those of other columns get a slot of their row, with sign 0."""
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

    def description(self) -> dict[str, Any]:
        return {"runs": [list(run) for run in self.runs]}

    @classmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        runs = tuple((int(start), int(stop)) for start, stop in facts["runs"])
        ends = [0, *(end for run in runs for end in run), shape[1]]
        if ends != sorted(ends):
            raise ValueError(f"runs {runs} of {shape[1]} columns")
        return cls(shape, runs)


class _Averaged:
    """Reduction and averaging of tables that some clients hold as factors and others whole."""

    @classmethod
    def reduce_each(cls, full: Tensor, projections: Sequence[Any]) -> list[Tensor]:
        """Reduce for all ranks from one decomposition."""
        factored = [held for held in projections if isinstance(held, LowRank)]
        if not factored:
            return [full for _ in projections]
        largest = max(factored, key=lambda held: held.rank)
        top = largest.reduce(full)
        return [largest.cut(top, held.rank) if isinstance(held, LowRank) else full for held in projections]

    @classmethod
    def mean(cls, full: Tensor, parts: Sequence[SizeSum], *, changes: bool) -> Tensor:
        """Average products: a mean of factors would be another matrix."""
        total = torch.stack([part.total for part in parts]).sum(0) if len(parts) > 1 else parts[0].total
        return total / sum(part.weight for part in parts)


@register_projection
@dataclass(frozen=True)
class LowRank(_Averaged, Projection):
    """A table as a product of two factors, N × r and r × d, the best one by SVD (FedHM)."""

    kind: ClassVar[str] = "low rank"
    linear: ClassVar[bool] = False
    shape: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.rank * (self.shape[0] + self.shape[1])

    @classmethod
    def within(cls, shape: tuple[int, ...], limit: int) -> Self | None:
        """The largest rank that fits ``limit`` numbers; None if not even rank 1 does."""
        rank = min(limit // (shape[0] + shape[1]), *shape)
        return cls(shape, rank) if rank >= 1 else None

    def reduce(self, full: Tensor) -> Tensor:
        """Truncated SVD by the smaller Gram matrix, the singular values shared evenly between both factors."""
        table = full.view(self.shape)
        if self.shape[0] < self.shape[1]:
            top, scale = self._top_components(table @ table.T)
            left, right = top * scale, (top / scale).T @ table
        else:
            top, scale = self._top_components(table.T @ table)
            left, right = table @ (top / scale), (top * scale).T
        return torch.cat([left.reshape(-1), right.reshape(-1)])

    def _top_components(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(gram.double().cpu())  # too small for a GPU, which would have to be awaited
        return vectors[:, -self.rank :].to(gram), values[-self.rank :].clamp(min=1e-30).pow(0.25).to(gram)

    def cut(self, compact: Tensor, rank: int) -> Tensor:
        """Truncate reduced factors to a smaller rank: large components are last."""
        left, right = self.factors(compact)
        return torch.cat([left[:, -rank:].reshape(-1), right[-rank:].reshape(-1)])

    def slots(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Slots of some rows of the first factor, [*ids.shape, rank], and of the second, [rank, columns]."""
        right = torch.arange(self.shape[0] * self.rank, self.size).view(self.rank, self.shape[1])
        return ids[..., None] * self.rank + torch.arange(self.rank), right

    def row_slots(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Slot and sign of rows of the first factor, padded to the table's columns with sign 0."""
        column = torch.arange(self.shape[1], device=ids.device)
        slots = ids[:, None] * self.rank + column.clamp(max=self.rank - 1)
        return slots, (column < self.rank).to(torch.int8)

    def factor_places(self) -> tuple[Tensor, Tensor]:
        """Slot and sign of the second factor, padded to columns × columns with sign 0."""
        number = torch.arange(self.shape[1] ** 2)
        real = number < self.rank * self.shape[1]
        return self.shape[0] * self.rank + torch.where(real, number, 0), real.to(torch.int8)

    def factors(self, compact: Tensor) -> tuple[Tensor, Tensor]:
        """Split a compact vector into its two factors, N × r and r × d."""
        cut = self.shape[0] * self.rank
        return compact[:cut].view(self.shape[0], self.rank), compact[cut:].view(self.rank, self.shape[1])

    def recover(self, compact: Tensor) -> Tensor:
        left, right = self.factors(compact)
        return (left @ right).view(-1)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        left, right = self.factors(compact)
        return left[ids] @ right

    def description(self) -> dict[str, Any]:
        return {"rank": self.rank}

    @classmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        if not 1 <= facts["rank"] <= min(shape):
            raise ValueError(f"rank {facts['rank']} of a table of shape {shape}")
        return cls(shape, **facts)


@register_projection
class WholeTable(_Averaged, Hashed):
    """A whole table beside clients that hold factors of it, averaged as products."""

    kind = "whole table"
