"""LightFR: users and items are codes of bits.

(Zhang et al., *LightFR: Lightweight Federated Recommendation with Privacy-preserving Matrix Factorization*, TOIS 2023.)
A device receives one bit per item and factor and holds one per factor of its user; a score counts the bits that agree.
The paper solves for bits one at a time. Here signs are trained as if they were the numbers behind them (the
straight-through rule): the user's on the device, which keeps those numbers while it trains, and the items' on the
server, from slopes that devices send in full.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from experiments.baselines.pointwise import ITEM, USER, Pointwise
from fairfold.federation.plan import Plan
from fairfold.federation.plugins import register_algorithm
from fairfold.federation.updates import Aggregate, ClientTask, State
from fairfold.typing import FLOAT_BYTES, Weights


@register_algorithm
class LightFR(Pointwise):
    """Score ⟨sign u, sign v⟩ / √d.

    Attributes:
        kind: Its name in settings.
    """

    BITS: ClassVar[int] = 1

    kind: Literal["lightfr"] = "lightfr"

    def logits(self, rows: Tensor, user_vectors: Weights, dense: Weights) -> Tensor:
        agree: Tensor = (_code(rows) * _code(user_vectors[USER])[:, None, :]).sum(-1)
        return agree / float(rows.shape[-1] ** 0.5)

    def tasks(self, plan: Plan, state: State, sizes: "list[int]") -> list[ClientTask]:  # type: ignore[override]
        """Signs alone."""
        return [
            replace(task, vectors=task.vectors | {ITEM: _sign(task.vectors[ITEM])})
            for task in super().tasks(plan, state, sizes)
        ]

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        """Bits down, slopes up."""
        down, up = super().traffic(plan, size, round_number)
        return down * self.BITS // (8 * FLOAT_BYTES), up

    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        """The numbers behind the signs stay between −1 and 1, so that no sign is out of reach."""
        after = super().server_update(plan, state, aggregate)
        return replace(after, full=after.full | {ITEM: after.full[ITEM].clamp(-1, 1)})


def _sign(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0)


def _code(values: Tensor) -> Tensor:
    """Signs, whose slopes are those of the numbers."""
    return _sign(values.detach()) + (values - values.detach())
