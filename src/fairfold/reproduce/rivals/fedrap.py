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

from fairfold.metrics.ranking import Scorer
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.plugins import register_algorithm
from fairfold.reproduce.rivals.pointwise import ITEM, USER, Local, Pointwise, Samples, mean_loss
from fairfold.values import Weights

MINE = "items of the user"
GROWS = 10.0
"""Rounds over which the two terms come in."""


@register_algorithm
class FedRAP(Pointwise):
    """Score ⟨u, c + d⟩ with c shared and d of the user.

    Attributes:
        kind: Its name.
        apart: What the distance of the two tables counts.
        sparse: What the absolute values of the shared table count.
    """

    kind: Literal["fedrap"] = "fedrap"
    apart: float = Field(0.01, ge=0)
    sparse: float = Field(0.01, ge=0)

    def own_vectors_of(self, factors: int, items: int) -> dict[str, int]:
        """Vector and table."""
        return {USER: factors, MINE: items * factors}

    def loss(self, local: Local, samples: Samples, rows: Tensor, own: Weights, dense: Weights) -> Tensor:
        """See the base class."""
        mine = self._mine(own, local.items.shape)[samples.clients, samples.items]
        grown = tanh(local.round_number / GROWS)
        apart = (torch.tanh((mine - rows).square().sum(-1)) * samples.there).sum(1)  # bounded: it never wins
        sparse = (rows.abs().sum(-1) * samples.there).sum(1)
        beside = grown * (self.sparse * sparse - self.apart * apart) / samples.there.sum(1)
        return mean_loss(self.logits(rows + mine, own, dense), samples) + beside

    def step(self, local: Local, samples: Samples, moving: Sequence[str]) -> None:
        """The user's table moves as the shared one does, along the sum over samples."""
        before = local.own[MINE]
        super().step(local, samples, moving)
        slope = (before - local.own[MINE]) / self.local_step
        local.own[MINE] = before - self.item_step * slope * samples.there.sum(1)[:, None]

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """By both tables."""
        items = full[ITEM].view(plan.architecture.tables[ITEM])

        def score(users: Tensor) -> Tensor:
            found = []
            for some in torch.split(users, 64):
                own = {name: people.private[name][some] for name in (USER, MINE)}
                found.append(self.logits(items + self._mine(own, items.shape), own, {}))
            return torch.cat(found)

        return score

    @staticmethod
    def _mine(own: Weights, shape: Sequence[int]) -> Tensor:
        return own[MINE].view(-1, *shape)
