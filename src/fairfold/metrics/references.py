"""Reference recommenders, so that no figure ever stands alone.

Each is built from a training set and then scores users. All of them see every user's data in one place, which
a federation does not. They run on the CPU.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fairfold.data.interactions import Interactions
from fairfold.data.seeds import generator
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.metrics.ranking import first_by_score, items_of

# Up to this many users (or items) PureSVD decomposes the small Gram matrix exactly.
EXACT_SIDE = 2048
ITERATIONS = 20
SPARE = 16
LARGEST_SIDE = 16_384
SWEEPS = 20


class BinaryMatrix:
    """X[u, i] = 1 when user u interacted with item i, and its products with dense matrices.

    Products sum rows of the dense factor ("bags" of an embedding), which is the fastest sparse product torch
    has on the CPU and needs neither its sparse layouts, which warn that they are unfinished, nor values that
    are all 1.
    """

    def __init__(self, train: Interactions) -> None:
        self.train = train
        self._grams: dict[bool, Tensor] = {}
        # The same pairs grouped by item; the stable sort keeps users ascending within an item.
        self.users_by_item = train.users[train.items.argsort(stable=True)]
        self.item_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), train.counts_by_item.cumsum(0)])

    @classmethod
    def of(cls, train: "Interactions | BinaryMatrix") -> "BinaryMatrix":
        """A matrix itself, so that recommenders of the same data share its products, or that of some interactions."""
        return train if isinstance(train, BinaryMatrix) else cls(train)

    def times(self, dense: Tensor) -> Tensor:
        """X @ dense, for dense [items, columns]."""
        return _bags(self.train.items, dense, self.train.offsets)

    def transposed_times(self, dense: Tensor) -> Tensor:
        """Xᵀ @ dense, for dense [users, columns]."""
        return _bags(self.users_by_item, dense, self.item_offsets)

    def rows(self, users: Tensor) -> Tensor:
        """Dense rows X[users], float32 [users, items]."""
        dense = torch.zeros(len(users), self.train.num_items)
        dense[items_of(self.train, users)] = 1
        return dense

    def columns(self, items: Tensor) -> Tensor:
        """Dense columns, transposed: X[:, items]ᵀ, float32 [items, users]."""
        dense = torch.zeros(len(items), self.train.num_users)
        for row, item in enumerate(items.tolist()):
            dense[row, self.users_by_item[self.item_offsets[item] : self.item_offsets[item + 1]]] = 1
        return dense

    def gram(self, of_users: bool, block: int = 512) -> Tensor:
        """X Xᵀ (users) or Xᵀ X (items), built once, a block of rows at a time: its memory is that of the result."""
        if of_users in self._grams:
            return self._grams[of_users]
        count = self.train.num_users if of_users else self.train.num_items
        result = torch.empty(count, count)
        for start in range(0, count, block):
            part = torch.arange(start, min(start + block, count))
            if of_users:
                result[part] = self.times(self.rows(part).T).T
            else:
                result[part] = self.transposed_times(self.columns(part).T).T
        self._grams[of_users] = result
        return result


def _bags(members: Tensor, dense: Tensor, offsets: Tensor) -> Tensor:
    if not len(members):
        return torch.zeros(len(offsets) - 1, dense.shape[1])
    return embedding_bag(members, dense.contiguous(), offsets, mode="sum", include_last_offset=True)


class Popularity:
    """Scores an item by how many users have it: the same list for everyone, the floor every model has to clear."""

    name = "popularity"

    def __init__(self, train: Interactions) -> None:
        self._scores = train.counts_by_item.float()

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        return self._scores.expand(len(users), -1)


class UserNeighbours:
    """User-kNN: scores an item by the users that have it, each weighted by its cosine similarity to a power.

    Every other user is a neighbour; the power (3) makes the near ones count. The user itself is left out.
    Similarities are computed for the users asked for, so memory grows with the batch and not with users².
    """

    name = "user-kNN"

    def __init__(self, train: Interactions, power: float = 3.0) -> None:
        self._matrix = BinaryMatrix(train)
        self._lengths = train.counts_by_user.clamp(min=1).sqrt()
        self._power = power

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        common = self._matrix.times(self._matrix.rows(users).T)  # [all users, users]
        cosine = common / (self._lengths[:, None] * self._lengths[users])
        cosine[users, range(len(users))] = 0
        return self._matrix.transposed_times(cosine**self._power).T


class PureSVD:
    """Scores are rows of X V Vᵀ, with V the leading right singular vectors of X (Cremonesi, Koren, Turrin 2010).

    With few users or few items they come from the exact eigenvectors of the smaller Gram matrix, otherwise
    from subspace iteration with a few spare directions (Halko, Martinsson, Tropp 2011). Kept: a vector a user
    and a vector an item.
    """

    def __init__(self, train: Interactions, rank: int = 16) -> None:
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
            vectors = _leading_right_vectors(matrix, rank)
        self._users, self._items = matrix.times(vectors), vectors

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        return self._users[users] @ self._items.T


def _leading_right_vectors(matrix: BinaryMatrix, rank: int) -> Tensor:
    train = matrix.train
    width = min(rank + SPARE, train.num_users, train.num_items)
    basis = torch.randn(train.num_items, width, generator=generator(0))
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix.transposed_times(matrix.times(basis))).Q
    # Within the subspace found, the right singular vectors of X are those of X·basis, turned back.
    inner: Tensor = torch.linalg.svd(matrix.times(basis), full_matrices=False).Vh
    return basis @ inner[:rank].T


class Ridge:
    """Scores G (G + λI)⁻¹ X, with G = X Xᵀ: a linear model like EASE, without its constraint on the diagonal.

    With fewer items than users the same scores come from the other side, X C (C + λI)⁻¹ with C = Xᵀ X, as
    Xᵀ (X Xᵀ + λI)⁻¹ = (Xᵀ X + λI)⁻¹ Xᵀ. The side solved is held as a dense matrix, so it is limited to
    ``largest_side``; that takes about 12·side² bytes at its peak. C (C + λI)⁻¹ is I − λ (C + λI)⁻¹.

    Where λ is small against the eigenvalues of G, the scores come close to X itself, which ranks nothing that is new:
    10 suits about a hundred heavy users, thousands need a hundred times that. So choose it on held-out data
    (:func:`fairfold.metrics.reference_rows.tried`).
    """

    name = "ridge"

    def __init__(
        self, train: Interactions | BinaryMatrix, penalty: float = 10.0, largest_side: int = LARGEST_SIDE
    ) -> None:
        if not penalty > 0:
            raise InvalidSettings(f"penalty = {penalty}", "more than 0", "Choose a positive penalty.")
        self._matrix = BinaryMatrix.of(train)
        users, items = self._matrix.train.num_users, self._matrix.train.num_items
        if min(users, items) > largest_side:
            raise InvalidData(
                f"{users} users × {items} items",
                f"at most {largest_side} users or at most {largest_side} items",
                "Take fewer users, leave the ridge reference out, or raise largest_side if memory allows.",
            )
        self._by_users = users <= items
        self._penalty = penalty
        shifted = self._matrix.gram(self._by_users).clone()
        shifted.diagonal().add_(penalty)
        self._inverse = torch.cholesky_inverse(torch.linalg.cholesky(shifted))

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        if self._by_users:
            shrunk = -self._penalty * self._inverse[users]
            shrunk[range(len(users)), users] += 1
            return self._matrix.transposed_times(shrunk.T).T
        rows, items = items_of(self._matrix.train, users)
        offsets = torch.searchsorted(rows, torch.arange(len(users) + 1))
        return self._matrix.rows(users).sub_(_bags(items, self._inverse, offsets), alpha=self._penalty)


class Ease(Ridge):
    """EASE: the item-item weights B that least change X, |X − X B|² + λ|B|², with zeros on their diagonal (Steck 2019).

    With P = (Xᵀ X + λI)⁻¹ that is B_ij = −P_ij / P_jj. Its scores X B follow from those of the ridge, R, whichever side
    these come from: R_uj − h_j X_uj, divided by 1 − h_j, where h_j = x_jᵀ (X Xᵀ + λI)⁻¹ x_j is what item j adds to its
    own score. So with few users the catalogue may be of any size.
    """

    name = "EASE"

    def __init__(
        self, train: Interactions | BinaryMatrix, penalty: float = 100.0, largest_side: int = LARGEST_SIDE
    ) -> None:
        super().__init__(train, penalty, largest_side)
        self._left = self._by_others() if self._by_users else self._penalty * self._inverse.diagonal()

    def _by_others(self, block: int = 4096) -> Tensor:
        """1 − h from the users' side, a block of items at a time."""
        matrix, found = self._matrix, []
        for start in range(0, matrix.train.num_items, block):
            offsets = matrix.item_offsets[start : start + block + 1]
            users, first = matrix.users_by_item[offsets[0] : offsets[-1]], offsets - offsets[0]
            sums = _bags(users, self._inverse, first)  # of an item: the rows of its users
            item = torch.repeat_interleave(torch.arange(len(sums)), first.diff())
            found.append(1 - torch.zeros(len(sums)).index_add_(0, item, sums[item, users]))
        return torch.cat(found).clamp(min=1e-6)

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        own = self._matrix.rows(users)
        return own - (own - super().__call__(users)) / self._left


