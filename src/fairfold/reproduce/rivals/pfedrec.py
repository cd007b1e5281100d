"""PFedRec: each user has a score function of their own in place of a vector, and fits the item table to themselves.

(Zhang et al., *Dual Personalization on Federated Recommendation*, IJCAI 2023.) A device first trains its score
function, then its copy of the item table. It recommends by that copy.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fairfold.metrics.ranking import Scorer
from fairfold.projections import whole
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.plugins import register_algorithm
from fairfold.protocol.words import Sent
from fairfold.reproduce.rivals.pointwise import ITEM, USER, Pointwise
from fairfold.values import Weights

SCORED_AT_ONCE = 64


@register_algorithm
class PFedRec(Pointwise):
    """Score ⟨w, v⟩ + b with w and b of the user, and v as the user's device has fitted it.

    Attributes:
        kind: Its name.
    """

    PHASES: ClassVar[tuple[tuple[str, ...], ...]] = (("own",), ("items",))

    kind: Literal["pfedrec"] = "pfedrec"

    def own_vectors_of(self, factors: int, items: int) -> dict[str, int]:
        """The score function: weights, and a bias."""
        return {USER: factors + 1}

    def logits(self, rows: Tensor, own: Weights, dense: Weights) -> Tensor:
        """See the base class."""
        return (rows * own[USER][:, None, :-1]).sum(-1) + own[USER][:, -1:]

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """Every user by a copy of the item table that their device has fitted, as in a round."""
        shape = plan.architecture.tables[ITEM]
        sent = Sent(plan.settings.run.rounds, 0, {ITEM: whole(shape)}, {ITEM: full[ITEM]})

        def score(users: Tensor) -> Tensor:
            parts = []
            for some in torch.split(users, SCORED_AT_ONCE):
                local = self.trained(plan, sent, people, some.tolist())
                parts.append(self.logits(local.items + local.change, local.own, {}).cpu())
            return torch.cat(parts)

        return score
