"""Popularity: the same list for everyone, and the floor every model has to clear."""

from torch import Tensor

from fairfold.data.interactions import Interactions


class Popularity:
    """Scores an item by how many users of the training set have it."""

    name = "popularity"

    def __init__(self, train: Interactions) -> None:
        self._scores = train.counts_by_item.float()

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        return self._scores.expand(len(users), -1)
