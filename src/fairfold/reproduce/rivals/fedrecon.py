"""FedRecon: a device rebuilds its user's vector in every round, and keeps nothing.

(Singhal et al., *Federated Reconstruction: Partially Local Federated Learning*, NeurIPS 2021.) One half of a user's
items, with the negatives drawn for them, fits the vector to the item table as it came; the other half moves the table.
The halves change places from round to round. Whoever asks for recommendations rebuilds the vector from all items.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fairfold.metrics.ranking import Scorer
from fairfold.projections import whole
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.plugins import register_algorithm
from fairfold.protocol.words import Sent
from fairfold.reproduce.rivals.pointwise import ITEM, USER, Local, Pointwise, Samples
from fairfold.values import Weights


@register_algorithm
class FedRecon(Pointwise):
    """Score ⟨u, v⟩ with u made anew.

    Attributes:
        kind: Its name.
    """

    kind: Literal["fedrecon"] = "fedrecon"

    def trained(self, plan: Plan, sent: Sent, people: People, clients: Sequence[int]) -> Local:
        """The vector from one half of the samples, then the table by the other."""
        return self._fitted(plan, sent, people, clients, ("own",), ("items",))

    def _fitted(self, plan: Plan, sent: Sent, people: People, clients: Sequence[int], *phases: Sequence[str]) -> Local:
        local = self.started(plan, sent, people, clients)
        local.own = {USER: torch.zeros_like(local.own[USER])}
        drawn = list(self.draw(people, clients, sent.round_number, local.items.device))
        for number, moving in enumerate(phases):
            for samples in drawn:
                self.step(local, _half(samples, number + sent.round_number) if len(phases) > 1 else samples, moving)
        return local

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """Every user by a vector made from all of their items."""
        shape = plan.architecture.tables[ITEM]
        sent = Sent(plan.settings.run.rounds, 0, {ITEM: whole(shape)}, {ITEM: full[ITEM]})

        def score(users: Tensor) -> Tensor:
            local = self._fitted(plan, sent, people, users.tolist(), ("own",))
            return (local.own[USER] @ local.items.T).cpu()

        return score


def _half(samples: Samples, odd: int) -> Samples:
    """Every other sample; of a single one both halves have it."""
    place = torch.arange(samples.items.shape[1], device=samples.items.device)
    mine = samples.there & (place % 2 == odd % 2)
    return replace(samples, there=torch.where(mine.any(1, keepdim=True), mine, samples.there))
