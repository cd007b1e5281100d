"""FedRolex as a plug-in: small clients hold a window of columns that rolls on by one every round.

HeteroFL's small clients always hold the leading columns, so the others are trained by large clients alone. Here every
column has its turn. (Alam et al., *FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction*.)

    import examples.plugins.fedrolex
    simulate(Settings(model="neumf", subspace={"method": "fedrolex"}, algorithm={"kind": "gradient", ...}))
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from fairfold.federation.plugins import register_method
from fairfold.methods import HeteroFL, Tensors
from fairfold.subspace import Capacity
from fairfold.subspace.blocks import KeptColumns
from fairfold.subspace.projection import Assignment
from fairfold.typing import Shapes


def window(shape: tuple[int, ...], kept: int, start: int) -> KeptColumns:
    """``kept`` columns from one on, around the end."""
    stop = start + kept
    runs = [(start, stop)] if stop <= shape[1] else [(0, stop - shape[1]), (start, shape[1])]
    return KeptColumns(shape, tuple(runs))


@register_method
class FedRolex(HeteroFL):
    """The columns of a table that fit, others every round."""

    changes_per_round: ClassVar[bool] = True
    method: Literal["fedrolex"] = "fedrolex"  # type: ignore[assignment]

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        """As many columns as HeteroFL gives, from the round's on."""
        leading = super().divide(tensors, compressed, capacities, seed, round_number)
        if tensors.network:
            return leading  # the units of layers would have to roll with those that read them
        return [
            Assignment({name: window(one.shape, one.kept, round_number % one.shape[1]) for name, one in held.items()})  # type: ignore[attr-defined]
            for held in (assignment.projections or {} for assignment in leading)
        ]
