"""PureSVD: the best approximation of the binary matrix by one of low rank (Cremonesi, Koren, Turrin 2010)."""

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.data.seeds import generator
from fairfold.errors import InvalidSettings
from fairfold.metrics.references.matrix import BinaryMatrix

# Up to this many users (or items) the small Gram matrix is decomposed exactly.
EXACT_SIDE = 2048
ITERATIONS = 20
SPARE = 16


class PureSVD:
    """Scores are rows of X V Vᵀ, with V the leading right singular vectors of the binary matrix X.

    With few users or few items they come from the exact eigenvectors of the smaller Gram matrix, otherwise
    from subspace iteration with a few spare directions (Halko, Martinsson, Tropp 2011). Kept: a vector a user
    and a vector an item.
    """

    def __init__(self, train: Interactions, rank: int = 16, seed: int = 0) -> None:
        smaller = min(train.num_users, train.num_items)
        if not 1 <= rank <= smaller:
            raise InvalidSettings(
                f"rank = {rank} for {train.num_users} users × {train.num_items} items",
                f"from 1 to {smaller}",
                "Choose a rank that the matrix can have.",
            )
        self.name = f"PureSVD-{rank}"
        matrix = BinaryMatrix(train)
        if smaller <= EXACT_SIDE:
            of_users = train.num_users <= train.num_items
            # In double precision: small singular values are square roots of the Gram matrix's.
            vectors: Tensor = torch.linalg.eigh(matrix.gram(of_users).double()).eigenvectors[:, -rank:].float()
            if of_users:
                # U Uᵀ X has the same rows as X V Vᵀ.
                self._users: Tensor = vectors
                self._items: Tensor = matrix.transposed_times(vectors)
                return
        else:
            vectors = _leading_right_vectors(matrix, rank, seed)
        self._users, self._items = matrix.times(vectors), vectors

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        return self._users[users] @ self._items.T


def _leading_right_vectors(matrix: BinaryMatrix, rank: int, seed: int) -> Tensor:
    train = matrix.train
    width = min(rank + SPARE, train.num_users, train.num_items)
    basis = torch.randn(train.num_items, width, generator=generator(seed))
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix.transposed_times(matrix.times(basis))).Q
    # Within the subspace found, the right singular vectors of X are those of X·basis, turned back.
    inner: Tensor = torch.linalg.svd(matrix.times(basis), full_matrices=False).Vh
    return basis @ inner[:rank].T
