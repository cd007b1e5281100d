"""A table as a product of two thin ones: FedHM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.projections.base import Part, Projection
from fairfold.projections.hashed import Hashed


class _Averaged:
    """How devices that hold factors of a table, or all of it, get it and are averaged."""

    @classmethod
    def reduce_each(cls, full: Tensor, projections: Sequence[Any]) -> list[Tensor]:
        """All ranks from one decomposition."""
        factored = [held for held in projections if isinstance(held, LowRank)]
        if not factored:
            return [full for _ in projections]
        largest = max(factored, key=lambda held: held.rank)
        top = largest.reduce(full)
        return [largest.cut(top, held.rank) if isinstance(held, LowRank) else full for held in projections]

    @classmethod
    def mean(cls, full: Tensor, parts: Sequence[Part], *, changes: bool) -> Tensor:
        """Products are averaged: a mean of factors would be another matrix."""
        total = torch.stack([part.total for part in parts]).sum(0) if len(parts) > 1 else parts[0].total
        return total / sum(part.weight for part in parts)


@dataclass(frozen=True)
class LowRank(_Averaged, Projection):
    """A table as a product of two thin ones, N × r and r × d: FedHM. The best such product, by SVD, every round."""

    kind: ClassVar[str] = "low rank"
    linear: ClassVar[bool] = False
    shape: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:  # type: ignore[override]
        """Numbers the device holds."""
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
            top, scale = self._top(table @ table.T)
            left, right = top * scale, (top / scale).T @ table
        else:
            top, scale = self._top(table.T @ table)
            left, right = table @ (top / scale), (top * scale).T
        return torch.cat([left.reshape(-1), right.reshape(-1)])

    def _top(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """The leading eigenvectors of a small matrix, and the roots of their singular values, largest last."""
        values, vectors = torch.linalg.eigh(gram.double().cpu())  # too small for a GPU, which would have to be awaited
        scale = values[-self.rank :].clamp(min=1e-30).pow(0.25)
        return vectors[:, -self.rank :].to(gram), scale.to(gram)

    def cut(self, compact: Tensor, rank: int) -> Tensor:
        """What :meth:`reduce` gives at a smaller rank, from what it gave at this one: large components are last."""
        left, right = self.factors(compact)
        return torch.cat([left[:, -rank:].reshape(-1), right[-rank:].reshape(-1)])

    def slots(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where chosen rows of the first factor stand, [*ids.shape, rank], and all of the second, [rank, columns]."""
        right = torch.arange(self.shape[0] * self.rank, self.size).view(self.rank, self.shape[1])
        return ids[..., None] * self.rank + torch.arange(self.rank), right

    def row_places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same for rows as long as the tensor's: slot and sign of every number, the sign 0 beyond the rank."""
        column = torch.arange(self.shape[1], device=ids.device)
        slots = ids[:, None] * self.rank + column.clamp(max=self.rank - 1)
        return slots, (column < self.rank).to(torch.int8)

    def factor_places(self) -> tuple[Tensor, Tensor]:
        """Slot and sign of the second factor, filled up to columns × columns with numbers whose sign is 0."""
        number = torch.arange(self.shape[1] ** 2)
        real = number < self.rank * self.shape[1]
        return self.shape[0] * self.rank + torch.where(real, number, 0), real.to(torch.int8)

    def factors(self, compact: Tensor) -> tuple[Tensor, Tensor]:
        """The two of them, N × r and r × d."""
        cut = self.shape[0] * self.rank
        return compact[:cut].view(self.shape[0], self.rank), compact[cut:].view(self.rank, self.shape[1])

    def recover(self, compact: Tensor) -> Tensor:
        """The product."""
        left, right = self.factors(compact)
        return (left @ right).view(-1)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        """Rows of the product."""
        left, right = self.factors(compact)
        return left[ids] @ right

    def facts(self) -> dict[str, Any]:
        """The rank."""
        return {"rank": self.rank}

    @classmethod
    def of_facts(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        if not 1 <= facts["rank"] <= min(shape):
            raise ValueError(f"rank {facts['rank']} of a table of shape {shape}")
        return cls(shape, **facts)


class WholeTable(_Averaged, Hashed):
    """A table held whole beside devices that hold factors of it: averaged as they are."""

    kind = "whole table"