class ItemNeighbours:
    """Item-kNN: scores an item by those of the ``neighbours`` items most alike to it that the user has.

    Each of these counts by its likeness.
    Likeness of items that c_i and c_j users have, c_ij both: c_ij / (√(c_i c_j) + ``shrinkage``), the cosine with less
    trust in small counts. Among equals the more popular neighbour comes first, as items are numbered.
    """

    name = "item-kNN"

    def __init__(
        self, train: Interactions | BinaryMatrix, neighbours: int = 100, shrinkage: float = 10.0, block: int = 512
    ) -> None:
        self._matrix = BinaryMatrix.of(train)
        together, lengths = self._matrix.gram(of_users=False), self._matrix.train.counts_by_item.clamp(min=1).sqrt()
        found = []
        for rows in torch.split(torch.arange(len(together)), block):
            alike = together[rows] / (lengths[rows, None] * lengths + shrinkage)
            alike[range(len(rows)), rows] = 0
            found.append(first_by_score(alike, min(neighbours, len(together))))
        self._alike, self._nearest = (torch.cat(parts) for parts in zip(*found, strict=True))

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        owners = self._matrix.rows(users).T.contiguous()
        return embedding_bag(self._nearest, owners, per_sample_weights=self._alike, mode="sum").T


class Means:
    """Global mean, plus what users or items add to it: prediction = mean + user's bias + item's bias.

    A bias is the mean of what is left over, drawn to 0 by ``damping`` imagined ratings without any: without
    damping, one user's bias alone is the user's mean, one item's alone the item's mean; what has no ratings
    has bias 0. With both, they are fitted in turn until they settle.
    """

    def __init__(self, train: Interactions, *, users: bool = False, items: bool = False, damping: float = 0.0) -> None:
        if train.ratings is None or not len(train):
            raise InvalidData("no ratings to train on", "ratings", "Prepare the data with ratings kept.")
        kinds = {(False, False): "global mean", (True, False): "user mean", (False, True): "item mean"}
        self.name = kinds.get((users, items), "user and item biases")
        ratings = train.ratings.double()
        self._mean = float(ratings.mean())
        self._users = torch.zeros(train.num_users, dtype=torch.float64)
        self._items = torch.zeros(train.num_items, dtype=torch.float64)
        for _ in range(SWEEPS if users and items else 1):
            if items:
                left = ratings - self._mean - self._users[train.users]
                self._items = _damped_means(left, train.items, train.counts_by_item, damping)
            if users:
                left = ratings - self._mean - self._items[train.items]
                self._users = _damped_means(left, train.users, train.counts_by_user, damping)

    def __call__(self, users: Tensor, items: Tensor) -> Tensor:
        """Predicted ratings of pairs."""
        return (self._mean + self._users[users] + self._items[items]).float()


def _damped_means(values: Tensor, owners: Tensor, counts: Tensor, damping: float) -> Tensor:
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, owners, values)
    return sums / (counts + damping).clamp(min=1)
