"""Recommendations on a device by the model that it stores, in plain Python; nothing is sent, and nothing is stored."""

from collections.abc import Mapping
from heapq import nsmallest
from pathlib import Path
from typing import Any

from fairfold.device import encoding, gradient, ratings
from fairfold.device.requests import NeedsWorker
from fairfold.device.store import DeviceStore
from fairfold.device.stored_model import LEADING, StoredModel
from fairfold.errors import InvalidState


def recommend(
    folder: Path, model: StoredModel, user: str, history: Mapping[int, Any], top: int
) -> list[tuple[int, float | None]]:
    """The best items outside a user's history by their numbers in the catalogue, with their scores.

    Raises :class:`NeedsWorker` for a model that torch alone scores.
    """
    if model.kind == "co_occurrence":
        encoded = encoding.kept_sum(folder, model, user, model.ranks(list(history)))
        return model.recommend(list(history), top, encoded)
    state, settings = DeviceStore(folder).load(), model.metadata["settings"]
    if state.numbering and LEADING not in model.tensors:
        needed = "the order in which the run numbers items"
        raise InvalidState("a model too small to list its items", needed, "Enrol with more --capacity.")
    leading = model.tensors.get(LEADING, ())
    named = set(leading)
    order = [*leading, *(item for item in range(model.items) if item not in named)]
    rank = {item: place for place, item in enumerate(order)}
    own = dict(sorted((rank[item], rating) for item, rating in history.items()))
    vectors = gradient.stored_vectors(state, user)
    if ratings.can_train(settings):
        scores = ratings.scores(model, own)
    elif gradient.can_train({}, settings) and vectors:
        scores = gradient.scores(model, vectors)
    else:
        raise NeedsWorker(model.kind)
    best = nsmallest(top, ((-score, item) for item, score in enumerate(scores) if item not in own))
    return [(order[item], -score) for score, item in best]
