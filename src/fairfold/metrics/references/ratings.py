"""Reference predictions of ratings: means and biases."""

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData

SWEEPS = 20


class Means:
    """Global mean, plus what users or items add to it: prediction = mean + user's bias + item's bias.

    A bias is the mean of what is left over, drawn to 0 by ``damping`` imagined ratings without any: without
    damping, one user's bias alone is the user's mean, one item's alone the item's mean; what has no ratings
    has bias 0. With both, they are fitted in turn until they settle.
    """

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
        """Predicted ratings of pairs."""
        return (self._mean + self._users[users] + self._items[items]).float()


def _damped_means(values: Tensor, owners: Tensor, counts: Tensor, damping: float) -> Tensor:
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, owners, values)
    return sums / (counts + damping).clamp(min=1)
