"""CoLR: updates of the item table have low rank.

(Nguyen et al., *Towards Efficient Communication and Secure Federated Recommendation System via Low-rank Training*, WWW
2024.) The change of the table is A·B. All devices of a round share B, drawn from the run's seed and the round; they
train and send A, with r numbers per item instead of d.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from experiments.baselines.pointwise import ITEM, Local, Pointwise, Samples
from fairfold.federation.plan import Plan
from fairfold.federation.plugins import register_algorithm
from fairfold.federation.randomness import Purpose, generator
from fairfold.federation.updates import Aggregate, ClientTask, State, Update
from fairfold.subspace.projection import Projection, whole
from fairfold.typing import FLOAT_BYTES


@register_algorithm
class CoLR(Pointwise):
    """FedMF whose changes have rank r.

    Attributes:
        kind: Its name in settings.
        rank: r.
    """

    kind: Literal["colr"] = "colr"
    rank: int = Field(8, ge=1)

    def basis(self, plan: Plan, round_number: int) -> Tensor:
        """B of a round, [r, factors], with orthonormal rows."""
        factors = plan.architecture.tables[ITEM][1]
        source = generator(plan.settings, Purpose.SHARED, round_number)
        drawn = torch.randn(factors, min(self.rank, factors), generator=source)
        orthonormal: Tensor = torch.linalg.qr(drawn)[0]
        return orthonormal.T.contiguous()

    def tasks(self, plan: Plan, state: State, sizes: "list[int]") -> list[ClientTask]:  # type: ignore[override]
        """The model with B."""
        basis = self.basis(plan, state.round_number)
        return [
            replace(task, vectors=task.vectors | {"basis": basis.view(-1)})
            for task in super().tasks(plan, state, sizes)
        ]

    def update_shapes(self, plan: Plan, task: ClientTask) -> dict[str, int]:
        """Shape of A."""
        items, factors = plan.architecture.tables[ITEM]
        return {ITEM: items * min(self.rank, factors)}

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        """The table down, A up."""
        items, factors = plan.architecture.tables[ITEM]
        down, _ = super().traffic(plan, size, round_number)
        return down, items * min(self.rank, factors) * FLOAT_BYTES

    def make_update(self, plan: Plan, task: ClientTask, local: Local) -> Update:
        """The sum of A: coordinates of the changes along the rows of B."""
        basis = task.vectors["basis"].view(-1, local.items.shape[1])
        return Update({ITEM: (local.change.sum(0).cpu() @ basis.T).reshape(-1)}, float(len(local.change)))

    def init_local(self, plan: Plan, task: ClientTask, clients: object, client_ids: object) -> Local:
        """Restrict the changes to the span of B."""
        local = super().init_local(plan, task, clients, client_ids)  # type: ignore[arg-type]
        basis = task.vectors["basis"].view(-1, local.items.shape[1])
        return replace(local, held=(basis.T @ basis).to(local.items.device))

    def move_items(self, local: Local, samples: Samples, slope: Tensor) -> None:
        """A step of A moves the table along B."""
        along, local.held = local.held, local.held.new_ones(())
        super().move_items(local, samples, slope @ along)
        local.held = along

    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        """The server steps along the mean of A·B."""
        wider = Aggregate()
        for task, update in aggregate.parts():
            basis = self.basis(plan, task.round_number)
            table = (update.sums[ITEM].view(-1, len(basis)) @ basis).reshape(-1)
            held: dict[str, Projection] = {ITEM: whole(plan.architecture.tables[ITEM])}
            wider.add(replace(task, projections=held), Update({ITEM: table}, update.weight))
        return super().server_update(plan, state, wider)
