"""FedHM: the best factors of low rank that fit."""

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal

from fairfold.errors import InvalidCapacity
from fairfold.methods.base import Method, Tensors, cannot
from fairfold.methods.networks import low_rank_network
from fairfold.projections import Assignment, LowRank, Projection, WholeTable, whole
from fairfold.subspace import Capacity
from fairfold.values import Shapes


class FedHM(Method):
    """FedHM: a table of N × d costs r·(N + d) at rank r.

    A device that cannot hold N + d numbers cannot be served: compression stays below d. A device that can hold the
    table holds the table. Networks: see :func:`low_rank_network`.

    Attributes:
        method: Its name.
        rank_rule: The rank at a capacity: ``"budget"``, the largest whose two factors fit, or ``"share"``, that share
            of the columns, which goes over the budget by the small factor, r·d numbers, in favour of the method.
    """

    smallest: ClassVar[int] = 0
    sums: ClassVar[bool] = False

    method: Literal["fedhm"] = "fedhm"
    rank_rule: Literal["budget", "share"] = "budget"

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        free = self.rank_rule == "share"
        if tensors.network:
            return [low_rank_network(compressed, capacity, free_ends=free) for capacity in capacities]
        return [Assignment(self._tables(compressed, capacity, free)) for capacity in capacities]

    def _tables(self, compressed: Shapes, capacity: Capacity, free: bool) -> dict[str, Projection]:
        found: dict[str, Projection] = {}
        for name, shape in compressed.items():
            if len(shape) != 2:
                raise InvalidCapacity(f"method='fedhm' on {name} of shape {shape}", "tables", "Use method='fair'.")
            limit = capacity.limit(prod(shape))
            if limit >= prod(shape):
                found[name] = whole(shape, WholeTable)
                continue
            held = LowRank.within(shape, limit + (limit // shape[0] * shape[1] if free else 0))
            if held is None:
                needed = f"{name} ({shape[0]} × {shape[1]}) needs at least {sum(shape)} numbers, it can hold {limit}"
                raise cannot("fedhm", capacity, needed)
            found[name] = held
        return found
