"""Ridge regression of every item on all items, solved on the smaller side of the matrix."""

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.metrics.references.matrix import BinaryMatrix

LARGEST_SIDE = 16_384


class Ridge:
    """Scores G (G + λI)⁻¹ X, with G = X Xᵀ: a linear model like EASE, without its constraint on the diagonal.

    With fewer items than users the same scores come from the other side, X (C + λI)⁻¹ C with C = Xᵀ X: both
    are X Xᵀ(X Xᵀ + λI)⁻¹ X, as Xᵀ (X Xᵀ + λI)⁻¹ = (Xᵀ X + λI)⁻¹ Xᵀ. The side solved is held as a dense
    matrix, so it is limited to ``largest_side``; the solution takes about 12·side² bytes at its peak.
    """

    name = "ridge"

    def __init__(self, train: Interactions, penalty: float = 10.0, largest_side: int = LARGEST_SIDE) -> None:
        if not penalty > 0:
            raise InvalidSettings(f"penalty = {penalty}", "more than 0", "Choose a positive penalty.")
        side = min(train.num_users, train.num_items)
        if side > largest_side:
            raise InvalidData(
                f"{train.num_users} users × {train.num_items} items",
                f"at most {largest_side} users or at most {largest_side} items",
                "Take fewer users, leave the ridge reference out, or raise largest_side if memory allows.",
            )
        self._matrix = BinaryMatrix(train)
        self._by_users = train.num_users <= train.num_items
        gram = self._matrix.gram(self._by_users)
        shifted = gram.clone()
        shifted.diagonal().add_(penalty)
        # G and (G + λI)⁻¹ commute, so this is also G (G + λI)⁻¹.
        self._weights = torch.cholesky_solve(gram, torch.linalg.cholesky(shifted))

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        if self._by_users:
            return self._matrix.transposed_times(self._weights[users].T).T
        return self._matrix.rows(users) @ self._weights
