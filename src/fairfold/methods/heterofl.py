"""HeteroFL: the leading columns that fit, or a narrower network."""

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal

from fairfold.methods.base import Method, Tensors, cannot
from fairfold.methods.networks import narrow_network
from fairfold.projections import Assignment, KeptColumns, Projection
from fairfold.subspace import Capacity
from fairfold.values import Shapes


class HeteroFL(Method):
    """HeteroFL: at least one column of every table, so compression is at most d. Or a narrower network.

    Of the next layer a device holds what reads the columns it has.
    """

    smallest: ClassVar[int] = 0

    method: Literal["heterofl"] = "heterofl"

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        if tensors.network:
            return [narrow_network(compressed, capacity) for capacity in capacities]
        return [
            Assignment({name: self.columns(name, shape, capacity) for name, shape in compressed.items()})
            for capacity in capacities
        ]

    def columns(self, name: str, shape: tuple[int, ...], capacity: Capacity) -> KeptColumns:
        """The columns of a table that a capacity allows."""
        limit = capacity.limit(prod(shape))
        held = KeptColumns.within(shape, limit)
        if held is None:
            needed = f"{name} ({shape[0]} × {shape[1]}) needs at least {shape[0]} numbers, it can hold {limit}"
            raise cannot(self.method, capacity, needed)
        return held

    def others(self, tensors: Tensors, held: Assignment) -> dict[str, Projection]:
        readers = {
            name: _readers(tensors.shapes[name], first, (held.projections or {})[table])
            for name, (table, first) in tensors.reads.items()
        }
        return super().others(tensors, held) | readers


def _readers(shape: tuple[int, ...], first: int, table: Projection) -> KeptColumns:
    """Of a layer, the columns that read what a device holds of a table, and those that read anything else."""
    assert isinstance(table, KeptColumns)
    runs = [(0, first), *((first + start, first + stop) for start, stop in table.runs)]
    runs = [(start, stop) for start, stop in [*runs, (first + table.shape[1], shape[1])] if start < stop]
    found: list[tuple[int, int]] = []
    for start, stop in runs:  # neighbours are one run
        joined = found.pop()[0] if found and found[-1][1] == start else start
        found.append((joined, stop))
    return KeptColumns(shape, tuple(found))
