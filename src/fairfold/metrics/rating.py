"""Metrics of predicted ratings (squared error) and of predicted classes (accuracy)."""

from collections.abc import Callable

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData, InvalidVector

Predictor = Callable[[Tensor, Tensor], Tensor]

BATCH_PAIRS = 1 << 18  # pairs predicted at a time


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
