"""Central ranking baselines, which see all data in one place: popularity, ridge, EASE, item-kNN and iALS (CPU)."""

import os
from collections.abc import Iterator
from functools import partial
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag

from fairfold.data.interactions import Interactions
from fairfold.data.sampling import generator
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.metrics.ranking import Scorer, expand, first_by_score, user_items
from fairfold.typing import FLOAT_BYTES

LARGEST_SIDE = 16_384  # of a dense matrix, where the memory of the machine is not known
KEPT_SIDE = 10_000  # of a Gram matrix that is kept for the next baseline of the same data: 400 MB
GRAM_BLOCK = 512  # rows of a Gram matrix that are made at a time
EXPANDED = 1 << 23  # products of a sparse sum that are in memory at a time


def largest_side() -> int:
    """Side of the largest matrix that a baseline takes by default: it fills half of the memory at most."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # another operating system
        return LARGEST_SIDE
    return isqrt(memory // (2 * FLOAT_BYTES))


def invert(matrix: Tensor, device: torch.device | None = None) -> Tensor:
    """Invert a symmetric positive definite matrix in its own memory, on ``device`` (a GPU where there is one)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    columns = matrix.to(device).mT  # LAPACK's order: a view, which its routines overwrite
    info = torch.empty((), dtype=torch.int32, device=device)
    torch.linalg.cholesky_ex(columns, check_errors=True, out=(columns, info))
    torch.cholesky_inverse(columns, out=columns)
    return matrix if matrix.device == columns.device else matrix.copy_(columns.mT)


