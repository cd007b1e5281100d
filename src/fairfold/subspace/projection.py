"""Projections: how a tensor becomes what a client holds, and back; only the class, named by ``kind``, knows how."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from fairfold.kernels import ops
from fairfold.kernels.reference import row_coordinates
from fairfold.subspace.nesting import Sums, reduce_all
from fairfold.subspace.subspace import Subspace
from fairfold.typing import FLOAT_BYTES

MAX_DIMENSIONS = 8
MAX_TENSOR_SIZE = 2**48

Kind = TypeVar("Kind", bound="type[Projection]")

KINDS: "dict[str, type[Projection]]" = {}  # by their name in files and messages (:func:`register_projection`)


class Projection(ABC):
    """What clients of one size hold of one tensor."""

    kind: ClassVar[str]  # its name in files and messages
    linear: ClassVar[bool] = True  # whether a sum of compact vectors stands for the sum of the tensors
    is_packed: ClassVar[bool] = False  # whether it is stored and sent in fewer bytes than floats take (:meth:`packed`)
    shape: tuple[int, ...]  # of the tensor; vectors here are flat
    size: int  # numbers that a client holds

    @property
    def bytes(self) -> int:
        """Bytes that a client stores."""
        return self.size * FLOAT_BYTES

    @abstractmethod
    def reduce(self, full: Tensor) -> Tensor:
        """Project the server's tensor to what a client holds."""

    @abstractmethod
    def recover(self, compact: Tensor) -> Tensor:
        """The full tensor that a client's compact vector stands for."""

    @abstractmethod
    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        """Chosen rows of the tensor, [*ids.shape, row length]; gradients flow back to ``compact``."""

    def whole(self, compact: Tensor) -> Tensor:
        """All of the tensor, flat; gradients flow back to ``compact``."""
        return self.recover(compact)

    def packed(self, compact: Tensor) -> Tensor:
        """A compact vector as it is stored, in :attr:`bytes`."""
        return compact

    def unpacked(self, content: Tensor) -> Tensor:
        """The compact vector of a stored one."""
        return content

    def additive_form(self, compact: Tensor, weight: float) -> Tensor:
        """The form of a client's compact vector, times its weight, that adds up: itself, or recovered if not linear."""
        if self.linear:
            return compact
        return self.recover(compact / weight) * weight if weight else self.recover(compact)

    @classmethod
    def reduce_each(cls, full: Tensor, projections: Sequence[Any]) -> list[Tensor]:
        """Reduce a tensor for several sizes, in one pass over it where possible."""
        return [projection.reduce(full) for projection in projections]

    @classmethod
    @abstractmethod
    def mean(cls, full: Tensor, parts: Sequence["SizeSum"], *, changes: bool) -> Tensor:
        """The weighted mean of updates of all sizes; what no client holds is 0 if ``changes``, else as it was."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Plain values that define it beside kind and shape."""

    @classmethod
    @abstractmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        """Make the projection that plain values define; raise an error for values that define none."""


def register_projection(kind: Kind) -> Kind:
    """Register a projection, so that files and messages can name it; a decorator."""
    KINDS[kind.kind] = kind
    return kind


@dataclass(frozen=True)
class SizeSum:
    """The weighted sum of one tensor's updates from clients of one size (:meth:`Projection.additive_form`)."""

    projection: Any
    total: Tensor
    weight: float


