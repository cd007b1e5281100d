"""How a tensor of the server becomes what a device holds, and comes back: FAIR and its rivals behind one interface.

Every method of the federation is a choice of projections. The round itself (send, train, aggregate) knows only these
classes: :class:`Hashed` (FAIR, and with the full space FedAvg), :class:`LowRank` (FedHM) and :class:`KeptColumns`
(HeteroFL).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

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
        linear: Whether a sum of recovered vectors is the recovery of their sum, which then serves all devices at once.
    """

    shape: tuple[int, ...]
    size: int
    linear: ClassVar[bool] = True

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


class Coordinatewise(Projection):
    """A projection in which every number of the tensor is one number of the device, its negative, or 0."""

    @abstractmethod
    def places(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Slot (int64) and sign (int8) of coordinates of the tensor; the sign is 0 where the device has none of it."""

    @abstractmethod
    def counts(self, slots: Tensor) -> Tensor:
        """How many coordinates live in some slots."""


class Totals(ABC):
    """A weighted sum of what devices of different sizes send of one tensor."""

    @abstractmethod
    def add(self, projection: Projection, compact: Tensor, weight: float) -> None:
        """Add one device's vector, or the mean of several with their joint weight."""

    def add_sum(self, projection: Projection, total: Tensor, weight: float) -> None:
        """Add the weighted sum of several devices' vectors; the vector is taken over."""
        self.add(projection, total / weight, weight)

    @abstractmethod
    def mean(self, *, changes: bool = False) -> Tensor:
        """The weighted mean in the server's space.

        Args:
            changes: Whether changes were added, and not values: what nobody sent is then 0, else as it was.
        """


@dataclass(frozen=True)
class Hashed(Coordinatewise):
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

    def places(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """By hashing."""
        if self.subspace.is_full:
            return coordinates, torch.ones_like(coordinates, dtype=torch.int8)
        return ops.slots_and_signs(self.subspace.layout, coordinates)

    def counts(self, slots: Tensor) -> Tensor:
        """See the base class."""
        return torch.ones_like(slots) if self.subspace.is_full else self.subspace.counts()[slots]

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
        self._sums(projection).add(projection.subspace, compact, weight)

    def add_sum(self, projection: Projection, total: Tensor, weight: float) -> None:
        """See the base class."""
        assert isinstance(projection, Hashed)
        self._sums(projection).add_sum(projection.subspace, total, weight)

    def _sums(self, projection: Hashed) -> Sums:
        layout = projection.subspace.layout
        # The full space belongs to every hash: it joins the first, or starts one of its own.
        key = (0,) if projection.subspace.is_full else (layout.key, layout.chunk, int(layout.signed))
        return self._by_hash.setdefault(key, Sums())

    def mean(self, *, changes: bool = False) -> Tensor:  # noqa: ARG002
        """See the base class."""
        hashes = [key for key in self._by_hash if key != (0,)]
        if len(hashes) <= 1:
            first, *others = self._by_hash.values()
            return sum(others, first).recover()
        weight = sum(sums.weight for sums in self._by_hash.values())
        parts = [sums.recover().mul_(sums.weight / weight) for sums in self._by_hash.values()]
        return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class LowRank(Projection):
    """A table as a product of two thin ones, N × r and r × d: FedHM. The best such product, by SVD, every round."""

    shape: tuple[int, ...]
    rank: int
    linear: ClassVar[bool] = False

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
        top, scale = self._top(table.T @ table)  # d × d: the table is far taller than wide
        left = table @ (top / scale)
        return torch.cat([left.reshape(-1), (top * scale).T.reshape(-1)])

    def _reduce_wide(self, table: Tensor) -> Tensor:
        """The same by the rows' Gram matrix, which is the smaller one of a table wider than tall."""
        top, scale = self._top(table @ table.T)
        right = (top / scale).T @ table
        return torch.cat([(top * scale).reshape(-1), right.reshape(-1)])

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

    def mean(self, *, changes: bool = False) -> Tensor:  # noqa: ARG002
        """See the base class."""
        return self._sum / self._weight


@dataclass(frozen=True)
class KeptColumns(Coordinatewise):
    """Some columns of a matrix; the others are zero on the device: HeteroFL.

    Attributes:
        shape: Of the matrix.
        runs: First and last (excluded) of every run of columns that the device holds.
    """

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

    def whole(self, compact: Tensor) -> Tensor:
        """Zeros for the others."""
        return self.recover(compact)

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
        """See the base class."""
        return torch.ones_like(slots)

    @classmethod
    def totals(cls, full: Tensor) -> Totals:
        """A column is averaged over the devices that hold it; one that nobody holds stays as it is."""
        return ColumnTotals(full)


class ColumnTotals(Totals):
    """Sums by number of columns, each column divided by the weight of those who hold it."""

    def __init__(self, full: Tensor) -> None:
        self._full = full
        self._sums: dict[KeptColumns, tuple[Tensor, float]] = {}

    def add(self, projection: Projection, compact: Tensor, weight: float) -> None:
        """See the base class."""
        self.add_sum(projection, compact * weight, weight)

    def add_sum(self, projection: Projection, total: Tensor, weight: float) -> None:
        """See the base class."""
        assert isinstance(projection, KeptColumns)
        if projection in self._sums:
            mine, before = self._sums[projection]
            total, weight = mine.add_(total), before + weight
        self._sums[projection] = (total, weight)

    def mean(self, *, changes: bool = False) -> Tensor:
        """See the base class."""
        shape = next(iter(self._sums)).shape
        result, weights = self._full.new_zeros(shape), self._full.new_zeros(shape[1])
        for projection, (total, weight) in self._sums.items():
            columns = projection.columns(total.device)
            result.index_add_(1, columns, total.view(shape[0], projection.kept))
            weights[columns] += weight
        result /= weights.clamp(min=1e-30)
        if not changes:
            nobody = (weights == 0).nonzero().view(-1)
            result[:, nobody] = self._full.view(shape)[:, nobody]
        return result.view(-1)


@dataclass(frozen=True)
class Assignment:
    """What the devices of one capacity hold; None for devices that the method leaves out."""

    projections: dict[str, Projection] | None

    def size(self) -> int:
        """Numbers a device holds and sends."""
        return sum(projection.size for projection in (self.projections or {}).values())
