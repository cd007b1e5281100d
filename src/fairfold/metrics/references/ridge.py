"""Ridge regression of every item on all items, solved on the smaller side of the matrix."""

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.metrics.references.matrix import BinaryMatrix

LARGEST_SIDE = 16_384


class Ridge:
    """Scores G (G + λI)⁻¹ X, with G = X Xᵀ: a linear model like EASE, without its constraint on the diagonal.

    With fewer items than users the same scores come from the other side, X C (C + λI)⁻¹ with C = Xᵀ X: both
    are X Xᵀ(X Xᵀ + λI)⁻¹ X, as Xᵀ (X Xᵀ + λI)⁻¹ = (Xᵀ X + λI)⁻¹ Xᵀ. The side solved is held as a dense
    matrix, so it is limited to ``largest_side``; that takes about 8·side² bytes at its peak. As C (C + λI)⁻¹ is
    I − λ (C + λI)⁻¹, one triangular factor serves, and only the users asked for are solved.

    Where λ is small against the eigenvalues of G, the scores come close to X itself, which ranks nothing that is new:
    10 suits about a hundred heavy users, thousands need a hundred times that. So choose it on held-out data
    (:mod:`fairfold.metrics.references.choice`).
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
        self._penalty = penalty
        shifted = self._matrix.gram(self._by_users)
        shifted.diagonal().add_(penalty)
        self._factor: Tensor = torch.linalg.cholesky(shifted)

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        if self._by_users:
            themselves = torch.zeros(len(users), self._matrix.train.num_users).scatter_(1, users[:, None], 1.0)
            return self._matrix.transposed_times(self._shrunk(themselves).T).T
        return self._shrunk(self._matrix.rows(users))

    def _shrunk(self, rows: Tensor) -> Tensor:
        """Rows times I − λ (G + λI)⁻¹."""
        return rows - self._penalty * torch.cholesky_solve(rows.T, self._factor).T
