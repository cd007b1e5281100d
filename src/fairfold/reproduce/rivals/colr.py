"""CoLR: what a device sends of its item table has low rank.

(Nguyen et al., *Towards Efficient Communication and Secure Federated Recommendation System via Low-rank Training*, WWW
2024.) The change of the table is A·B. All devices of a round share B, drawn from the run's seed and the round; they
train and send A, with r numbers per item instead of d.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.projections import Projection, whole
from fairfold.protocol.plan import Plan
from fairfold.protocol.plugins import register_algorithm
from fairfold.protocol.sampling import Purpose, generator
from fairfold.protocol.words import Answer, Sent, State, Totals
from fairfold.reproduce.rivals.pointwise import ITEM, Local, Pointwise, Samples
from fairfold.values import BYTES


@register_algorithm
class CoLR(Pointwise):
    """FedMF whose changes have rank r.

    Attributes:
        kind: Its name.
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

    def send(self, plan: Plan, state: State, sizes: "list[int]") -> list[Sent]:  # type: ignore[override]
        """B goes with the model."""
        basis = self.basis(plan, state.round_number)
        return [
            replace(sent, vectors=sent.vectors | {"basis": basis.view(-1)}) for sent in super().send(plan, state, sizes)
        ]

    def answer_shapes(self, plan: Plan, sent: Sent) -> dict[str, int]:
        """A."""
        items, factors = plan.architecture.tables[ITEM]
        return {ITEM: items * min(self.rank, factors)}

    def change(self, sent: Sent, name: str, vector: Tensor, weight: float) -> Tensor:
        """The mean of A."""
        return vector / weight if weight else vector

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        """The table down, A up."""
        items, factors = plan.architecture.tables[ITEM]
        down, _ = super().traffic(plan, size, round_number)
        return down, items * min(self.rank, factors) * BYTES

    def said(self, plan: Plan, sent: Sent, local: Local) -> Answer:
        """The sum of A: what the changes, which are multiples of B's rows, have along these."""
        basis = sent.vectors["basis"].view(-1, local.items.shape[1])
        return Answer({ITEM: (local.change.sum(0).cpu() @ basis.T).reshape(-1)}, float(len(local.change)))

    def started(self, plan: Plan, sent: Sent, people: object, clients: object) -> Local:
        """What a device may move is what B spans."""
        local = super().started(plan, sent, people, clients)  # type: ignore[arg-type]
        basis = sent.vectors["basis"].view(-1, local.items.shape[1])
        return replace(local, held=(basis.T @ basis).to(local.items.device))

    def move_items(self, local: Local, samples: Samples, slope: Tensor) -> None:
        """A step of A moves the table along B."""
        along, local.held = local.held, local.held.new_ones(())
        super().move_items(local, samples, slope @ along)
        local.held = along

    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """The server steps along the mean of A·B."""
        wider = Totals()
        for sent, answer in totals.parts():
            basis = self.basis(plan, sent.round_number)
            table = (answer.sums[ITEM].view(-1, len(basis)) @ basis).reshape(-1)
            held: dict[str, Projection] = {ITEM: whole(plan.architecture.tables[ITEM])}
            wider.add(replace(sent, projections=held), Answer({ITEM: table}, answer.weight))
        return super().apply(plan, state, wider)
