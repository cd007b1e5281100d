"""Metrics of predicted ratings and classes, and central baselines of ratings: means, biases, and factors by SGD."""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.data.partition import hold_out
from fairfold.data.sampling import generator
from fairfold.errors import InvalidData, InvalidVector

Predictor = Callable[[Tensor, Tensor], Tensor]

BATCH_PAIRS = 1 << 18  # pairs predicted at a time
FACTORS, PENALTIES = (8, 32), (0.03, 0.05, 0.08, 0.12)
LEARNING_RATE, DECAY, SPREAD = 0.03, 0.95, 0.1  # decay per epoch; standard deviation of initial vectors
# Early stopping: the first epochs learn the biases, and the error may rest before it falls by the tastes
MAX_EPOCHS, MIN_EPOCHS, PATIENCE = 60, 15, 3
HELD_OUT = 0.1
MAX_RATINGS = 1 << 20  # ratings used for tuning at most: of more, a part of every user's
DAMPING = 10.0  # imagined ratings that draw a bias to 0; tuned on held-out ratings of Goodreads
SWEEPS = 20  # alternations in which both biases are fitted


def evaluate_ratings(predict: Predictor, test: Interactions) -> float:
    """The mean squared error over all test ratings (not over users); see :func:`rating_errors`."""
    return float(rating_errors(predict, test).mean())


def rating_errors(predict: Predictor, test: Interactions) -> Tensor:
    """The squared errors of all test ratings; ``predict`` takes users and items of one length (int64, on the CPU)."""
    if test.ratings is None:
        raise InvalidData("implicit test interactions", "ratings", "Prepare the data with ratings kept.")
    if not len(test):
        raise InvalidData("no test ratings", "at least one", "Check how the data was split.")
    errors = torch.empty(len(test), dtype=torch.float64)
    for start in range(0, len(test), BATCH_PAIRS):
        part = slice(start, start + BATCH_PAIRS)
        errors[part] = _squared_errors(predict(test.users[part], test.items[part]), test.ratings[part])
    return errors


def error_shares(squares: Tensor, users: Tensor) -> Tensor:
    """What each user adds to the mean of squared errors, of all users with any, so that their mean is that mean."""
    sums, counts = torch.bincount(users, weights=squares.double()), torch.bincount(users)
    shares: Tensor = sums[counts > 0] * (int((counts > 0).sum()) / max(len(squares), 1))
    return shares


def _squared_errors(predicted: Tensor, given: Tensor) -> Tensor:
    if predicted.shape != given.shape:
        needed = f"{list(given.shape)}, one for each rating"
        raise InvalidVector(f"predictions of shape {list(predicted.shape)}", needed, "Return one number per pair.")
    errors = (predicted.detach().cpu().double() - given.cpu().double()).square()
    if bool(errors.isnan().any()):
        raise InvalidVector("predictions with NaN", "numbers", "Check the model: training may have diverged.")
    return errors


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of rows whose largest logit is that of the label; of equal logits the lowest class counts."""
    return float(correct_predictions(logits, labels).double().mean())


def correct_predictions(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest logit of each row is that of its label."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        given = f"logits of shape {list(logits.shape)}, labels of shape {list(labels.shape)}"
        needed = "[samples, classes] and [samples], at least one sample"
        raise InvalidVector(given, needed, "Give one row of logits per label.")
    if bool(logits.isnan().any()):
        raise InvalidVector("logits with NaN", "numbers", "Check the model: training may have diverged.")
    # argmax does not promise which of several equal logits it takes; the first row maximum does.
    largest = logits == logits.max(1, keepdim=True).values
    return largest.int().argmax(1) == labels.to(logits.device)


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
