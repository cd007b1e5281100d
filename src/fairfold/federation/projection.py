"""How a tensor of the server becomes what a device holds, and comes back: FAIR and its rivals behind one interface.

Every method of the federation is a choice of projections. The round itself (send, train, aggregate) knows only these
classes: :class:`Hashed` (FAIR, and with the full space FedAvg), :class:`LowRank` (FedHM) and :class:`LeadingColumns`
(HeteroFL).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fairfold.kernels import ops
from fairfold.kernels.reference import row_coordinates
from fairfold.subspace import Subspace, Sums


class Projection(ABC):
    """What one size of device holds of one tensor.

    Attributes:
        shape: Of the tensor; vectors here are flat.
        size: Numbers the device holds.
    """

    shape: tuple[int, ...]
    size: int

    @abstractmethod
    def reduce(self, full: Tensor) -> Tensor:
        """Server to device."""

    @abstractmethod
    def recover(self, compact: Tensor) -> Tensor:
        """Device to server."""

    @abstractmethod
    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        """Chosen rows of the tensor, [*ids.shape, row length]; gradients flow back to ``compact``."""

    @abstractmethod
    def whole(self, compact: Tensor) -> Tensor:
        """All of the tensor, flat; gradients flow back to ``compact``."""

    @classmethod
    @abstractmethod
    def totals(cls, full: Tensor) -> "Totals":
        """An empty sum of what devices send of this tensor, ``full`` being what the server has of it."""


class Totals(ABC):
    """A weighted sum of what devices of different sizes send of one tensor."""

    @abstractmethod
    def add(self, projection: Projection, compact: Tensor, weight: float) -> None:
        """Add one device's vector, or the mean of several with their joint weight."""

    @abstractmethod
    def mean(self) -> Tensor:
        """The weighted mean in the server's space."""


@dataclass(frozen=True)
class Hashed(Projection):
    """A FAIR subspace, the full space among them."""

    shape: tuple[int, ...]
    subspace: Subspace

    @property
    def size(self) -> int:  # type: ignore[override]
        """Numbers the device holds."""
        return self.subspace.size

    def reduce(self, full: Tensor) -> Tensor:
        """The signed mean of every slot."""
        return self.subspace.reduce(full)

    def recover(self, compact: Tensor) -> Tensor:
        """Signed copies."""
        return self.subspace.recover(compact)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        """Rows looked up by hashing."""
        row_size = self.shape[-1]
        coordinates = row_coordinates(ids.reshape(-1), row_size)
        slots, signs = ops.slots_and_signs(self.subspace.layout, coordinates)
        return (compact[slots] * signs).view(*ids.shape, row_size)

    def whole(self, compact: Tensor) -> Tensor:
        """Every coordinate looked up."""
        if self.subspace.is_full:
            return compact
        slots, signs = self.subspace.slots(0, self.subspace.full_size, compact.device)
        return compact[slots] * signs

    @classmethod
    def totals(cls, full: Tensor) -> Totals:  # noqa: ARG003
        """Totals per size, unfolded and recovered once; an independent hash is recovered alone."""
        return HashedTotals()


class HashedTotals(Totals):
    """One :class:`Sums` a hash: a single one unless the subspaces are inconsistent."""

    def __init__(self) -> None:
        self._by_hash: dict[tuple[int, ...], Sums] = {}

    def add(self, projection: Projection, compact: Tensor, weight: float) -> None:
        """See the base class."""
        assert isinstance(projection, Hashed)
        layout = projection.subspace.layout
        # The full space belongs to every hash: it joins the first, or starts one of its own.
        key = (0,) if projection.subspace.is_full else (layout.key, layout.chunk, int(layout.signed))
        self._by_hash.setdefault(key, Sums()).add(projection.subspace, compact, weight)

    def mean(self) -> Tensor:
        """See the base class."""
        hashes = [key for key in self._by_hash if key != (0,)]
        if len(hashes) <= 1:
            total = Sums()
            for sums in self._by_hash.values():
                total = total + sums
            return total.recover()
        weight = sum(sums.weight for sums in self._by_hash.values())
        parts = [sums.recover().mul_(sums.weight / weight) for sums in self._by_hash.values()]
        return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class LowRank(Projection):
    """A table as a product of two thin ones, N × r and r × d: FedHM. The best such product, by SVD, every round."""

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
        """Truncated SVD, the singular values shared evenly between both factors."""
        table = full.view(self.shape)
        if self.shape[0] < self.shape[1]:
            return self._reduce_wide(table)
        values, vectors = torch.linalg.eigh((table.T @ table).double())  # d × d: the table is far taller than wide
        top = vectors[:, -self.rank :].to(full.dtype)
        scale = values[-self.rank :].clamp(min=1e-30).pow(0.25).to(full.dtype)
        left = table @ (top / scale)
        return torch.cat([left.reshape(-1), (top * scale).T.reshape(-1)])

    def _reduce_wide(self, table: Tensor) -> Tensor:
        """The same by the rows' Gram matrix, which is the smaller one of a table wider than tall."""
        values, vectors = torch.linalg.eigh((table @ table.T).double())
        top = vectors[:, -self.rank :].to(table.dtype)
        scale = values[-self.rank :].clamp(min=1e-30).pow(0.25).to(table.dtype)
        right = (top / scale).T @ table
        return torch.cat([(top * scale).reshape(-1), right.reshape(-1)])

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

    def whole(self, compact: Tensor) -> Tensor:
        """The product."""
        return self.recover(compact)

    @classmethod
    def totals(cls, full: Tensor) -> Totals:
        """Products are averaged: a mean of factors would be another matrix."""
        return RecoveredTotals(full)


