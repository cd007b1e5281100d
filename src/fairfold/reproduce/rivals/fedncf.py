"""FedNCF: a perceptron reads a user's vector beside an item's; its layers are averaged like the item table.

(Perifanis and Efraimidis, *Federated Neural Collaborative Filtering*, 2022.)
"""

from typing import Literal

import torch
from torch import Tensor

from fairfold.protocol.plugins import register_algorithm
from fairfold.reproduce.rivals.pointwise import USER, Pointwise
from fairfold.values import Shapes, Weights


@register_algorithm
class FedNCF(Pointwise):
    """Two hidden layers, of d and d/2 units.

    Attributes:
        kind: Its name.
    """

    kind: Literal["fedncf"] = "fedncf"

    def layers_of(self, factors: int) -> Shapes:
        """The last column of each is its bias."""
        half = max(1, factors // 2)
        return {"first": (factors, 2 * factors + 1), "second": (half, factors + 1), "third": (1, half + 1)}

    def logits(self, rows: Tensor, own: Weights, dense: Weights) -> Tensor:
        """See the base class."""
        at = torch.cat([own[USER][:, None, :].expand(*rows.shape[:2], -1), rows], dim=-1)
        for name in ("first", "second", "third"):
            weights = dense[name].expand(len(rows), *dense[name].shape[1:])
            at = torch.baddbmm(weights[:, None, :, -1], at, weights[:, :, :-1].transpose(1, 2))
            at = at if name == "third" else at.relu()
        return at.squeeze(-1)
