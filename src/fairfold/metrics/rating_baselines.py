"""Central baselines of ratings: means, biases, and matrix factorization with biases by SGD (Funk, Koren)."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.data.partition import hold_out
from fairfold.data.sampling import generator
from fairfold.errors import InvalidData
from fairfold.metrics.rating import Predictor, evaluate_ratings

FACTORS, PENALTIES = (8, 32), (0.03, 0.05, 0.08, 0.12)
LEARNING_RATE, DECAY, SPREAD = 0.03, 0.95, 0.1  # decay per epoch; standard deviation of initial vectors
# Early stopping: the first epochs learn the biases, and the error may rest before it falls by the tastes
MAX_EPOCHS, MIN_EPOCHS, PATIENCE = 60, 15, 3
HELD_OUT = 0.1
MAX_RATINGS = 1 << 20  # ratings used for tuning at most: of more, a part of every user's
DAMPING = 10.0  # imagined ratings that draw a bias to 0; tuned on held-out ratings of Goodreads
SWEEPS = 20  # alternations in which both biases are fitted


class Means:
    """Global mean plus biases of users or items, with ``damping`` imagined zeros each; both are fitted in turn."""

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
        return (self._mean + self._users[users] + self._items[items]).float()


def _damped_means(values: Tensor, owners: Tensor, counts: Tensor, damping: float) -> Tensor:
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, owners, values)
    return sums / (counts + damping).clamp(min=1)


class BiasedMF:
    """A rating is mean + bᵤ + bᵢ + u·vᵢ, by SGD on small batches, in units of the ratings' standard deviation."""

    def __init__(self, train: Interactions, factors: int, penalty: float, seed: int = 0) -> None:
        assert train.ratings is not None
        self._train, self._penalty = train, penalty
        self._source, self._learning_rate = generator(seed, 4), LEARNING_RATE
        self._mean = float(train.ratings.double().mean())
        self._scale = float(train.ratings.double().std(correction=0)) or 1.0
        self._given = ((train.ratings.double() - self._mean) / self._scale).float()
        # (u, bᵤ, 1) and (v, 1, bᵢ): one product holds the biases as well; the ones never move.
        self._tables, self._moves = list[Tensor](), list[Tensor]()
        for many, bias in ((train.num_users, 0), (train.num_items, 1)):
            rows = SPREAD / factors**0.5 * torch.randn(many, factors + 2, generator=self._source)
            rows[:, factors + bias], rows[:, factors + 1 - bias] = 0, 1
            moves = torch.ones(factors + 2)
            moves[factors + 1 - bias] = 0
            self._tables.append(rows)
            self._moves.append(moves)

    def epoch(self) -> None:
        """A pass over the ratings in random order, in batches so small that users hardly repeat in one."""
        train, (users, items) = self._train, self._tables
        batch = max(64, min(train.num_users, train.num_items) // 2)
        owners = train.users
        for part in torch.split(torch.randperm(len(train), generator=self._source), batch):
            who, what = owners[part], train.items[part]
            mine, theirs = users[who], items[what]
            errors = (self._given[part] - (mine * theirs).sum(1))[:, None]
            users.index_add_(0, who, self._learning_rate * (errors * theirs - self._penalty * mine) * self._moves[0])
            items.index_add_(0, what, self._learning_rate * (errors * mine - self._penalty * theirs) * self._moves[1])
        self._learning_rate *= DECAY

    def __call__(self, users: Tensor, items: Tensor) -> Tensor:
        found: Tensor = self._mean + self._scale * (self._tables[0][users] * self._tables[1][items]).sum(-1)
        return found


def fitted_rating_baselines(train: Interactions) -> Iterator[tuple[str, Predictor, dict[float, float]]]:
    """Name, predictor and tuning errors of means, of biases, and of matrix factorization by SGD."""
    for users, items, damping in ((False, False, 0.0), (True, False, 0.0), (False, True, 0.0), (True, True, DAMPING)):
        means = Means(train, users=users, items=items, damping=damping)
        yield means.name, means, {}
    yield tuned_biased_mf(train)


def tuned_biased_mf(train: Interactions) -> tuple[str, BiasedMF, dict[float, float]]:
    """The model tuned on held-out training data: its name, itself, and the error there by penalty."""
    some, _ = hold_out(train, 1 - MAX_RATINGS / len(train)) if len(train) > MAX_RATINGS else (train, None)
    kept, held = hold_out(some, HELD_OUT)
    found = {of: _early_stopping(BiasedMF(kept, *of), held) for of in product(FACTORS, PENALTIES)}
    (factors, penalty), (_, epochs) = min(found.items(), key=lambda one: one[1])
    model = BiasedMF(train, factors, penalty)
    for _ in range(epochs):
        model.epoch()
    tried = {of: error for (many, of), (error, _) in found.items() if many == factors}
    return f"MF by SGD ({factors} factors, penalty {penalty:g})", model, tried


def _early_stopping(model: BiasedMF, held: Interactions) -> tuple[float, int]:
    """The smallest error on held-out ratings, and its epoch, by early stopping."""
    best, last = float("inf"), 0
    for epoch in range(1, MAX_EPOCHS + 1) if len(held) else ():
        model.epoch()
        error = evaluate_ratings(model, held)
        if error < best:
            best, last = error, epoch
        elif epoch >= MIN_EPOCHS and epoch - last >= PATIENCE:
            break
    return best, last