class WholeTable(Hashed):
    """A table held whole beside devices that hold factors of it."""

    @classmethod
    def totals(cls, full: Tensor) -> Totals:
        """See :class:`LowRank`."""
        return RecoveredTotals(full)


class RecoveredTotals(Totals):
    """Every device's tensor recovered, then averaged."""

    def __init__(self, full: Tensor) -> None:
        self._sum = torch.zeros_like(full)
        self._weight = 0.0

    def add(self, projection: Projection, compact: Tensor, weight: float) -> None:
        """See the base class."""
        self._sum.add_(projection.recover(compact), alpha=weight)
        self._weight += weight

    def mean(self) -> Tensor:
        """See the base class."""
        return self._sum / self._weight


@dataclass(frozen=True)
class LeadingColumns(Projection):
    """The leading columns of a table; the others are zero on the device: HeteroFL."""

    shape: tuple[int, ...]
    kept: int

    @property
    def size(self) -> int:  # type: ignore[override]
        """Numbers the device holds."""
        return self.shape[0] * self.kept

    @classmethod
    def within(cls, shape: tuple[int, ...], limit: int) -> Self | None:
        """As many columns as fit ``limit`` numbers; None if not even one does."""
        kept = min(limit // shape[0], shape[1])
        return cls(shape, kept) if kept >= 1 else None

    def reduce(self, full: Tensor) -> Tensor:
        """Cut."""
        return full.view(self.shape)[:, : self.kept].reshape(-1)

    def recover(self, compact: Tensor) -> Tensor:
        """Pad with zeros."""
        missing = self.shape[1] - self.kept
        return torch.nn.functional.pad(compact.view(self.shape[0], self.kept), (0, missing)).view(-1)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        """Rows, padded with zeros."""
        rows = compact.view(self.shape[0], self.kept)[ids]
        return torch.nn.functional.pad(rows, (0, self.shape[1] - self.kept))

    def whole(self, compact: Tensor) -> Tensor:
        """Pad with zeros."""
        return self.recover(compact)

    @classmethod
    def totals(cls, full: Tensor) -> Totals:
        """A column is averaged over the devices that hold it; one that nobody holds stays as it is."""
        return ColumnTotals(full)


class ColumnTotals(Totals):
    """Sums by number of columns, each column divided by the weight of those who hold it."""

    def __init__(self, full: Tensor) -> None:
        self._full = full
        self._sums: dict[LeadingColumns, tuple[Tensor, float]] = {}

    def add(self, projection: Projection, compact: Tensor, weight: float) -> None:
        """See the base class."""
        assert isinstance(projection, LeadingColumns)
        total, before = self._sums.get(projection, (torch.zeros_like(compact), 0.0))
        self._sums[projection] = (total.add_(compact, alpha=weight), before + weight)

    def mean(self) -> Tensor:
        """See the base class."""
        shape = next(iter(self._sums)).shape
        result, weights = torch.zeros(shape, dtype=self._full.dtype), torch.zeros(shape[1])
        for projection, (total, weight) in self._sums.items():
            result[:, : projection.kept] += total.view(shape[0], projection.kept)
            weights[: projection.kept] += weight
        return torch.where(weights > 0, result / weights.clamp(min=1e-30), self._full.view(shape)).view(-1)


@dataclass(frozen=True)
class Assignment:
    """What the devices of one capacity hold; None for devices that the method leaves out."""

    projections: dict[str, Projection] | None

    def size(self) -> int:
        """Numbers a device holds and sends."""
        return sum(projection.size for projection in (self.projections or {}).values())
