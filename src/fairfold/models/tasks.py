"""What a recommender is trained for, with its loss, its metrics and the methods it has to beat."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from fairfold.data.interactions import Dataset, Interactions
from fairfold.errors import FairfoldError, InvalidData
from fairfold.metrics import RankingResult, RatingResult, evaluate_ranking, evaluate_ratings
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor
from fairfold.metrics.references import Means, Popularity, PureSVD, Ridge, UserNeighbours
from fairfold.metrics.references.choice import tried
from fairfold.models.central import (
    CentralSettings,
    EpochReport,
    ignore,
    train_ranking,
    train_ratings,
)
from fairfold.models.recommender import Recommender
from fairfold.models.scoring import scorer

Row = tuple[float, ...]
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
        row: Its metrics on the test set, or why it cannot be computed here.
        tried: What was tried on held-out training data, and the headline metric there.
    """

    name: str
    row: Row | str
    tried: Mapping[float, float] = field(default_factory=dict)


class Task(Protocol):
    """Ranking items or predicting ratings, on one data set.

    Attributes:
        title: What the rows of metrics are about.
        metrics: Names of the numbers in a row.
        headline: The metric that validation looks at.
        train: All that may be trained on, validation included.
    """

    title: str
    metrics: tuple[str, ...]
    headline: str
    train: Interactions

    def epochs(
        self,
        model: Recommender,
        train: Interactions,
        settings: CentralSettings,
        on_step: Callable[[int], None] = ignore,
    ) -> Iterator[EpochReport]:
        """Train a model in place; yields after every epoch."""

    def value(self, model: Recommender, train: Interactions, held_out: Interactions) -> float:
        """The headline metric on held-out data, with the sign that makes larger better."""

    def test_row(self, model: Recommender) -> Row:
        """A model's metrics on the test set."""

    def references(self) -> Iterator[Reference]:
        """The methods it has to beat."""


class RankingTask:
    """Rank the catalogue for every user: BPR, NDCG@k."""

    def __init__(self, data: Dataset, k: int = 20) -> None:
        self.k = k
        self.title = f"Test set, all metrics at {k} ranks"
        self.metrics: tuple[str, ...] = (f"NDCG@{k}", "Recall", "HitRate", "MRR", "coverage")
        self.headline = self.metrics[0]
        self.train = with_validation(data)
        self._test = data.test

    def epochs(
        self,
        model: Recommender,
        train: Interactions,
        settings: CentralSettings,
        on_step: Callable[[int], None] = ignore,
    ) -> Iterator[EpochReport]:
        """Train with BPR."""
        return train_ranking(model, train, settings, on_step)

    def value(self, model: Recommender, train: Interactions, held_out: Interactions) -> float:
        """NDCG@k."""
        return evaluate_ranking(scorer(model), train, held_out, self.k).ndcg

    def test_row(self, model: Recommender) -> Row:
        """NDCG, recall, hit rate, MRR and coverage."""
        return self._row(evaluate_ranking(scorer(model), self.train, self._test, self.k))

    def references(self) -> Iterator[Reference]:
        """Popularity, user-kNN, PureSVD of ranks 8, 16 and the best, ridge; settings are chosen on held-out data."""
        yield Reference("popularity", self._scored(Popularity(self.train)))
        power, powers = self._chosen(UserNeighbours, POWERS, 3.0)
        yield Reference(f"user-kNN (power {power:g})", self._scored(UserNeighbours(self.train, power)), powers)
        possible = [rank for rank in RANKS if rank <= min(self.train.num_users, self.train.num_items)]
        best, ranks = self._chosen(lambda train, rank: PureSVD(train, int(rank)), possible, 16)
        for rank in [rank for rank in possible if rank in (8, 16, best)]:
            yield Reference(f"PureSVD-{rank}", self._scored(PureSVD(self.train, rank)), ranks if rank == best else {})
        try:
            penalty, penalties = self._chosen(Ridge, PENALTIES, 10.0)
            yield Reference(f"ridge (penalty {penalty:g})", self._scored(Ridge(self.train, penalty)), penalties)
        except FairfoldError as error:
            yield Reference("ridge", f"not computed: {error.given}; needed: {error.needed}")

    def _chosen(
        self, build: Callable[[Interactions, float], Scorer], values: Sequence[float], otherwise: float
    ) -> tuple[float, dict[float, float]]:
        found = tried(build, values, self.train, self.k)
        return max(found, key=found.__getitem__, default=otherwise), found

    def _scored(self, score: Scorer) -> Row:
        return self._row(evaluate_ranking(score, self.train, self._test, self.k))

    def _row(self, result: RankingResult) -> Row:
        return result.ndcg, result.recall, result.hit_rate, result.mrr, result.coverage


class RatingTask:
    """Predict ratings: squared error."""

    title = "Test set"
    metrics: tuple[str, ...] = ("MSE", "RMSE")
    headline = "MSE"

    def __init__(self, data: Dataset) -> None:
        if data.train.ratings is None:
            raise InvalidData(f"{data.name} without ratings", "ratings", "Prepare it with ratings kept.")
        self.train = with_validation(data)
        self._test = data.test

    def epochs(
        self,
        model: Recommender,
        train: Interactions,
        settings: CentralSettings,
        on_step: Callable[[int], None] = ignore,
    ) -> Iterator[EpochReport]:
        """Train with the squared error."""
        return train_ratings(model, train, settings, on_step)

    def value(self, model: Recommender, train: Interactions, held_out: Interactions) -> float:  # noqa: ARG002
        """Minus the mean squared error."""
        return -evaluate_ratings(predictor(model), held_out).mse

    def test_row(self, model: Recommender) -> Row:
        """Mean squared error and its root."""
        return self._row(evaluate_ratings(predictor(model), self._test))

    def references(self) -> Iterator[Reference]:
        """Global, user and item means, and user and item biases together."""
        for users, items, damping in (
            (False, False, 0.0),
            (True, False, 0.0),
            (False, True, 0.0),
            (True, True, DAMPING),
        ):
            means = Means(self.train, users=users, items=items, damping=damping)
            yield Reference(means.name, self._row(evaluate_ratings(means, self._test)))

    def _row(self, result: RatingResult) -> Row:
        return result.mse, result.rmse


def predictor(model: nn.Module) -> Predictor:
    """A function from users and items to the model's ratings, without gradients and in evaluation mode."""

    def predict(users: Tensor, items: Tensor) -> Tensor:
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                ratings: Tensor = model(users.to(device), items.to(device))
                return ratings
        finally:
            model.train(was_training)

    return predict


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
