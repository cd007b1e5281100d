"""PFedRec: each user has a score function of their own in place of a vector, and fits the item table to themselves.

(Zhang et al., *Dual Personalization on Federated Recommendation*, IJCAI 2023.) A device first trains its score
function, then its copy of the item table. It recommends by that copy.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from experiments.baselines.pointwise import ITEM, USER, Pointwise
from fairfold.federation.clients import Clients
from fairfold.federation.plan import Plan
from fairfold.federation.plugins import register_algorithm
from fairfold.federation.updates import ClientTask
from fairfold.metrics.ranking import Scorer
from fairfold.subspace.projection import whole
from fairfold.typing import Weights

SCORED_AT_ONCE = 64


@register_algorithm
class PFedRec(Pointwise):
    """Score ⟨w, v⟩ + b with w and b of the user, and v as the user's device has fitted it.

    Attributes:
        kind: Its name in settings.
    """

    PHASES: ClassVar[tuple[tuple[str, ...], ...]] = (("user_vectors",), ("items",))

    kind: Literal["pfedrec"] = "pfedrec"

    def local_vectors_of(self, factors: int, items: int) -> dict[str, int]:
        """The score function: weights, and a bias."""
        return {USER: factors + 1}

    def logits(self, rows: Tensor, user_vectors: Weights, dense: Weights) -> Tensor:
        return (rows * user_vectors[USER][:, None, :-1]).sum(-1) + user_vectors[USER][:, -1:]

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Scorer:
        """Every user by a copy of the item table that their device has fitted, as in a round."""
        shape = plan.architecture.tables[ITEM]
        task = ClientTask(plan.settings.run.rounds, 0, {ITEM: whole(shape)}, {ITEM: full[ITEM]})

        def score(users: Tensor) -> Tensor:
            parts = []
            for some in torch.split(users, SCORED_AT_ONCE):
                local = self.train_locally(plan, task, clients, some.tolist())
                parts.append(self.logits(local.items + local.change, local.local_state, {}).cpu())
            return torch.cat(parts)

        return score
