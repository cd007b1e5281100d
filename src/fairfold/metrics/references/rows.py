"""The rows that stand beside a table of results: every reference method on the test set, its settings chosen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fairfold.data.interactions import Dataset, Interactions
from fairfold.errors import FairfoldError, InvalidData
from fairfold.metrics.ranking import Scorer, evaluate_ranking
from fairfold.metrics.rating import evaluate_ratings
from fairfold.metrics.references.choice import tried
from fairfold.metrics.references.neighbours import UserNeighbours
from fairfold.metrics.references.popularity import Popularity
from fairfold.metrics.references.pure_svd import PureSVD
from fairfold.metrics.references.ratings import Means
from fairfold.metrics.references.ridge import Ridge

# Imagined ratings that draw a bias to 0; chosen on held-out ratings of Goodreads.
DAMPING = 10.0
# What is tried on held-out training data for the reference rankings.
POWERS = (1.0, 2.0, 3.0, 5.0, 8.0)
RANKS = (8, 16, 32, 64, 128, 256, 512)
PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)


@dataclass(frozen=True)
class Reference:
    """A method that needs no federation.

    Attributes:
        name: With what was chosen for it.
        value: NDCG@k or mean squared error on the test set, or why it cannot be computed here.
        tried: What was tried on held-out training data, and the NDCG@k there.
    """

    name: str
    value: float | str
    tried: Mapping[float, float] = field(default_factory=dict)


def ranking_rows(data: Dataset, k: int = 20) -> Iterator[Reference]:
    """NDCG@k of popularity, user-kNN, PureSVD of ranks 8, 16 and the best, ridge; settings chosen on held-out data."""
    train = with_validation(data)

    def value(score: Scorer) -> float:
        return evaluate_ranking(score, train, data.test, k).ndcg

    def chosen(
        build: Callable[[Interactions, float], Scorer], values: Sequence[float], otherwise: float
    ) -> tuple[float, dict[float, float]]:
        found = tried(build, values, train, k)
        return max(found, key=found.__getitem__, default=otherwise), found

    yield Reference("popularity", value(Popularity(train)))
    power, powers = chosen(UserNeighbours, POWERS, 3.0)
    yield Reference(f"user-kNN (power {power:g})", value(UserNeighbours(train, power)), powers)
    possible = [rank for rank in RANKS if rank <= min(train.num_users, train.num_items)]
    best, ranks = chosen(lambda part, rank: PureSVD(part, int(rank)), possible, 16)
    for rank in [rank for rank in possible if rank in (8, 16, best)]:
        yield Reference(f"PureSVD-{rank}", value(PureSVD(train, rank)), ranks if rank == best else {})
    try:
        penalty, penalties = chosen(Ridge, PENALTIES, 10.0)
        yield Reference(f"ridge (penalty {penalty:g})", value(Ridge(train, penalty)), penalties)
    except FairfoldError as error:
        yield Reference("ridge", f"not computed: {error.given}; needed: {error.needed}")


def rating_rows(data: Dataset) -> Iterator[Reference]:
    """Mean squared error of global, user and item means, and of user and item biases together."""
    if data.train.ratings is None:
        raise InvalidData(f"{data.name} without ratings", "ratings", "Prepare it with ratings kept.")
    train = with_validation(data)
    for users, items, damping in ((False, False, 0.0), (True, False, 0.0), (False, True, 0.0), (True, True, DAMPING)):
        means = Means(train, users=users, items=items, damping=damping)
        yield Reference(means.name, evaluate_ratings(means, data.test).mse)


def with_validation(data: Dataset) -> Interactions:
    """All interactions that may be trained on: the training set and, where there is one, the validation set."""
    train, valid = data.train, data.valid
    if valid is None:
        return train
    ratings = None
    if train.ratings is not None and valid.ratings is not None:
        ratings = torch.cat([train.ratings, valid.ratings])
    return Interactions.from_pairs(
        torch.cat([train.users, valid.users]),
        torch.cat([train.items, valid.items]),
        data.num_users,
        data.num_items,
        ratings,
    )