class BinaryMatrix:
    """X[u, i] = 1 when user u has item i; products sum rows of the dense factor, torch's fastest way on a CPU."""

    def __init__(self, train: Interactions) -> None:
        self.train = train
        self._grams: dict[bool, Tensor] = {}
        # The same pairs grouped by item; the stable sort keeps users ascending within an item.
        self.users_by_item = train.users[train.items.argsort(stable=True)]
        self.item_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), train.counts_by_item.cumsum(0)])

    @classmethod
    def of(cls, train: "Interactions | BinaryMatrix") -> "BinaryMatrix":
        """The matrix of some interactions, or a matrix itself, whose products baselines of the same data share."""
        return train if isinstance(train, BinaryMatrix) else cls(train)

    def times(self, dense: Tensor) -> Tensor:
        """X @ dense, for dense [items, columns]."""
        return _row_sums(self.train.items, dense, self.train.offsets)

    def transposed_times(self, dense: Tensor) -> Tensor:
        """Xᵀ @ dense, for dense [users, columns]."""
        return _row_sums(self.users_by_item, dense, self.item_offsets)

    def rows(self, users: Tensor) -> Tensor:
        """Dense rows X[users], float32 [users, items]."""
        dense = torch.zeros(len(users), self.train.num_items)
        dense[user_items(self.train, users)] = 1
        return dense

    def columns(self, items: Tensor) -> Tensor:
        """Dense columns, transposed: X[:, items]ᵀ, float32 [items, users]."""
        dense = torch.zeros(len(items), self.train.num_users)
        for row, item in enumerate(items.tolist()):
            dense[row, self.users_by_item[self.item_offsets[item] : self.item_offsets[item + 1]]] = 1
        return dense

    def gram(self, of_users: bool) -> Tensor:
        """X Xᵀ (users) or Xᵀ X (items), to be overwritten, made a block of rows at a time: in the result's memory.

        Small ones are kept, since a baseline is fitted with several settings, and others follow.
        """
        count = self.train.num_users if of_users else self.train.num_items
        if of_users not in self._grams:
            result = torch.empty(count, count)
            for part in torch.split(torch.arange(count), GRAM_BLOCK):
                product = self.times(self.rows(part).T) if of_users else self.transposed_times(self.columns(part).T)
                result[part] = product.T
            if count > KEPT_SIDE:
                return result
            self._grams[of_users] = result
        return self._grams[of_users].clone()

    def in_common(self, items: Tensor) -> Tensor:
        """Rows of Xᵀ X: how many users each of some items has in common with every item, float32 [items, all items]."""
        if False in self._grams:
            return self._grams[False][items]
        which, places = expand(self.item_offsets, items)
        users = self.users_by_item[places]
        if int(self.train.counts_by_user[users].sum()) > min(EXPANDED, len(self.train) * len(items) // 16):
            return self.transposed_times(self.columns(items).T).T  # long histories: sums of dense rows are faster
        position, others = expand(self.train.offsets, users)
        count = self.train.num_items
        found = torch.zeros(len(items) * count)
        found.index_add_(0, which[position] * count + self.train.items[others], torch.ones(len(others)))
        return found.view(len(items), count)


Observed = Interactions | BinaryMatrix  # a training set, or its matrix, whose products baselines share


def _row_sums(members: Tensor, dense: Tensor, offsets: Tensor) -> Tensor:
    if not len(members):
        return torch.zeros(len(offsets) - 1, dense.shape[1])
    return embedding_bag(members, dense.contiguous(), offsets, mode="sum", include_last_offset=True)


class Popularity:
    """Scores an item by its number of users: the same list for everyone."""

    name = "popularity"

    def __init__(self, train: Interactions) -> None:
        self._scores = train.counts_by_item.float()

    def __call__(self, users: Tensor) -> Tensor:
        return self._scores.expand(len(users), -1)


class Ridge:
    """Scores G (G + λI)⁻¹ X, with G = X Xᵀ: a linear model like EASE, without its constraint on the diagonal.

    With fewer items than users the same scores come from the other side, X C (C + λI)⁻¹ with C = Xᵀ X, as
    Xᵀ (X Xᵀ + λI)⁻¹ = (Xᵀ X + λI)⁻¹ Xᵀ. The side solved is a dense matrix, limited to ``largest``,
    :func:`largest_side` by default, and takes 4·side² bytes: it is inverted in place, on ``device`` (:func:`invert`).
    Tune λ on held-out data: 10 suits about a hundred heavy users, thousands need a hundred times that.
    """

    name = "ridge"

    def __init__(
        self,
        train: Observed,
        penalty: float = 10.0,
        largest: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not penalty > 0:
            raise InvalidSettings(f"penalty = {penalty}", "more than 0", "Choose a positive penalty.")
        self._matrix = BinaryMatrix.of(train)
        users, items = self._matrix.train.num_users, self._matrix.train.num_items
        most = largest_side() if largest is None else largest
        if min(users, items) > most:
            needed = f"at most {most} users or at most {most} items"
            remedy = "Take fewer users, leave this reference out, or raise largest if memory allows."
            raise InvalidData(f"{users} users × {items} items", needed, remedy)
        self._by_users = users <= items
        self._penalty = penalty
        shifted = self._matrix.gram(self._by_users)
        shifted.diagonal().add_(penalty)
        self._inverse = invert(shifted, device)

    def __call__(self, users: Tensor) -> Tensor:
        return self._scores(self._matrix, users)

    def fold_in(self, histories: Interactions) -> Scorer:
        """Score items for other users, by their histories."""
        return partial(self._scores, BinaryMatrix(histories))

    def _scores(self, rows: BinaryMatrix, users: Tensor) -> Tensor:
        if self._by_users and rows is self._matrix:  # G (G + λI)⁻¹ = I − λ (G + λI)⁻¹
            shrunk = -self._penalty * self._inverse[users]
            shrunk[range(len(users)), users] += 1
            return self._matrix.transposed_times(shrunk.T).T
        own = rows.rows(users)
        if self._by_users:
            return self._matrix.transposed_times(self._inverse @ self._matrix.times(own.T)).T
        owners, items = user_items(rows.train, users)
        offsets = torch.searchsorted(owners, torch.arange(len(users) + 1))
        return own.sub_(_row_sums(items, self._inverse, offsets), alpha=self._penalty)


class Ease(Ridge):
    """EASE: the item-item weights B that least change X, |X − X B|² + λ|B|², with zeros on their diagonal (Steck 2019).

    With P = (Xᵀ X + λI)⁻¹ that is B_ij = −P_ij / P_jj. Its scores X B follow from those of the ridge, R, whichever side
    these come from: R_uj − h_j X_uj, divided by 1 − h_j, where h_j = x_jᵀ (X Xᵀ + λI)⁻¹ x_j is what item j adds to its
    own score. So with few users the catalogue may be of any size.
    """

    name = "EASE"

    def __init__(
        self,
        train: Observed,
        penalty: float = 100.0,
        largest: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(train, penalty, largest, device)
        self._left = self._by_others() if self._by_users else self._penalty * self._inverse.diagonal()

    def _by_others(self, block: int = 4096) -> Tensor:
        """1 − h from the users' side, a block of items at a time."""
        matrix, found = self._matrix, []
        for start in range(0, matrix.train.num_items, block):
            offsets = matrix.item_offsets[start : start + block + 1]
            users, first = matrix.users_by_item[offsets[0] : offsets[-1]], offsets - offsets[0]
            sums = _row_sums(users, self._inverse, first)  # of an item: the rows of its users
            item = torch.repeat_interleave(torch.arange(len(sums)), first.diff())
            found.append(1 - torch.zeros(len(sums)).index_add_(0, item, sums[item, users]))
        return torch.cat(found).clamp(min=1e-6)

    def _scores(self, rows: BinaryMatrix, users: Tensor) -> Tensor:
        own = rows.rows(users)
        return own - (own - super()._scores(rows, users)) / self._left


class ItemNeighbors:
    """Item-kNN: scores an item by the similarity of those of its ``neighbors`` nearest items that the user has.

    Similarity of items with c_i and c_j users, c_ij in common: c_ij / (√(c_i c_j) + ``shrinkage``). Among equals the
    more popular neighbor comes first, as items are numbered. Made and kept without a matrix of items × items.
    """

    name = "item-kNN"

    def __init__(self, train: Observed, neighbors: int = 100, shrinkage: float = 10.0, block: int = 512) -> None:
        self._matrix = BinaryMatrix.of(train)
        items, lengths = self._matrix.train.num_items, self._matrix.train.counts_by_item.clamp(min=1).sqrt()
        found, unlike = [], -torch.arange(items, dtype=torch.float32)  # below all others, and no two are equal
        for rows in torch.split(torch.arange(items), block):
            similarity = self._matrix.in_common(rows) / (lengths[rows, None] * lengths + shrinkage)
            similarity[range(len(rows)), rows] = 0
            found.append(first_by_score(torch.where(similarity > 0, similarity, unlike), min(neighbors, items)))
        similarity, nearest = (torch.cat(parts) for parts in zip(*found, strict=True))
        # Grouped by neighbor: which items count an item, and how much. What is not alike at all counts nothing.
        neighbor, order = nearest.masked_fill(similarity <= 0, items).flatten().sort(stable=True)
        order = order[: int((neighbor < items).sum())]
        self._weights, self._targets = similarity.flatten()[order], order // nearest.shape[1]
        counts = torch.bincount(neighbor[: len(order)], minlength=items)
        self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])

    def __call__(self, users: Tensor) -> Tensor:
        return self._scores(self._matrix, users)

    def fold_in(self, histories: Interactions) -> Scorer:
        """Score items for other users, by their histories."""
        return partial(self._scores, BinaryMatrix(histories))

    def _scores(self, rows: BinaryMatrix, users: Tensor) -> Tensor:
        count = rows.train.num_items
        scores = torch.zeros(len(users) * count)
        owners, items = user_items(rows.train, users)
        ends = self._offsets.diff()[items].cumsum(0)  # interactions in pieces of about as many products
        for piece in torch.split(torch.arange(len(items)), torch.bincount(ends // EXPANDED).tolist()):
            position, places = expand(self._offsets, items[piece])
            scores.index_add_(0, owners[piece][position] * count + self._targets[places], self._weights[places])
        return scores.view(len(users), count)


AT_ONCE = 1 << 14  # interactions whose vectors are gathered at a time: they stay in the processor's cache


class ImplicitALS:
    """Implicit alternating least squares (Hu, Koren, Volinsky 2008) as Rendle et al. tune it (2021).

    With X_ui = 1 for what was observed, users' vectors w and items' vectors h minimize

        Σ over observed (1 − ⟨w_u, h_i⟩)² + α₀ Σ over all ⟨w_u, h_i⟩² + λ Σ_u f_u |w_u|² + λ Σ_i f_i |h_i|²,

    where f_u = n_u + α₀ · items and f_i = n_i + α₀ · users. A sweep solves for all items, then for all users.
    """

    name = "iALS"

    def __init__(
        self, train: Observed, factors: int = 64, unobserved: float = 0.1, penalty: float = 0.01, sweeps: int = 8
    ) -> None:
        matrix = BinaryMatrix.of(train)
        train = matrix.train
        self._weights = unobserved, penalty
        self.users: Tensor = torch.randn(train.num_users, factors, generator=generator(0)) * 0.1 / factors**0.5
        by_item = list(_rows_by_length(matrix.users_by_item, matrix.item_offsets, train.num_users, factors))
        by_user = list(_rows_by_length(train.items, train.offsets, train.num_items, factors))
        for _ in range(sweeps):
            self.items = _solve_rows(by_item, train.num_items, self.users, unobserved, penalty)
            self.users = _solve_rows(by_user, train.num_users, self.items, unobserved, penalty)

    def __call__(self, users: Tensor) -> Tensor:
        scores: Tensor = self.users[users] @ self.items.T
        return scores

    def fold_in(self, histories: Interactions) -> Scorer:
        """Score items for other users, whose vectors are solved for by their histories."""
        factors = self.items.shape[1]
        rows = list(_rows_by_length(histories.items, histories.offsets, histories.num_items, factors))
        vectors = _solve_rows(rows, histories.num_users, self.items, *self._weights)
        return lambda users: vectors[users] @ self.items.T


# Rows that are solved together, their numbers of interactions, and the ids of these, padded by an unused id
Group = tuple[Tensor, Tensor, Tensor]


def _rows_by_length(members: Tensor, offsets: Tensor, others: int, factors: int) -> Iterator[Group]:
    """Groups of rows of similar lengths; of equal lengths where these are shorter than the number of factors."""
    counts = offsets.diff()
    order = counts.argsort(descending=True)
    order, start = order[counts[order] > 0], 0  # without interactions the vector is 0
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


def _solve_rows(groups: list[Group], count: int, others: Tensor, unobserved: float, penalty: float) -> Tensor:
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
