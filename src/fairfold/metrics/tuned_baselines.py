"""Strong ranking baselines with settings tuned on held-out training data: EASE, iALS and item-kNN."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairfold.data.files import Stages, no_progress
from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.partition import hold_out
from fairfold.data.sampling import generator
from fairfold.metrics.ranking import CUT, RankingResult, Scorer, evaluate_ranking, sampled_users
from fairfold.metrics.ranking_baselines import BinaryMatrix, Ease, ImplicitALS, ItemNeighbors, largest_side

HELD_OUT = 0.2  # share of each user's training items that is held out for tuning
VALIDATION_USERS, MAX_SPLITS = 1000, 3  # users of a split; with fewer there are several splits, so many at most
UNRANKED = -1e30  # score of items that a baseline does not know
TUNED_SIDE, TUNED_ITEMS = 10_000, 4_000  # a larger matrix is tuned on the most popular items, so many, and says so
NEIGHBOURED = 50_000  # items among which neighbors are found: it takes time by the square of their number, not memory

V = TypeVar("V")
# Splits of a training set: what is left, what is held out, and the users whose NDCG counts
Splits = list[tuple[BinaryMatrix, Interactions, Tensor]]


def tuning_splits(train: Interactions) -> Splits:
    """Random splits of a training set; several of one with few users."""
    found: Splits = []
    for seed in range(min(max(VALIDATION_USERS // max(train.num_users, 1), 1), MAX_SPLITS)):
        left, held = hold_out(train, HELD_OUT, seed)
        validated = held.counts_by_user.nonzero().flatten()
        if len(validated):
            users = validated[torch.randperm(len(validated), generator=generator(seed, 3))[:VALIDATION_USERS]]
            found.append((BinaryMatrix(left), held, users))
    return found


def validate(build: Callable[[BinaryMatrix, V], Scorer], values: Sequence[V], splits: Splits, k: int) -> dict[V, float]:
    """Mean NDCG@k of every value on the same splits."""

    def of_split(value: V, matrix: BinaryMatrix, held: Interactions, users: Tensor) -> float:
        return evaluate_ranking(build(matrix, value), matrix.train, held, k, users=users).ndcg

    return {value: mean(of_split(value, *split) for split in splits) for value in values} if splits else {}


@dataclass(frozen=True)
class TunedBaseline:
    """A baseline with candidates for its settings."""

    name: str
    build: Callable[..., Scorer]  # from a training set and what was chosen
    values: tuple[tuple[float, ...], ...]  # candidates; as many for all
    template: str  # for the description of a value
    side: Callable[[int, int], int]  # side of the matrix that it works on, for so many users and items
    stored: bool = True  # whether this matrix is in memory as a whole

    def fit(self, matrix: BinaryMatrix, value: tuple[float, ...]) -> Any:
        """The fitted baseline for a value."""
        return self.build(matrix, *value)


def _ials(matrix: BinaryMatrix, factors: float, unobserved: float, pull: float) -> Scorer:
    """Implicit ALS in units that suit data of every density.

    All pairs together weigh ``unobserved`` times what the observed ones do; ``pull`` is λ f_u per interaction of a user
    whose number of interactions is the mean.
    """
    train = matrix.train
    density = len(train) / (train.num_users * train.num_items)
    return ImplicitALS(matrix, int(factors), unobserved * density, pull / (1 + unobserved))


STRONG_BASELINES = (
    TunedBaseline(
        "EASE", Ease, ((10.0,), (30.0,), (100.0,), (300.0,), (1000.0,), (3000.0,)), "penalty {:g}", min
    ),
    TunedBaseline(
        "iALS", _ials, ((32, 10, 0.3), (64, 3, 0.1), (64, 10, 0.03), (64, 10, 0.1), (64, 30, 0.1), (96, 10, 0.1)),
        "{:g} factors, unobserved {:g}, pull {:g}", lambda _users, _items: 0,
    ),
    TunedBaseline(
        "item-kNN", ItemNeighbors, ((10, 0.0), (20, 0.0), (50, 10.0), (100, 10.0), (200, 50.0), (400, 10.0)),
        "{:g} neighbours, shrinkage {:g}", lambda _users, items: items, stored=False,
    ),
)  # fmt: skip


def tuned_strong_baselines(
    data: Dataset,
    k: int = 20,
    stages: Stages = no_progress,
    largest: int | None = None,
    kinds: Sequence[TunedBaseline] = STRONG_BASELINES,
) -> Iterator[tuple[str, RankingResult]]:
    """NDCG@k of EASE, iALS and item-kNN, tuned on training data; arguments as for :func:`tuned_scorers`."""
    for name, score in tuned_scorers(data, k, stages, largest, kinds):
        shown = data.evaluated
        yield name, evaluate_ranking(score, shown.train, shown.test, k, users=sampled_users(shown.test))
        del score


def tuned_scorers(
    data: Dataset,
    k: int = 20,
    stages: Stages = no_progress,
    largest: int | None = None,
    kinds: Sequence[TunedBaseline] = STRONG_BASELINES,
) -> Iterator[tuple[str, Scorer]]:
    """EASE, iALS and item-kNN on all items that anybody has, one after another.

    What needs a matrix larger than ``largest`` (:func:`largest_side` by default) takes the most popular items that fit:
    it is cut, as its name says. Neighbors are found without that matrix. A name also says where settings were chosen on
    fewer items, for time. Items that a baseline does not have rank behind, by their numbers.
    """
    train, largest = data.train, largest_side() if largest is None else largest
    items = (train.counts_by_item > 0).nonzero().flatten()
    splits, whole = dict[int, Splits](), dict[int, BinaryMatrix]()
    for kind in kinds:
        limit = largest if kind.stored else NEIGHBOURED
        taken = len(items) if kind.side(data.num_users, len(items)) <= limit else limit
        searched = taken if kind.side(data.num_users, taken) <= TUNED_SIDE else TUNED_ITEMS
        with stages(f"{kind.name} of {taken:,} items", 0):
            if searched not in splits:
                splits[searched] = tuning_splits(restricted(train, most_popular(train, items, searched)))
            found = validate(kind.fit, kind.values, splits[searched], k)
            value, mine = max(found, key=found.__getitem__, default=kind.values[3]), most_popular(train, items, taken)
            if taken not in whole:
                whole.clear()  # the matrices of one number of items at a time
                whole[taken] = BinaryMatrix(restricted(train, mine))
            fitted = kind.fit(whole[taken], value)
            if data.held_out_users is not None:
                fitted = fitted.fold_in(restricted(data.held_out_users.train, mine))
            score = rank_behind(fitted, mine, data.num_items)
            cut = f"{CUT}{taken:,} of {len(items):,} items" if taken < len(items) else f" of {taken:,} items"
            where = f", chosen on {searched:,} items" if searched < taken else ""
            yield f"{kind.name}{cut} ({kind.template.format(*value)}{where})", score
            del fitted, score  # before the next one takes memory


def most_popular(train: Interactions, items: Tensor, count: int) -> Tensor:
    """The most popular of some items, ascending."""
    return items[train.counts_by_item[items].argsort(descending=True, stable=True)[:count]].sort().values


def restricted(train: Interactions, items: Tensor) -> Interactions:
    """The interactions with some items, numbered anew."""
    place = torch.full((train.num_items,), -1)
    place[items] = torch.arange(len(items))
    mine = place[train.items] >= 0
    return Interactions.from_pairs(train.users[mine], place[train.items[mine]], train.num_users, len(items))


def rank_behind(score: Scorer, items: Tensor, count: int) -> Scorer:
    """Scores of all items where a scorer knows some; the others rank behind them."""

    def found(users: Tensor) -> Tensor:
        return torch.full((len(users), count), UNRANKED).index_copy_(1, items, score(users))

    return found
