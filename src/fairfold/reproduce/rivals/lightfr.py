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

from fairfold.protocol.plan import Plan
from fairfold.protocol.plugins import register_algorithm
from fairfold.protocol.words import Sent, State, Totals
from fairfold.reproduce.rivals.pointwise import ITEM, USER, Pointwise
from fairfold.values import BYTES, Weights


@register_algorithm
class LightFR(Pointwise):
    """Score ⟨sign u, sign v⟩ / √d.

    Attributes:
        kind: Its name.
        BITS: Of a number that a device holds.
    """

    BITS: ClassVar[int] = 1

    kind: Literal["lightfr"] = "lightfr"

    def logits(self, rows: Tensor, own: Weights, dense: Weights) -> Tensor:
        """See the base class."""
        agree: Tensor = (_code(rows) * _code(own[USER])[:, None, :]).sum(-1)
        return agree / float(rows.shape[-1] ** 0.5)

    def send(self, plan: Plan, state: State, sizes: "list[int]") -> list[Sent]:  # type: ignore[override]
        """Signs alone."""
        return [
            replace(sent, vectors=sent.vectors | {ITEM: _sign(sent.vectors[ITEM])})
            for sent in super().send(plan, state, sizes)
        ]

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        """Bits down, slopes up."""
        down, up = super().traffic(plan, size, round_number)
        return down * self.BITS // (8 * BYTES), up

    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """The numbers behind the signs stay between −1 and 1, so that no sign is out of reach."""
        after = super().apply(plan, state, totals)
        return replace(after, full=after.full | {ITEM: after.full[ITEM].clamp(-1, 1)})


def _sign(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0)


def _code(values: Tensor) -> Tensor:
    """Signs, whose slopes are those of the numbers."""
    return _sign(values.detach()) + (values - values.detach())