class Coordinatewise(Projection):
    """A projection in which every number of the tensor is one of the compact vector, its negative, or 0."""

    @abstractmethod
    def places(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Slot (int64) and sign (int8) of coordinates of the tensor; the sign is 0 where none is held."""

    def row_slots(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.places(row_coordinates(rows, self.shape[-1]))

    @abstractmethod
    def counts(self, slots: Tensor) -> Tensor:
        """Number of coordinates in each of some slots."""


@dataclass(frozen=True)
class Assignment:
    """What clients of one capacity hold; ``projections`` are None for clients that the method leaves out."""

    projections: dict[str, Projection] | None

    def size(self) -> int:
        """Number of numbers that a client holds."""
        return sum(projection.size for projection in (self.projections or {}).values())

    def bytes(self) -> int:
        """Bytes that a client holds."""
        return sum(projection.bytes for projection in (self.projections or {}).values())


@register_projection
@dataclass(frozen=True)
class Hashed(Coordinatewise):
    """A FAIR subspace as a projection, or the full space."""

    kind: ClassVar[str] = "hashed"
    shape: tuple[int, ...]
    subspace: Subspace

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.subspace.size

    def reduce(self, full: Tensor) -> Tensor:
        return self.subspace.reduce(full)

    def recover(self, compact: Tensor) -> Tensor:
        return self.subspace.recover(compact)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        row_size = self.shape[-1]
        slots, signs = ops.slots_and_signs(self.subspace.layout, row_coordinates(ids.reshape(-1), row_size))
        return (compact[slots] * signs).view(*ids.shape, row_size)

    def whole(self, compact: Tensor) -> Tensor:
        if self.subspace.is_full:
            return compact
        slots, signs = self.subspace.slots(0, self.subspace.full_size, compact.device)
        return compact[slots] * signs

    def places(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        if self.subspace.is_full:
            return coordinates, torch.ones_like(coordinates, dtype=torch.int8)
        return ops.slots_and_signs(self.subspace.layout, coordinates)

    def counts(self, slots: Tensor) -> Tensor:
        return torch.ones_like(slots) if self.subspace.is_full else self.subspace.counts()[slots]

    @classmethod
    def reduce_each(cls, full: Tensor, projections: Sequence[Any]) -> list[Tensor]:
        """Reduce for a nested chain in one pass; the full space is the tensor itself, not a copy."""
        found = reduce_all(full, [held.subspace for held in projections if not held.subspace.is_full], trusted=True)
        return [found.get(held.subspace, full) for held in projections]

    @classmethod
    def mean(cls, full: Tensor, parts: Sequence[SizeSum], *, changes: bool) -> Tensor:
        """Unfold sums size by size and recover once; sums of independent hashes are recovered one by one."""
        first, *others = found = sums_of(parts)
        if not others:
            return first.recover()
        weight = sum(sums.weight for sums in found)
        return torch.stack([sums.recover().mul_(sums.weight / weight) for sums in found]).sum(0)

    def description(self) -> dict[str, Any]:
        return self.subspace.description()

    @classmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        subspace = Subspace(**facts)
        if subspace.full_size != prod(shape):
            raise ValueError(f"a subspace of {subspace.full_size} numbers for a tensor of shape {shape}")
        return cls(shape, subspace)


class ZeroFilled(Projection):
    """Base of projections that keep some numbers of a tensor and set the others to zero."""

    @classmethod
    def mean(cls, full: Tensor, parts: Sequence[SizeSum], *, changes: bool) -> Tensor:
        """Average each number over the clients that hold it; one that no client holds stays as it is."""
        sums, weights = torch.zeros_like(full), torch.zeros_like(full)
        for part in parts:
            sums += part.projection.recover(part.total)
            weights += part.projection.recover(torch.full_like(part.total, part.weight))
        otherwise = torch.zeros_like(full) if changes else full
        return torch.where(weights > 0, sums / weights.clamp(min=1e-30), otherwise)


@register_projection
@dataclass(frozen=True)
class LeadingBlock(ZeroFilled):
    """The leading part of a tensor along each of its sides."""

    kind: ClassVar[str] = "leading block"
    shape: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def size(self) -> int:  # type: ignore[override]
        return prod(self.kept)

    def _leading_part(self, full: Tensor) -> Tensor:
        return full.view(self.shape)[tuple(slice(side) for side in self.kept)]

    def reduce(self, full: Tensor) -> Tensor:
        return self._leading_part(full).reshape(-1)

    def recover(self, compact: Tensor) -> Tensor:
        missing = [whole - kept for whole, kept in zip(self.shape, self.kept, strict=True)]
        sides = [side for extra in reversed(missing) for side in (0, extra)]
        return torch.nn.functional.pad(compact.view(self.kept), sides).view(-1)

    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        return self.recover(compact).view(self.shape[0], -1)[ids]

    def description(self) -> dict[str, Any]:
        return {"kept": list(self.kept)}

    @classmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        kept = tuple(int(side) for side in facts["kept"])
        if len(kept) != len(shape) or not all(1 <= side <= of for side, of in zip(kept, shape, strict=True)):
            raise ValueError(f"a block {kept} of a tensor of shape {shape}")
        return cls(shape, kept)


def sums_of(parts: Sequence[SizeSum]) -> list[Sums]:
    """Add up updates by hash; the full space joins the hash of the others, if there is a single one."""
    layouts = [None if part.projection.subspace.is_full else part.projection.subspace.layout for part in parts]
    hashes = [None if layout is None else (layout.key, layout.chunk, layout.signed) for layout in layouts]
    several = len(set(hashes) - {None}) > 1
    found: dict[tuple[int, int, bool] | None, Sums] = {}
    for part, key in zip(parts, hashes, strict=True):
        sums = found.setdefault(key if several else None, Sums())
        sums.add_sum(part.projection.subspace, part.total, part.weight)
    return list(found.values())


def whole(shape: tuple[int, ...], kind: type[Hashed] = Hashed) -> Hashed:
    """The projection of a tensor that is held whole."""
    size = prod(shape)
    return kind(shape, Subspace(size, size))


def describe_projection(held: Projection) -> dict[str, Any]:
    """Describe a projection by plain values."""
    return {"kind": held.kind, "shape": list(held.shape), **held.description()}


def make_projection(facts: Any) -> Projection:
    """Make the projection of a description; ValueError, KeyError or TypeError, before any allocation, if invalid."""
    if not isinstance(facts, dict) or facts.get("kind") not in KINDS:
        raise ValueError("a projection of no known kind")
    shape = facts.get("shape")
    if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise ValueError("a projection without a shape")
    total = 1
    for side in shape:
        if type(side) is not int or not 0 < side <= MAX_TENSOR_SIZE:
            raise ValueError("a shape that is none")
        total *= side
        if total > MAX_TENSOR_SIZE:
            raise ValueError("a shape beyond reason")
    others = {key: value for key, value in facts.items() if key not in ("kind", "shape")}
    _require_plain(others)
    return KINDS[facts["kind"]].from_description(tuple(shape), others)


def _require_plain(value: Any, depth: int = 0) -> None:
    """Refuse anything but small plain values."""
    if depth > 3:
        raise ValueError("facts too deep")
    if isinstance(value, dict | list):
        if len(value) > 4_096:
            raise ValueError("facts too long")
        for one in value.values() if isinstance(value, dict) else value:
            _require_plain(one, depth + 1)
    elif isinstance(value, str):
        if len(value) > 256:
            raise ValueError("a text too long")
    elif type(value) not in (int, bool, float, type(None)):
        raise TypeError("no plain value")
