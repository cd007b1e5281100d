"""FedRolex as a plug-in: small devices hold a window of columns that rolls on by one every round.

HeteroFL's small devices always hold the leading columns, so the others are trained by large devices alone. Here every
column has its turn. (Alam et al., *FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction*.)

    import examples.plugins.fedrolex
    simulate(Settings(model="neumf", subspace={"method": "fedrolex"}, algorithm={"kind": "gradient", ...}))
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from fairfold.methods import HeteroFL, Tensors
from fairfold.projections import Assignment, KeptColumns
from fairfold.protocol.plugins import register_method
from fairfold.subspace import Capacity
from fairfold.values import Shapes


def window(shape: tuple[int, ...], kept: int, start: int) -> KeptColumns:
    """``kept`` columns from one on, around the end."""
    stop = start + kept
    runs = [(start, stop)] if stop <= shape[1] else [(0, stop - shape[1]), (start, shape[1])]
    return KeptColumns(shape, tuple(runs))


@register_method
class FedRolex(HeteroFL):
    """The columns of a table that fit, others every round."""

    moves: ClassVar[bool] = True
    method: Literal["fedrolex"] = "fedrolex"  # type: ignore[assignment]

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        """As many columns as HeteroFL gives, from the round's on."""
        leading = super().divide(tensors, compressed, capacities, seed, round_number)
        if tensors.network:
            return leading  # the units of layers would have to roll with those that read them
        found = []
        for held in leading:
            columns = {}
            for name, one in (held.projections or {}).items():
                assert isinstance(one, KeptColumns)
                columns[name] = window(one.shape, one.kept, round_number % one.shape[1])
            found.append(Assignment(dict(columns)))
        return found
