"""FedAvg and FULL-TRN: devices hold the full model, or take no part."""

from collections.abc import Sequence
from math import prod
from typing import Literal

from fairfold.methods.base import Method, Tensors, cannot
from fairfold.methods.fair import Fair
from fairfold.projections import Assignment, whole
from fairfold.subspace import Capacity
from fairfold.values import Shapes


class FedAvg(Method):
    """FedAvg: everybody holds the full model, whatever it costs."""

    method: Literal["fedavg"] = "fedavg"

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        return [Assignment({name: whole(shape) for name, shape in compressed.items()})] * len(capacities)

    def at(self, tensors: Tensors, capacity: Capacity, known: list[Assignment], seed: int) -> tuple[Assignment, bool]:
        """The full model, or for a device that cannot hold it a subspace of it."""
        folded = Fair(compress="all", mapping="chunk") if tensors.network else Fair()
        if tensors.whole_rows:
            folded = Fair(chunk=next(iter(tensors.tables.values()))[1], sign=False)
        return folded.at(tensors, capacity, known, seed)


class FullTrn(FedAvg):
    """FULL-TRN, *data loss*: only devices that can hold the full model take part."""

    method: Literal["full_trn"] = "full_trn"  # type: ignore[assignment]

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        full_size = sum(prod(shape) for shape in compressed.values())
        kept = [capacity.limit(full_size) >= full_size for capacity in capacities]
        if not any(kept):
            raise cannot("full_trn", capacities[0], "no device can hold the full model")
        everybody = super().divide(tensors, compressed, capacities, seed, round_number)
        return [held if keep else Assignment(None) for held, keep in zip(everybody, kept, strict=True)]
