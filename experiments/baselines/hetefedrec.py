"""HeteFedRec: devices of several sizes hold leading columns of one table.

(Yuan et al., *HeteFedRec: Federated Recommender Systems with Model Heterogeneity*, ICDE 2024.) Use it with
``subspace.method = "heterofl"``.

Three parts beside padding the smaller tables with zeros: a device trains, with its own width, every smaller one (dual
tasks); a penalty on correlated columns keeps leading ones from doing all the work; and the server draws the likeness of
some items under each width to the mean over all widths (distillation).
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from experiments.baselines.pointwise import ITEM, USER, Local, Pointwise, Samples, mean_loss
from fairfold.federation.plan import Plan
from fairfold.federation.plugins import register_algorithm
from fairfold.federation.randomness import Purpose, generator
from fairfold.federation.updates import Aggregate, State
from fairfold.subspace.blocks import KeptColumns
from fairfold.typing import Weights

ALIKE = 256
"""Items whose likeness the server compares."""


@register_algorithm
class HeteFedRec(Pointwise):
    """FedMF at several widths at once.

    Attributes:
        kind: Its name in settings.
        decorrelate: What correlated columns count.
        distil: Step size of the server's distillation; 0 leaves it out.
    """

    kind: Literal["hetefedrec"] = "hetefedrec"
    decorrelate: float = Field(0.01, ge=0)
    distil: float = Field(0.01, ge=0)

    def widths(self, plan: Plan) -> list[int]:
        """Of all sizes, ascending."""
        held = [one.projections[ITEM] for one in plan.assignments(0) if one.projections is not None]
        return sorted({one.kept if isinstance(one, KeptColumns) else one.shape[1] for one in held})

    def init_local(self, plan: Plan, task: Any, clients: Any, client_ids: Any) -> Local:
        """The widths go with what a device received, for its losses."""
        local = super().init_local(plan, task, clients, client_ids)
        mine = int(local.held.sum())
        local.received["widths"] = torch.tensor([width for width in self.widths(plan) if width <= mine])
        return local

    def loss(self, local: Local, samples: Samples, rows: Tensor, user_vectors: Weights, dense: Weights) -> Tensor:
        """The loss under every width up to its own, and that of correlated columns."""
        products = rows * user_vectors[USER][:, None, :]
        total = rows.new_zeros(len(rows))
        for width in local.received["widths"].tolist():
            total = total + mean_loss(products[..., :width].sum(-1), samples)
        held = local.held.nonzero().flatten()
        many = samples.there.sum(1)[:, None, None]
        there = rows[..., held] * samples.there[..., None]
        centred = (there - there.sum(1, keepdim=True) / many) * samples.there[..., None]
        scaled = functional.normalize(centred, dim=1, eps=1e-6)
        alike = scaled.transpose(1, 2) @ scaled - torch.eye(len(held), device=rows.device)
        return total + self.decorrelate * alike.square().mean(dim=(1, 2))

    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        """After the mean, draw the likeness of items under every width to that of all."""
        after, widths = super().server_update(plan, state, aggregate), self.widths(plan)
        if not self.distil or len(widths) == 1:
            return after
        items = plan.architecture.tables[ITEM][0]
        some = torch.randperm(items, generator=generator(plan.settings, Purpose.SHARED, state.round_number))[:ALIKE]
        with torch.enable_grad():
            table = after.full[ITEM].view(items, -1)[some].detach().requires_grad_()
            likeness = [_likeness(table[:, :width]) for width in widths]
            mean = torch.stack(likeness).mean(0).detach()
            (slope,) = torch.autograd.grad(torch.stack([(one - mean).square().mean() for one in likeness]).sum(), table)
        full = after.full[ITEM].clone()
        full.view(items, -1)[some] -= self.distil * len(some) * slope
        return replace(after, full=after.full | {ITEM: full})


def _likeness(rows: Tensor) -> Tensor:
    unit = functional.normalize(rows, dim=1, eps=1e-6)
    return unit @ unit.T
