"""From a model to scores of the whole catalogue, in bounded memory, and to predicted ratings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairfold.errors import InvalidSettings
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor

# Pairs of user and item scored at a time: a model holds a few dozen floats for each of them. On a CPU scores and what
# is added to them stay in its cache; a GPU would rather be asked less often.
BLOCK_PAIRS, TIMES_ON_GPU = 1 << 18, 4


def scorer(model: nn.Module) -> Scorer:
    """A function from user ids to their scores of all items, for evaluation and recommendation.

    The model, which has ``num_items`` and ``score_block`` as all recommenders here, is put into evaluation mode for the
    length of a call. Scores are computed for a block of items at a time and left on the model's device.
    """
    if not hasattr(model, "score_block"):
        raise InvalidSettings(
            f"{type(model).__name__}, which cannot rank a catalogue", "a model with score_block(users, items)",
            "Use MF or NeuMF, or give your model this method.",
        )  # fmt: skip
    ranker: Any = model

    def score(users: Tensor) -> Tensor:
        with _evaluating(model) as device:
            users = users.to(device)
            pairs = BLOCK_PAIRS if users.is_cpu else BLOCK_PAIRS * TIMES_ON_GPU
            step = max(1, pairs // max(1, len(users)))
            scores = torch.empty(len(users), ranker.num_items, device=device)
            for start in range(0, ranker.num_items, step):
                items = torch.arange(start, min(start + step, ranker.num_items), device=device)
                scores[:, start : start + step] = ranker.score_block(users, items)
            return scores

    return score


def predictor(model: nn.Module) -> Predictor:
    """A function from users and items to the model's ratings, without gradients and in evaluation mode."""

    def predict(users: Tensor, items: Tensor) -> Tensor:
        with _evaluating(model) as device:
            ratings: Tensor = model(users.to(device), items.to(device))
            return ratings

    return predict


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[torch.device]:
    """No gradients, evaluation mode for the length of a block; gives the model's device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)
