"""A method: how capacities become what devices hold. Its fields are the keys of ``[subspace]``."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from torch import Tensor

from fairfold.errors import InvalidCapacity
from fairfold.projections import Assignment, Projection, whole
from fairfold.settings.base import Frozen
from fairfold.subspace import Capacity
from fairfold.values import BYTES, Shapes


@dataclass(frozen=True)
class Shape:
    """How bytes are divided.

    Attributes:
        columns: Of the rows that are held.
        share: Of the bytes that neighbours leave, what rows take; the rest is for pairs.
        near: Neighbours of every item.
    """

    columns: int
    share: float = 1.0
    near: int = 0


@dataclass(frozen=True)
class Tensors:
    """What a method has to divide among devices: the tensors of a model, and what is known of them.

    Attributes:
        tables: With a row per item.
        others: All else that the server holds.
        beside: Tables that no device holds compressed, and whose bytes a budget has to cover: items' biases.
        reads: Tensors whose columns, from a first one on, read the columns of a table.
        network: Whether the model is one of layers without tables.
        whole_rows: Whether rows are never to be cut: a device that cannot hold one is refused.
        catalogue: Items that capacities are measured by, where tables have rows for the leading ones alone; else 0.
        users: How many there are, as far as is known.
        settled: The shape that devices of some bytes were found to be served best by.
        whole: Rows there would be if all that could have one had; 0 where they do.
    """

    tables: Shapes
    others: Shapes
    beside: Shapes = field(default_factory=dict)
    reads: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    network: bool = False
    whole_rows: bool = False
    catalogue: int = 0
    users: int = 1
    settled: Mapping[int, Shape] = field(default_factory=dict)
    whole: int = 0

    @property
    def shapes(self) -> Shapes:
        """Everything the server holds."""
        return self.tables | self.others | self.beside


class Method(Frozen):
    """How capacities become what devices hold.

    Attributes:
        method: Its name.
        per_client: Whether every client has a hash of its own.
        sums: Whether what devices of a size send adds up as it is: a hash per client does not, nor factors of products.
        moves: Whether what devices hold changes with the round, by its number.
        smallest: Tensors of networks with fewer numbers are held whole: compressing them saves nothing.
    """

    method: str
    per_client: ClassVar[bool] = False
    sums: ClassVar[bool] = True
    moves: ClassVar[bool] = False
    smallest: ClassVar[int] = 64

    @property
    def counted(self) -> bool:
        """Whether devices count how many users have each item, because the catalogue's order means nothing."""
        return False

    @property
    def asks_counts(self) -> bool:
        """Whether it has to know how many users have each item."""
        return self.counted

    def compressed(self, tensors: Tensors) -> Shapes:
        """Of which tensors devices hold less than all: item tables; of networks all but small tensors."""
        if not tensors.network:
            return tensors.tables
        return {name: shape for name, shape in tensors.shapes.items() if prod(shape) >= self.smallest}

    @abstractmethod
    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        """What the devices of each capacity hold of the compressed tensors, in a round."""

    def others(self, tensors: Tensors, held: Assignment) -> dict[str, Projection]:
        """What they hold of the rest: all of it."""
        compressed = self.compressed(tensors)
        return {name: whole(shape) for name, shape in tensors.shapes.items() if name not in compressed}

    def assign(
        self,
        tensors: Tensors,
        capacities: Sequence[Capacity],
        seed: int,
        counts: Tensor | None = None,
        round_number: int = 0,
    ) -> list[Assignment]:
        """What the devices of each capacity hold of every tensor; ``counts`` of users by item where asked for."""
        limited = [self.limited(tensors, capacity, capacities, counts) for capacity in capacities]
        return self.within(tensors, limited, seed, round_number)

    def within(
        self, tensors: Tensors, limited: Sequence[Capacity], seed: int, round_number: int = 0
    ) -> list[Assignment]:
        """The same within what capacities leave to the compressed tensors (:meth:`limited`)."""
        return [
            held if held.projections is None else Assignment(held.projections | self.others(tensors, held))
            for held in self.divide(tensors, self.compressed(tensors), limited, seed, round_number)
        ]

    def limited(
        self, tensors: Tensors, capacity: Capacity, capacities: Sequence[Capacity], counts: Tensor | None
    ) -> Capacity:
        """What a capacity leaves to the compressed tensors: a budget in bytes has to hold items' biases as well."""
        return capacity.beside(BYTES * sum(prod(shape) for shape in tensors.beside.values()))

    def fits(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> bool:
        """Whether a device can hold this: a budget counts every byte, a share is one of what is compressed."""
        if capacity.budget is not None:
            return sum(held.size for held in projections.values()) * BYTES <= capacity.budget
        assert capacity.share is not None
        compressed = self.compressed(tensors)
        return sum(projections[name].size for name in compressed) <= capacity.share * self.reference(compressed)

    def used(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> float:
        """Which part of what a capacity allows is held."""
        compressed = self.compressed(tensors)
        allowed = min(capacity.limit(self.reference(compressed)), sum(prod(shape) for shape in compressed.values()))
        return sum(projections[name].size for name in compressed) / max(allowed, 1)

    def reference(self, compressed: Shapes) -> int:
        """Numbers of which a capacity is a share."""
        return sum(prod(shape) for shape in compressed.values())

    def at(self, tensors: Tensors, capacity: Capacity, known: list[Assignment], seed: int) -> tuple[Assignment, bool]:
        """What a device that took no part holds within a limited capacity, and whether it could join those that did."""
        (alone,) = self.within(tensors, [capacity], seed)
        return alone, True


def cannot(method: str, capacity: Capacity, reason: str) -> InvalidCapacity:
    """The refusal of a capacity that a method cannot serve."""
    return InvalidCapacity(
        f"method={method!r} at {capacity}", f"a capacity it can serve (N/A: {reason})", "Use method='fair'."
    )
