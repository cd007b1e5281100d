"""A FAIR subspace as a projection, the full space (FedAvg) among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.kernels import ops
from fairfold.kernels.reference import row_coordinates
from fairfold.projections.base import Coordinatewise, Part
from fairfold.subspace import Subspace, Sums, reduce_all


@dataclass(frozen=True)
class Hashed(Coordinatewise):
    """A FAIR subspace, the full space among them."""

    kind: ClassVar[str] = "hashed"
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
        return torch.ones_like(slots) if self.subspace.is_full else self.subspace.counts()[slots]

    @classmethod
    def reduce_each(cls, full: Tensor, projections: Sequence[Any]) -> list[Tensor]:
        """A nested chain of subspaces takes one pass. The full space is sent as it is: what is sent is only read."""
        found = reduce_all(full, [held.subspace for held in projections if not held.subspace.is_full], trusted=True)
        return [found.get(held.subspace, full) for held in projections]

    @classmethod
    def mean(cls, full: Tensor, parts: Sequence[Part], *, changes: bool) -> Tensor:
        """Sums unfolded size by size and recovered once; an independent hash is recovered alone."""
        first, *others = found = sums_of(parts)
        if not others:
            return first.recover()
        weight = sum(sums.weight for sums in found)
        return torch.stack([sums.recover().mul_(sums.weight / weight) for sums in found]).sum(0)

    def facts(self) -> dict[str, Any]:
        """The subspace."""
        space = self.subspace
        facts = {"full_size": space.full_size, "size": space.size, "seed": space.seed, "mapping": space.mapping}
        return facts | {"chunk": space.chunk, "head": 0 if space.is_full else space.head, "sign": space.sign}

    @classmethod
    def of_facts(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        subspace = Subspace(**facts)
        if subspace.full_size != prod(shape):
            raise ValueError(f"a subspace of {subspace.full_size} numbers for a tensor of shape {shape}")
        return cls(shape, subspace)


def sums_of(parts: Sequence[Part]) -> list[Sums]:
    """What devices sent, added up by hash. The full space belongs to every hash: with a single one it is summed up."""
    layouts = [None if part.projection.subspace.is_full else part.projection.subspace.layout for part in parts]
    hashes = [None if layout is None else (layout.key, layout.chunk, layout.signed) for layout in layouts]
    several = len(set(hashes) - {None}) > 1
    found: dict[tuple[int, int, bool] | None, Sums] = {}
    for part, key in zip(parts, hashes, strict=True):
        sums = found.setdefault(key if several else None, Sums())
        sums.add_sum(part.projection.subspace, part.total, part.weight)
    return list(found.values())


def whole(shape: tuple[int, ...], kind: type[Hashed] = Hashed) -> Hashed:
    """A tensor held as it is."""
    size = prod(shape)
    return kind(shape, Subspace(size, size))
