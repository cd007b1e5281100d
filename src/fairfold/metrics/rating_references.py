"""Matrix factorisation with biases by stochastic gradient descent (Funk, Koren): the reference for ratings.

A rating is mean + bᵤ + bᵢ + u·vᵢ, and a step on one moves u by step · (error · v − penalty · u), v and the biases
alike. Steps are taken on small batches at once. How many epochs and which factors and penalty are chosen on training
data held out from it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fairfold.data.holdout import hold_out
from fairfold.data.interactions import Interactions
from fairfold.data.seeds import generator
from fairfold.metrics.rating import Predictor, evaluate_ratings
from fairfold.metrics.references import Means

FACTORS, PENALTIES = (8, 32), (0.03, 0.05, 0.08, 0.12)
STEP, SLOWER, SPREAD = 0.03, 0.95, 0.1
"""The first epoch's step, by how much it falls with each, and the spread of the vectors before training."""
EPOCHS, LEAST_EPOCHS, PATIENCE = 60, 15, 3
"""The first epochs learn the biases, and the error may rest before it falls by the tastes."""
HELD_OUT = 0.1
MOST_RATINGS = 1 << 20
"""Of more ratings a part of every user's is drawn to choose by."""
DAMPING = 10.0
"""Imagined ratings that draw a bias to 0; chosen on held-out ratings of Goodreads."""


class BiasedFactors:
    """Such a model, in units of the ratings' spread: steps and penalties mean the same on any scale."""

    def __init__(self, train: Interactions, factors: int, penalty: float, seed: int = 0) -> None:
        assert train.ratings is not None
        self._train, self._penalty, self._source, self._step = train, penalty, generator(seed, 4), STEP
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
        """A pass over the ratings in random order, a batch so small that hardly anybody is in it twice."""
        train, (users, items) = self._train, self._tables
        batch = max(64, min(train.num_users, train.num_items) // 2)
        owners = train.users
        for part in torch.split(torch.randperm(len(train), generator=self._source), batch):
            who, what = owners[part], train.items[part]
            mine, theirs = users[who], items[what]
            errors = (self._given[part] - (mine * theirs).sum(1))[:, None]
            users.index_add_(0, who, self._step * (errors * theirs - self._penalty * mine) * self._moves[0])
            items.index_add_(0, what, self._step * (errors * mine - self._penalty * theirs) * self._moves[1])
        self._step *= SLOWER

    def __call__(self, users: Tensor, items: Tensor) -> Tensor:
        """Predicted ratings of pairs."""
        found: Tensor = self._mean + self._scale * (self._tables[0][users] * self._tables[1][items]).sum(-1)
        return found


def rating_references(train: Interactions) -> Iterator[tuple[str, Predictor, dict[float, float]]]:
    """Name, predictions, and what was tried on held-out ratings: means, biases, and matrix factorisation by SGD."""
    for users, items, damping in ((False, False, 0.0), (True, False, 0.0), (False, True, 0.0), (True, True, DAMPING)):
        means = Means(train, users=users, items=items, damping=damping)
        yield means.name, means, {}
    yield chosen_factors(train)


def chosen_factors(train: Interactions) -> tuple[str, BiasedFactors, dict[float, float]]:
    """The model with what held-out training data chose, its name, and the error there by penalty."""
    some, _ = hold_out(train, 1 - MOST_RATINGS / len(train)) if len(train) > MOST_RATINGS else (train, None)
    kept, held = hold_out(some, HELD_OUT)
    found = {
        (factors, penalty): _stopped(BiasedFactors(kept, factors, penalty), held)
        for factors in FACTORS
        for penalty in PENALTIES
    }
    (factors, penalty), (_, epochs) = min(found.items(), key=lambda one: one[1])
    model = BiasedFactors(train, factors, penalty)
    for _ in range(epochs):
        model.epoch()
    tried = {of: error for (many, of), (error, _) in found.items() if many == factors}
    return f"MF by SGD ({factors} factors, penalty {penalty:g})", model, tried


def _stopped(model: BiasedFactors, held: Interactions) -> tuple[float, int]:
    """The smallest error on held-out ratings, and after how many epochs: until it has not fallen for a while."""
    best, last = float("inf"), 0
    for epoch in range(1, EPOCHS + 1) if len(held) else ():
        model.epoch()
        error = evaluate_ratings(model, held)
        if error < best:
            best, last = error, epoch
        elif epoch >= LEAST_EPOCHS and epoch - last >= PATIENCE:
            break
    return best, last
