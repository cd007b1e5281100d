"""The base class of methods, which turn capacities into what clients hold; its fields are keys of ``[subspace]``."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from torch import Tensor

from fairfold.config.tables import FrozenSettings
from fairfold.errors import InvalidCapacity
from fairfold.subspace import Capacity
from fairfold.subspace.projection import Assignment, Projection, whole
from fairfold.typing import FLOAT_BYTES, Shapes


@dataclass(frozen=True)
class Tensors:
    """The tensors of a model, as a method divides them among clients."""

    tables: Shapes  # tables with a row per item
    others: Shapes  # all other tensors of the server
    uncompressed_tables: Shapes = field(default_factory=dict)  # held whole by all, within their bytes: item biases
    readers: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # layers that read a table from a column on
    network: bool = False  # whether the model is a network of layers, without tables
    whole_rows: bool = False  # whether rows are never cut; a capacity below one row is refused

    @property
    def shapes(self) -> Shapes:
        """Name and shape of all tensors of the server."""
        return self.tables | self.others | self.uncompressed_tables


class Method(FrozenSettings):
    """Turns capacities into what clients hold."""

    method: str
    per_client: ClassVar[bool] = False  #: whether every client has a hash of its own
    additive: ClassVar[bool] = (
        True  #: whether updates of a size can be summed as sent: not with own hashes, nor factors
    )
    changes_per_round: ClassVar[bool] = False  #: whether what clients hold depends on the round number
    min_compressed: ClassVar[int] = 64  #: tensors of networks with fewer numbers are held whole

    @property
    def rehashes(self) -> bool:
        """Whether there is a new hash every round."""
        return False

    @property
    def min_support(self) -> int:
        """Users that an item needs to own slots; 0 for no limit."""
        return 0

    @property
    def counts_items(self) -> bool:
        """Whether clients count the users of each item first, since the catalogue's order has no meaning."""
        return False

    @property
    def needs_counts(self) -> bool:
        """Whether it depends on the number of users of each item."""
        return self.counts_items

    def compressed(self, tensors: Tensors) -> Shapes:
        """The tensors that clients hold compressed: item tables; of networks all but small tensors."""
        if not tensors.network:
            return tensors.tables
        return {name: shape for name, shape in tensors.shapes.items() if prod(shape) >= self.min_compressed}

    @abstractmethod
    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        """What clients of each capacity hold of the compressed tensors, in a round."""

    def others(self, tensors: Tensors, held: Assignment) -> dict[str, Projection]:
        """What clients hold of the tensors that are not compressed: all of them."""
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
        """What clients of each capacity hold of every tensor; ``counts`` are users by item, where needed."""
        remaining = [self.remaining_capacity(tensors, capacity, capacities, counts) for capacity in capacities]
        return self.within(tensors, remaining, seed, round_number)

    def within(
        self, tensors: Tensors, remaining: Sequence[Capacity], seed: int, round_number: int = 0
    ) -> list[Assignment]:
        """What clients hold within capacities for the compressed tensors (:meth:`remaining_capacity`)."""
        return [
            held if held.projections is None else Assignment(held.projections | self.others(tensors, held))
            for held in self.divide(tensors, self.compressed(tensors), remaining, seed, round_number)
        ]

    def remaining_capacity(
        self, tensors: Tensors, capacity: Capacity, capacities: Sequence[Capacity], counts: Tensor | None
    ) -> Capacity:
        """What a capacity leaves to the compressed tensors: a budget in bytes also covers item biases."""
        return capacity.minus(FLOAT_BYTES * sum(prod(shape) for shape in tensors.uncompressed_tables.values()))

    def fits(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> bool:
        """Whether a client can hold this: a budget counts all bytes, a share those of compressed tensors."""
        if capacity.budget is not None:
            return sum(held.size for held in projections.values()) * FLOAT_BYTES <= capacity.budget
        assert capacity.share is not None
        compressed = self.compressed(tensors)
        return sum(projections[name].size for name in compressed) <= capacity.share * self.reference(compressed)

    def used_share(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> float:
        """Share of what a capacity allows that is held."""
        compressed = self.compressed(tensors)
        allowed = min(capacity.limit(self.reference(compressed)), sum(prod(shape) for shape in compressed.values()))
        return sum(projections[name].size for name in compressed) / max(allowed, 1)

    def reference(self, compressed: Shapes) -> int:
        """Numbers of which a capacity is a share."""
        return sum(prod(shape) for shape in compressed.values())

    def assignment_for(
        self, tensors: Tensors, capacity: Capacity, known: list[Assignment], seed: int
    ) -> tuple[Assignment, bool]:
        """What a client of another capacity holds, and whether it could train along with the known sizes."""
        (alone,) = self.within(tensors, [capacity], seed)
        return alone, True


def unsupported_capacity(method: str, capacity: Capacity, reason: str, smallest: int | None = None) -> InvalidCapacity:
    """The error for a capacity that a method cannot serve; ``smallest``x is the last that it can, where known."""
    needed = f"a capacity it can serve (N/A: {reason})"
    sizes = ["1x", *(f"{size}x" for size in (4, 2) if smallest is not None and size <= smallest)][:2]
    asked = f"--capacities {'-'.join(sizes)} (federate: --nodes {','.join(sizes)})"
    remedy = "Use method='fair'." if smallest is None else f"Use {asked}, or --method fair."
    return InvalidCapacity(f"method={method!r} at {capacity}", needed, remedy)
