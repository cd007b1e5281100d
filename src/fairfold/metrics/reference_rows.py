"""The rows that stand beside a table of results: every reference method on the test set, its settings chosen.

They are chosen on training data held out from it: the test set is not looked at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairfold.data.files import Stages, silent
from fairfold.data.holdout import hold_out
from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.seeds import generator
from fairfold.errors import FairfoldError, InvalidData
from fairfold.metrics.ials import ImplicitALS
from fairfold.metrics.ranking import RankingResult, Scorer, evaluate_ranking
from fairfold.metrics.rating import error_shares, rating_errors
from fairfold.metrics.rating_references import rating_references
from fairfold.metrics.references import (
    LARGEST_SIDE,
    BinaryMatrix,
    Ease,
    ItemNeighbours,
    Popularity,
    PureSVD,
    Ridge,
    UserNeighbours,
)

# What is tried on held-out training data for the reference rankings.
POWERS = (1.0, 2.0, 3.0, 5.0, 8.0)
RANKS = (8, 16, 32, 64, 128, 256, 512)
PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
HELD_OUT = 0.2
# Users by whom a choice is judged: drawn by chance from more, asked again on other splits if there are fewer.
JUDGES, MOST_SPLITS = 1000, 3
BEHIND = -1e30

SEARCHED = 4_000
"""What takes a matrix of more items is chosen by what it does among the most popular ones, so many."""

ALIKE = 1.5
"""What was chosen for some items serves for all of them, where these are at most so many times as many."""

FEW_MORE, LITTLE_MORE = 2.0, 0.01
"""All items are ranked as well where they are at most so many times those that a model knows, since more take minutes,
and where these lack more than such a share of the interactions: less cannot be told from chance."""

Build = Callable[[Interactions, float], Scorer]
"""Makes a recommender from a training set and the value of a setting."""

V = TypeVar("V")
Splits = list[tuple[BinaryMatrix, Interactions, Tensor]]
"""What is kept of a training set, what is held out of it, and the users by whom a choice is judged, over and over."""


def tried(build: Build, values: Sequence[float], train: Interactions, k: int = 20) -> dict[float, float]:
    """NDCG@k of every value on held-out training data; empty where nobody has enough to hold any out."""
    return judged(lambda matrix, value: build(matrix.train, value), values, held_out(train), k)


def held_out(train: Interactions) -> Splits:
    """Splits of a training set by chance; several of one with few users."""
    found: Splits = []
    for seed in range(min(max(JUDGES // max(train.num_users, 1), 1), MOST_SPLITS)):
        kept, held = hold_out(train, HELD_OUT, seed)
        judges = held.counts_by_user.nonzero().flatten()
        if len(judges):
            users = judges[torch.randperm(len(judges), generator=generator(seed, 3))[:JUDGES]]
            found.append((BinaryMatrix(kept), held, users))
    return found


def judged(build: Callable[[BinaryMatrix, V], Scorer], values: Sequence[V], splits: Splits, k: int) -> dict[V, float]:
    """NDCG@k of every value on the same splits, by the same users."""

    def of_split(value: V, matrix: BinaryMatrix, held: Interactions, users: Tensor) -> float:
        return evaluate_ranking(build(matrix, value), matrix.train, held, k, users=users).ndcg

    return {value: mean(of_split(value, *split) for split in splits) for value in values} if splits else {}


@dataclass(frozen=True)
class Reference:
    """A method that needs no federation."""

    name: str  # with what was chosen for it
    value: float | str  # NDCG@k or mean squared error on the test set, or why it cannot be computed here
    tried: Mapping[Any, float] = field(default_factory=dict)  # on held-out training data, and the NDCG@k there
    by_user: Tensor | None = None  # NDCG@k of every user with test items, or their shares in the error of ratings

    @staticmethod
    def words(value: float | tuple[float, ...]) -> str:
        """A value that was tried."""
        return " ".join(f"{one:g}" for one in (value if isinstance(value, tuple) else (value,)))


IALS_ITEMS = 50_000
"""iALS solves for every item: with more of them it is left out."""


def ranking_rows(data: Dataset, k: int = 20, support: int = 0) -> Iterator[Reference]:
    """NDCG@k of popularity, user-kNN, PureSVD of ranks 8, 16 and the best, ridge, EASE and iALS.

    Settings are chosen on held-out training data. With ``support`` the same again among the items that so many users
    have: what has fewer is neither trained on nor ranked before the others.
    """
    everything = torch.arange(data.num_items)
    yield _judged("popularity", Popularity(data.train), data, k)
    yield from _rows_among(data, k, everything, "")
    if support:
        items = (data.train.counts_by_item >= support).nonzero().flatten()
        yield from _rows_among(data, k, items, f", items of {support} users")


def rows_beside(data: Dataset, head: int, support: int, k: int = 20) -> Iterator[Reference]:
    """NDCG@k of popularity, and of ridge, EASE, iALS and item-kNN among the items that a model of a head knows.

    These are the ``head`` items that most users have, of those that ``support`` users have. Settings are chosen on
    held-out training data.
    """
    counts = data.train.counts_by_item
    known = torch.zeros(data.num_items, dtype=torch.bool)
    known[_popular(data.train, (counts >= support).nonzero().flatten(), head)] = True
    yield _judged("popularity", Popularity(data.train), data, k)
    kinds = (RIDGE, *STRONG)
    for kind, (name, found) in zip(kinds, strong_rows(data, known, k, kinds=kinds), strict=False):  # of these first
        yield Reference(f"{kind.name} ({name.partition(' (')[2]}", found.ndcg, {}, found.ndcg_by_user)


def _judged(name: str, score: Scorer, data: Dataset, k: int, tried: Mapping[Any, float] | None = None) -> Reference:
    found = evaluate_ranking(score, data.train, data.test, k)
    return Reference(name, found.ndcg, tried or {}, found.ndcg_by_user)


def _rows_among(data: Dataset, k: int, items: Tensor, among: str) -> Iterator[Reference]:
    """All that are tuned, among some items; the others rank behind them."""
    train = data.train if len(items) == data.num_items else _among(data.train, items)
    splits = held_out(train)

    def best(build: Callable[[BinaryMatrix, V], Scorer], values: Sequence[V], otherwise: V) -> tuple[V, dict[V, float]]:
        found = judged(build, values, splits, k)
        return max(found, key=found.__getitem__, default=otherwise), found

    def row(name: str, score: Scorer, tried: Mapping[Any, float]) -> Reference:
        whole = score if len(items) == data.num_items else _behind(score, items, data.num_items)
        return _judged(name, whole, data, k, tried)

    power, powers = best(lambda part, of: UserNeighbours(part.train, of), POWERS, 3.0)
    yield row(f"user-kNN{among} (power {power:g})", UserNeighbours(train, power), powers)
    possible = [rank for rank in RANKS if rank <= min(train.num_users, train.num_items)]
    rank, ranks = best(lambda part, of: PureSVD(part.train, of), possible, 16)
    for one in [one for one in possible if one in ((8, 16, rank) if not among else (rank,))]:
        yield row(f"PureSVD-{one}{among}", PureSVD(train, one), ranks if one == rank else {})
    try:
        penalty, penalties = best(Ridge, PENALTIES, 10.0)
        yield row(f"ridge{among} (penalty {penalty:g})", Ridge(train, penalty), penalties)
    except FairfoldError as error:
        yield Reference(f"ridge{among}", f"not computed: {error.given}; needed: {error.needed}")
    for kind in STRONG[:2]:
        largest = kind.side(train.num_users, train.num_items)
        if largest > LARGEST_SIDE or (kind.name == "iALS" and train.num_items > IALS_ITEMS):
            yield Reference(f"{kind.name}{among}", f"not computed: {train.num_users} users × {train.num_items} items")
            continue
        value, values = best(kind.made, kind.values, kind.values[3])
        name = f"{kind.name}{among} ({kind.words.format(*value)})"
        yield row(name, kind.made(BinaryMatrix(train), value), values)


def rating_rows(data: Dataset) -> Iterator[Reference]:
    """Mean squared error of global, user and item means, of both biases, and of matrix factorisation by SGD."""
    if data.train.ratings is None:
        raise InvalidData(f"{data.name} without ratings", "ratings", "Prepare it with ratings kept.")
    for name, predict, tried_values in rating_references(data.train):
        errors = rating_errors(predict, data.test)
        yield Reference(name, float(errors.mean()), tried_values, error_shares(errors, data.test.users))


@dataclass(frozen=True)
class Kind:
    """A reference that every ranking has beside it."""

    name: str
    build: Callable[..., Scorer]  # from a training set and what was chosen
    values: tuple[tuple[float, ...], ...]  # tried; as many for all kinds
    words: str  # of a value
    side: Callable[[int, int], int]  # of the largest matrix it needs for so many users and items

    def made(self, matrix: BinaryMatrix, value: tuple[float, ...]) -> Scorer:
        """One of it."""
        return self.build(matrix, *value)


def _ials(matrix: BinaryMatrix, factors: float, unobserved: float, pull: float) -> Scorer:
    """Implicit ALS in units that suit data of every density.

    All pairs together weigh ``unobserved`` times what the observed ones do; ``pull`` is λ f_u per interaction of a user
    whose number of interactions is the mean.
    """
    train = matrix.train
    density = len(train) / (train.num_users * train.num_items)
    return ImplicitALS(matrix, int(factors), unobserved * density, pull / (1 + unobserved))


STRONG = (
    Kind(
        "EASE", Ease, ((10.0,), (30.0,), (100.0,), (300.0,), (1000.0,), (3000.0,)), "penalty {:g}", min
    ),
    Kind(
        "iALS", _ials, ((32, 10, 0.3), (64, 3, 0.1), (64, 10, 0.03), (64, 10, 0.1), (64, 30, 0.1), (96, 10, 0.1)),
        "{:g} factors, unobserved {:g}, pull {:g}", lambda _users, _items: 0,
    ),
    Kind(
        "item-kNN", ItemNeighbours, ((10, 0.0), (20, 0.0), (50, 10.0), (100, 10.0), (200, 50.0), (400, 10.0)),
        "{:g} neighbours, shrinkage {:g}", lambda _users, items: items,
    ),
)  # fmt: skip


RIDGE = Kind("ridge", Ridge, ((10.0,), (30.0,), (100.0,), (300.0,), (1000.0,), (3000.0,)), "penalty {:g}", min)


def strong_rows(
    data: Dataset,
    known: Tensor,
    k: int = 20,
    stages: Stages = silent,
    largest: int = LARGEST_SIDE,
    kinds: Sequence[Kind] = STRONG,
) -> Iterator[tuple[str, RankingResult]]:
    """EASE, iALS and item-kNN among the items that a model knows (a mask), and among all where a few more matter.

    They are trained on these items alone, and rank all others behind, by their numbers. What needs a matrix larger than
    ``largest`` takes the most popular items that fit, as its name says.
    """
    train, chosen = data.train, dict[str, tuple[int, tuple[float, ...]]]()
    lacking = float((~known[train.items]).double().mean()) if len(train) else 0.0
    beyond = lacking > LITTLE_MORE and len(known) <= FEW_MORE * max(int(known.sum()), 1)
    masks = [known, torch.ones_like(known)] if beyond else [known]
    for mask in masks:
        items, splits, whole = mask.nonzero().flatten(), dict[int, Splits](), dict[int, BinaryMatrix]()
        for kind in kinds:
            side = kind.side(data.num_users, len(items))
            searched, taken = (len(items) if side <= limit else limit for limit in (SEARCHED, largest))
            with stages(f"{kind.name} of {taken:,} items", 0):
                if kind.name not in chosen or searched > ALIKE * chosen[kind.name][0]:
                    if searched not in splits:
                        splits[searched] = held_out(_among(train, _popular(train, items, searched)))
                    found = judged(kind.made, kind.values, splits[searched], k)
                    chosen[kind.name] = searched, max(found, key=found.__getitem__, default=kind.values[3])
                value, mine = chosen[kind.name][1], _popular(train, items, taken)
                if taken not in whole:
                    whole[taken] = BinaryMatrix(_among(train, mine))
                score = _behind(kind.made(whole[taken], value), mine, data.num_items)
                name = f"{kind.name} of {taken:,} items ({kind.words.format(*value)})"
                yield name, evaluate_ranking(score, train, data.test, k)


def _popular(train: Interactions, items: Tensor, count: int) -> Tensor:
    """Those of some items that most users have, ascending."""
    return items[train.counts_by_item[items].argsort(descending=True, stable=True)[:count]].sort().values


def _among(train: Interactions, items: Tensor) -> Interactions:
    """What a training set says of some items, numbered anew."""
    place = torch.full((train.num_items,), -1)
    place[items] = torch.arange(len(items))
    mine = place[train.items] >= 0
    return Interactions.from_pairs(train.users[mine], place[train.items[mine]], train.num_users, len(items))


def _behind(score: Scorer, items: Tensor, count: int) -> Scorer:
    """Scores of some items among all, the others behind them."""

    def found(users: Tensor) -> Tensor:
        return torch.full((len(users), count), BEHIND).index_copy_(1, items, score(users))

    return found
