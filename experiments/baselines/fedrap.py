"""FedRAP: an item table that all share plus one of each user's own, kept apart.

(Li et al., *Federated Recommendation with Additive Personalization*, ICLR 2024.) Beside the logistic loss the two
tables are pushed apart, and the shared one is drawn to zeros by its absolute values, both ever more as rounds go by.
The table of a user's own has as many numbers as the model: such a device holds it twice.
"""

from collections.abc import Sequence
from math import tanh
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from experiments.baselines.pointwise import ITEM, USER, Local, Pointwise, Samples, mean_loss
from fairfold.federation.clients import Clients
from fairfold.federation.plan import Plan
from fairfold.federation.plugins import register_algorithm
from fairfold.metrics.ranking import Scorer
from fairfold.typing import Weights

MINE = "items of the user"
GROWS = 10.0
"""Rounds over which the two terms come in."""


@register_algorithm
class FedRAP(Pointwise):
    """Score ⟨u, c + d⟩ with c shared and d of the user.

    Attributes:
        kind: Its name in settings.
        apart: What the distance of the two tables counts.
        sparse: What the absolute values of the shared table count.
    """

    kind: Literal["fedrap"] = "fedrap"
    apart: float = Field(0.01, ge=0)
    sparse: float = Field(0.01, ge=0)

    def local_vectors_of(self, factors: int, items: int) -> dict[str, int]:
        """Vector and table."""
        return {USER: factors, MINE: items * factors}

    def loss(self, local: Local, samples: Samples, rows: Tensor, user_vectors: Weights, dense: Weights) -> Tensor:
        mine = self._mine(user_vectors, local.items.shape)[samples.client_ids, samples.items]
        grown = tanh(local.round_number / GROWS)
        apart = (torch.tanh((mine - rows).square().sum(-1)) * samples.there).sum(1)  # bounded: it never wins
        sparse = (rows.abs().sum(-1) * samples.there).sum(1)
        beside = grown * (self.sparse * sparse - self.apart * apart) / samples.there.sum(1)
        return mean_loss(self.logits(rows + mine, user_vectors, dense), samples) + beside

    def step(self, local: Local, samples: Samples, moving: Sequence[str]) -> None:
        """The user's table moves as the shared one does, along the sum over samples."""
        before = local.local_state[MINE]
        super().step(local, samples, moving)
        slope = (before - local.local_state[MINE]) / self.local_lr
        local.local_state[MINE] = before - self.item_lr * slope * samples.there.sum(1)[:, None]

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Scorer:
        """By both tables."""
        items = full[ITEM].view(plan.architecture.tables[ITEM])

        def score(users: Tensor) -> Tensor:
            found = []
            for some in torch.split(users, 64):
                user_vectors = {name: clients.local_state[name][some] for name in (USER, MINE)}
                found.append(self.logits(items + self._mine(user_vectors, items.shape), user_vectors, {}))
            return torch.cat(found)

        return score

    @staticmethod
    def _mine(user_vectors: Weights, shape: Sequence[int]) -> Tensor:
        return user_vectors[MINE].view(-1, *shape)
