"""What a model recommends and what was held out, in the tables that other programs evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import torch

from fairfold.fitting.suggest import Best, pandas
from fairfold.runs.opened import item_name

if TYPE_CHECKING:
    from fairfold.data import Dataset


def as_run(data: Dataset, whole: tuple[bool, bool], users: list[int], best: Best) -> Any:
    """A row per user and item, best first."""
    rows, ranks = (best.items >= 0).nonzero(as_tuple=True)
    return pandas().DataFrame({
        "user_id": _users(torch.tensor(users)[rows], data, whole[0]),
        "item_id": _items(best.items[rows, ranks], data, whole[1]),
        "rank": ranks.numpy() + 1,
        "score": best.scores[rows, ranks].numpy(),
    })  # fmt: skip


def as_qrels(data: Dataset, whole: tuple[bool, bool]) -> Any:
    """A row per user and item that was held out."""
    test = data.test
    return pandas().DataFrame({
        "user_id": _users(test.users, data, whole[0]),
        "item_id": _items(test.items, data, whole[1]),
        "rating": numpy.ones(len(test)) if test.ratings is None else test.ratings.numpy(),
    })  # fmt: skip


def _users(numbers: torch.Tensor, data: Dataset, whole: bool) -> Any:
    words = numbers.tolist() if data.user_ids is None else [data.user_ids[user] for user in numbers.tolist()]
    return numpy.array(words, dtype=numpy.int64 if whole else object)


def _items(numbers: torch.Tensor, data: Dataset, whole: bool) -> Any:
    names = {item: item_name(item, data).removeprefix("#" if whole else "") for item in set(numbers.tolist())}
    return numpy.array([names[item] for item in numbers.tolist()], dtype=numpy.int64 if whole else object)
