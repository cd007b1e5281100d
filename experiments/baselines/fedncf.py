"""FedNCF: matrix factorisation and a perceptron side by side (NeuMF); its layers are averaged beside the item table.

(Perifanis and Efraimidis, *Federated Neural Collaborative Filtering*, 2022.) Item vectors and layers are averaged
apart there, since a device's update is about few items and about all layers. Here both go by a server step, and that of
layers is smaller by a factor.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from experiments.baselines.pointwise import USER, Pointwise
from fairfold.federation.plan import Plan
from fairfold.federation.plugins import register_algorithm
from fairfold.federation.updates import Aggregate, State
from fairfold.typing import Shapes, Weights


@register_algorithm
class FedNCF(Pointwise):
    """One half of a vector is multiplied, the other goes through two hidden layers; both are added up.

    Attributes:
        kind: Its name in settings.
        layers: What the server's step of layers is beside that of the item table.
    """

    kind: Literal["fedncf"] = "fedncf"
    layers: float = Field(0.1, gt=0, le=1)

    def layers_of(self, factors: int) -> Shapes:
        """Of the perceptron the last column of each is its bias; of the product what is added to weights of one."""
        half = max(1, factors // 2)
        perceptron: Shapes = {"first": (factors, 2 * half + 1), "second": (half, factors + 1), "third": (1, half + 1)}
        return perceptron | {"product": (1, factors - half)}

    def logits(self, rows: Tensor, user_vectors: Weights, dense: Weights) -> Tensor:
        multiplied = dense["product"].shape[-1]
        user = user_vectors[USER][:, None, :]
        product = (rows[..., :multiplied] * user[..., :multiplied] * (1 + dense["product"])).sum(-1)
        at = torch.cat([user[..., multiplied:].expand(*rows.shape[:2], -1), rows[..., multiplied:]], dim=-1)
        for name in ("first", "second", "third"):
            weights = dense[name].expand(len(rows), *dense[name].shape[1:])
            at = torch.baddbmm(weights[:, None, :, -1], at, weights[:, :, :-1].transpose(1, 2))
            at = at if name == "third" else at.relu()
        return product + at.squeeze(-1)

    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        """Layers go a part of the way."""
        before = {name: state.full[name].clone() for name in plan.architecture.dense}  # some steps are taken in place
        after = super().server_update(plan, state, aggregate)
        moved = {name: torch.lerp(old, after.full[name], self.layers) for name, old in before.items()}
        return replace(after, full=after.full | moved)
