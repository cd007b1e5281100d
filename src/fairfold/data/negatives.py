"""Negatives: items a user did not interact with, drawn uniformly and without rejection."""

import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData


class NegativeSampler:
    """Draws items outside a user's training set, each with the same chance.

    A user with c items of n has n - c others; one of these is drawn by its rank r among them. Of the user's
    items p_0 < p_1 < …, item p_j has p_j - j non-items below it, so the non-item of rank r lies above exactly
    those j with p_j - j ≤ r: it is r plus their number, which one binary search finds. Nothing is drawn twice
    or thrown away, and a positive cannot come out. A draw's number of [0, 1) has 53 random bits: a rank's chance
    is off by less than 1 part in 10^10 for catalogues of a million items.
    """

    def __init__(self, train: Interactions) -> None:
        full = (train.counts_by_user >= train.num_items).nonzero().flatten()
        if len(full):
            raise InvalidData(
                f"{len(full)} users with all {train.num_items} items, the first of them user {int(full[0])}",
                "at least one item outside each user's training set",
                "Leave these users out, or give the size of the whole catalogue.",
            )
        self.train = train
        self._non_items_below = non_items_below(train)

    def draw(self, users: Tensor, source: torch.Generator) -> Tensor:
        """One negative for every entry of ``users``, a tensor of any shape."""
        chance = torch.empty(users.shape, dtype=torch.float64).uniform_(generator=source)
        return chosen(self.train, self._non_items_below, users, chance)

    def of_user(self, user: int, chance: Tensor) -> Tensor:
        """Negatives of one user, one for each number of [0, 1)."""
        return chosen(self.train, self._non_items_below, torch.tensor(user), chance)


def non_items_below(train: Interactions) -> Tensor:
    """How many of its user's non-items lie below each item, plus ``num_items`` for every user before.

    Ascending over all users, since an item has less than ``num_items`` non-items below it.
    """
    position = torch.arange(len(train), device=train.items.device) - train.offsets[train.users]
    return train.users * train.num_items + (train.items - position)


def chosen(train: Interactions, below: Tensor, users: Tensor, chance: Tensor) -> Tensor:
    """The negative of each user that a number of [0, 1) stands for; ``below`` as :func:`non_items_below` gives it."""
    others = train.num_items - (train.offsets[users + 1] - train.offsets[users])
    rank = torch.minimum((chance * others).long(), others - 1)
    found = torch.searchsorted(below, users * train.num_items + rank, right=True)
    return rank + found - train.offsets[users]
