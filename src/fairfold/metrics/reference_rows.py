"""The rows that stand beside a table of results: every reference method on the test set, its settings chosen.

They are chosen on training data held out from it: the test set is not looked at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch

from fairfold.data.holdout import hold_out
from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.seeds import generator
from fairfold.errors import FairfoldError, InvalidData
from fairfold.metrics.ranking import Scorer, evaluate_ranking
from fairfold.metrics.rating import evaluate_ratings
from fairfold.metrics.rating_references import rating_references
from fairfold.metrics.references import Popularity, PureSVD, Ridge, UserNeighbours

# What is tried on held-out training data for the reference rankings.
POWERS = (1.0, 2.0, 3.0, 5.0, 8.0)
RANKS = (8, 16, 32, 64, 128, 256, 512)
PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
HELD_OUT = 0.2
# Users by whom a choice is judged: drawn by chance from more, asked again on other splits if there are fewer.
JUDGES, MOST_SPLITS = 1000, 3

Build = Callable[[Interactions, float], Scorer]
"""Makes a recommender from a training set and the value of a setting."""


def tried(build: Build, values: Sequence[float], train: Interactions, k: int = 20) -> dict[float, float]:
    """NDCG@k of every value on held-out training data; empty where nobody has enough to hold any out."""
    splits = min(max(JUDGES // max(train.num_users, 1), 1), MOST_SPLITS)
    found = [found for seed in range(splits) if (found := _of_split(build, values, train, k, seed))]
    return {value: mean(of_split[value] for of_split in found) for value in values} if found else {}


def _of_split(build: Build, values: Sequence[float], train: Interactions, k: int, seed: int) -> dict[float, float]:
    kept, held = hold_out(train, HELD_OUT, seed)
    judges = held.counts_by_user.nonzero().flatten()
    users = judges[torch.randperm(len(judges), generator=generator(seed, 3))[:JUDGES]]
    if not len(users):
        return {}
    return {value: evaluate_ranking(build(kept, value), kept, held, k, users=users).ndcg for value in values}


@dataclass(frozen=True)
class Reference:
    """A method that needs no federation."""

    name: str  # with what was chosen for it
    value: float | str  # NDCG@k or mean squared error on the test set, or why it cannot be computed here
    tried: Mapping[float, float] = field(default_factory=dict)  # on held-out training data, and the NDCG@k there


def ranking_rows(data: Dataset, k: int = 20) -> Iterator[Reference]:
    """NDCG@k of popularity, user-kNN, PureSVD of ranks 8, 16 and the best, ridge; settings chosen on held-out data."""
    train = with_validation(data)

    def value(score: Scorer) -> float:
        return evaluate_ranking(score, train, data.test, k).ndcg

    def chosen(build: Build, values: Sequence[float], otherwise: float) -> tuple[float, dict[float, float]]:
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
    """Mean squared error of global, user and item means, of both biases, and of matrix factorisation by SGD."""
    if data.train.ratings is None:
        raise InvalidData(f"{data.name} without ratings", "ratings", "Prepare it with ratings kept.")
    train = with_validation(data)
    for name, predict, tried_values in rating_references(train):
        yield Reference(name, evaluate_ratings(predict, data.test), tried_values)


def with_validation(data: Dataset) -> Interactions:
    """All interactions that may be trained on: the training set and, where there is one, the validation set."""
    train, valid = data.train, data.valid
    if valid is None:
        return train
    ratings = None
    if train.ratings is not None and valid.ratings is not None:
        ratings = torch.cat([train.ratings, valid.ratings])
    users, items = torch.cat([train.users, valid.users]), torch.cat([train.items, valid.items])
    return Interactions.from_pairs(users, items, data.num_users, data.num_items, ratings)
