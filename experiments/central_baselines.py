"""Central baselines of the experiments: every method that needs no federation, tuned on held-out training data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.sampling import generator
from fairfold.errors import FairfoldError, InvalidData, InvalidSettings
from fairfold.metrics.ranking import Scorer, evaluate_ranking, is_cut
from fairfold.metrics.ranking_baselines import BinaryMatrix, Popularity, Ridge, largest_side
from fairfold.metrics.rating import error_shares, fitted_rating_baselines, rating_errors
from fairfold.metrics.tuned_baselines import (
    STRONG_BASELINES,
    TunedBaseline,
    tuned_strong_baselines,
    tuning_splits,
    validate,
)

POWERS = (1.0, 2.0, 3.0, 5.0, 8.0)
RANKS = (8, 16, 32, 64, 128, 256, 512)
PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
# Up to this many users (or items) PureSVD decomposes the small Gram matrix exactly.
EXACT_SIDE = 2048
ITERATIONS = 20
SPARE = 16

Build = Callable[[Interactions, float], Scorer]
"""Makes a recommender from a training set and the value of a setting."""

V = TypeVar("V")

RIDGE = TunedBaseline("ridge", Ridge, ((10.0,), (30.0,), (100.0,), (300.0,), (1000.0,), (3000.0,)), "penalty {:g}", min)


def tried(build: Build, values: Sequence[float], train: Interactions, k: int = 20) -> dict[float, float]:
    """NDCG@k of every value on held-out training data; empty where nobody has enough to hold any out."""
    return validate(lambda matrix, value: build(matrix.train, value), values, tuning_splits(train), k)


class UserNeighbors:
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


@dataclass(frozen=True)
class Baseline:
    """A method that needs no federation."""

    name: str  # with what was chosen for it
    value: float | str  # NDCG@k or mean squared error on the test set, or why it cannot be computed here
    tried: Mapping[Any, float] = field(default_factory=dict)  # on held-out training data, and the NDCG@k there
    by_user: Tensor | None = None  # NDCG@k of every user with test items, or their shares in the error of ratings

    @staticmethod
    def format_value(value: float | tuple[float, ...]) -> str:
        """A candidate value as text."""
        return " ".join(f"{one:g}" for one in (value if isinstance(value, tuple) else (value,)))


IALS_ITEMS = 50_000
"""iALS solves for every item: with more of them it is left out."""


def tuned_ranking_baselines(data: Dataset, k: int = 20) -> Iterator[Baseline]:
    """NDCG@k of popularity, user-kNN, PureSVD of ranks 8, 16 and the best, ridge, EASE and iALS.

    Settings are chosen on held-out training data.
    """
    train = data.train
    splits = tuning_splits(train)
    yield _evaluate("popularity", Popularity(train), data, k)

    def best(build: Callable[[BinaryMatrix, V], Scorer], values: Sequence[V], otherwise: V) -> tuple[V, dict[V, float]]:
        found = validate(build, values, splits, k)
        return max(found, key=found.__getitem__, default=otherwise), found

    power, powers = best(lambda part, of: UserNeighbors(part.train, of), POWERS, 3.0)
    yield _evaluate(f"user-kNN (power {power:g})", UserNeighbors(train, power), data, k, powers)
    possible = [rank for rank in RANKS if rank <= min(train.num_users, train.num_items)]
    rank, ranks = best(lambda part, of: PureSVD(part.train, of), possible, 16)
    for one in [one for one in possible if one in (8, 16, rank)]:
        yield _evaluate(f"PureSVD-{one}", PureSVD(train, one), data, k, ranks if one == rank else {})
    try:
        penalty, penalties = best(Ridge, PENALTIES, 10.0)
        yield _evaluate(f"ridge (penalty {penalty:g})", Ridge(train, penalty), data, k, penalties)
    except FairfoldError as error:
        yield Baseline("ridge", f"not computed: {error.given}; needed: {error.needed}")
    for kind in STRONG_BASELINES[:2]:
        largest = kind.side(train.num_users, train.num_items)
        if largest > largest_side() or (kind.name == "iALS" and train.num_items > IALS_ITEMS):
            yield Baseline(kind.name, f"not computed: {train.num_users} users × {train.num_items} items")
            continue
        value, values = best(kind.fit, kind.values, kind.values[3])
        name = f"{kind.name} ({kind.template.format(*value)})"
        yield _evaluate(name, kind.fit(BinaryMatrix(train), value), data, k, values)


def strong_ranking_baselines(data: Dataset, k: int = 20) -> Iterator[Baseline]:
    """NDCG@k of popularity, ridge, EASE, iALS and item-kNN on all items; where one was cut its name says so."""
    yield _evaluate("popularity", Popularity(data.train), data, k)
    for name, found in tuned_strong_baselines(data, k, kinds=(RIDGE, *STRONG_BASELINES)):
        what, _, chosen = name.partition(" (")
        named = what if is_cut(what) else what.partition(" of ")[0]  # that it has all items goes without saying
        yield Baseline(f"{named} ({chosen}", found.ndcg, {}, found.ndcg_by_user)


def _evaluate(name: str, score: Scorer, data: Dataset, k: int, tried: Mapping[Any, float] | None = None) -> Baseline:
    found = evaluate_ranking(score, data.train, data.test, k)
    return Baseline(name, found.ndcg, tried or {}, found.ndcg_by_user)


def rating_baseline_results(data: Dataset) -> Iterator[Baseline]:
    """Mean squared error of global, user and item means, of both biases, and of matrix factorisation by SGD."""
    if data.train.ratings is None:
        raise InvalidData(f"{data.name} without ratings", "ratings", "Prepare it with ratings kept.")
    for name, predict, tried_values in fitted_rating_baselines(data.train):
        errors = rating_errors(predict, data.test)
        yield Baseline(name, float(errors.mean()), tried_values, error_shares(errors, data.test.users))
