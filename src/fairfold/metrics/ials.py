"""Implicit alternating least squares (Hu, Koren, Volinsky 2008) as Rendle, Krichene, Zhang and Koren tune it (2021).

With X_ui = 1 for what was observed, users' vectors w and items' vectors h make least of

    Σ over observed (1 − ⟨w_u, h_i⟩)² + α₀ Σ over all ⟨w_u, h_i⟩² + λ Σ_u f_u |w_u|² + λ Σ_i f_i |h_i|²,

where f_u = n_u + α₀ · items and f_i = n_i + α₀ · users: who has more data is drawn to zero as strongly per datum. Given
the items, every user has a small system of their own, and the other way round.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fairfold.data.interactions import Interactions
from fairfold.data.seeds import generator
from fairfold.metrics.references import BinaryMatrix

AT_ONCE = 1 << 14
"""Interactions whose vectors are gathered at a time: they stay in the processor's cache."""


class ImplicitALS:
    """Matrix factorisation by implicit alternating least squares; every sweep solves all items, then all users."""

    name = "iALS"

    def __init__(
        self,
        train: Interactions | BinaryMatrix,
        factors: int = 64,
        unobserved: float = 0.1,
        penalty: float = 0.01,
        sweeps: int = 8,
    ) -> None:
        matrix = BinaryMatrix.of(train)
        train = matrix.train
        self.users: Tensor = torch.randn(train.num_users, factors, generator=generator(0)) * 0.1 / factors**0.5
        by_item = list(_groups(matrix.users_by_item, matrix.item_offsets, train.num_users, factors))
        by_user = list(_groups(train.items, train.offsets, train.num_items, factors))
        for _ in range(sweeps):
            self.items = _solved(by_item, train.num_items, self.users, unobserved, penalty)
            self.users = _solved(by_user, train.num_users, self.items, unobserved, penalty)

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        scores: Tensor = self.users[users] @ self.items.T
        return scores


Group = tuple[Tensor, Tensor, Tensor]
"""Rows that are solved together, how many interactions each has, and with whom, padded by a number too many."""


def _groups(members: Tensor, offsets: Tensor, others: int, factors: int) -> Iterator[Group]:
    """Rows of like lengths together; those with fewer interactions than factors by their exact number."""
    counts = offsets.diff()
    order = counts.argsort(descending=True)
    order, start = order[counts[order] > 0], 0  # who has none has the vector 0
    lengths = counts[order].tolist()
    same = torch.unique_consecutive(counts[order], return_counts=True)
    last = dict(zip(same[0].tolist(), same[1].cumsum(0).tolist(), strict=True))  # behind the last row of each length
    while start < len(lengths):
        longest = lengths[start]
        stop = min(start + max(1, AT_ONCE // longest), last[longest] if longest < factors else len(lengths))
        rows = order[start:stop]
        place = torch.arange(longest)
        inside = place < counts[rows, None]
        found = members[(offsets[rows, None] + place).clamp(max=len(members) - 1)]
        yield rows, counts[rows], found.where(inside, others)
        start = stop


def _solved(groups: list[Group], count: int, others: Tensor, unobserved: float, penalty: float) -> Tensor:
    """The vectors of one side, given those of the other."""
    factors = others.shape[1]
    everybody, identity = unobserved * others.T @ others, torch.eye(factors)
    padded, found = torch.cat([others, torch.zeros(1, factors)]), torch.zeros(count, factors)
    for rows, counts, members in groups:
        taken = embedding(members, padded)
        pull = penalty * (counts + unobserved * len(others))
        if members.shape[1] < factors:  # all of equal length; with A what they share, A⁻¹Vᵀ(I + VA⁻¹Vᵀ)⁻¹1
            alike = taken @ torch.linalg.inv(everybody + pull[0] * identity)
            small = alike @ taken.mT + torch.eye(members.shape[1])
            weights = torch.linalg.solve(small, torch.ones(len(rows), members.shape[1], 1))
            found[rows] = (alike.mT @ weights)[..., 0]
        else:
            normal = torch.baddbmm(everybody, taken.mT, taken)
            normal.diagonal(dim1=1, dim2=2).add_(pull[:, None])
            right = taken.sum(1)[..., None]
            found[rows] = torch.cholesky_solve(right, torch.linalg.cholesky(normal))[..., 0]
    return found
