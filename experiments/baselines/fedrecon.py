"""FedRecon: a device rebuilds its user's vector in every round, and keeps nothing.

(Singhal et al., *Federated Reconstruction: Partially Local Federated Learning*, NeurIPS 2021.) One half of a user's
items, with the negatives drawn for them, fits the vector to the item table as it came; the other half moves the table.
The halves change places from round to round. For recommendations a device rebuilds the vector from all items.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.baselines.pointwise import ITEM, USER, Local, Pointwise, Samples
from fairfold.federation.clients import Clients
from fairfold.federation.plan import Plan
from fairfold.federation.plugins import register_algorithm
from fairfold.federation.updates import ClientTask
from fairfold.metrics.ranking import Scorer
from fairfold.subspace.projection import whole
from fairfold.typing import Weights


@register_algorithm
class FedRecon(Pointwise):
    """Score ⟨u, v⟩ with u made anew.

    Attributes:
        kind: Its name in settings.
    """

    kind: Literal["fedrecon"] = "fedrecon"

    def train_locally(self, plan: Plan, task: ClientTask, clients: Clients, client_ids: Sequence[int]) -> Local:
        """The vector from one half of the samples, then the table by the other."""
        return self._fitted(plan, task, clients, client_ids, ("user_vectors",), ("items",))

    def _fitted(
        self, plan: Plan, task: ClientTask, clients: Clients, client_ids: Sequence[int], *phases: Sequence[str]
    ) -> Local:
        local = self.init_local(plan, task, clients, client_ids)
        local.local_state = {USER: torch.zeros_like(local.local_state[USER])}
        drawn = list(self.draw(clients, client_ids, task.round_number, local.items.device))
        for number, moving in enumerate(phases):
            for samples in drawn:
                self.step(local, _half(samples, number + task.round_number) if len(phases) > 1 else samples, moving)
        return local

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Scorer:
        """Every user by a vector made from all of their items."""
        shape = plan.architecture.tables[ITEM]
        task = ClientTask(plan.settings.run.rounds, 0, {ITEM: whole(shape)}, {ITEM: full[ITEM]})

        def score(users: Tensor) -> Tensor:
            local = self._fitted(plan, task, clients, users.tolist(), ("user_vectors",))
            return (local.local_state[USER] @ local.items.T).cpu()

        return score


def _half(samples: Samples, odd: int) -> Samples:
    """Every other sample; of a single one both halves have it."""
    place = torch.arange(samples.items.shape[1], device=samples.items.device)
    mine = samples.there & (place % 2 == odd % 2)
    return replace(samples, there=torch.where(mine.any(1, keepdim=True), mine, samples.there))
