"""Random generators with a seed per purpose, and uniform sampling of negative items."""

import numpy
import torch
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData, InvalidSettings


def generator(*seeds: int) -> torch.Generator:
    """Make a CPU generator from non-negative seeds, mixed so that (0, 1) and (1, 0) give unrelated streams."""
    if min(seeds, default=0) < 0:
        raise InvalidSettings(f"seeds {list(seeds)}", "0 or more", "Choose a seed that is not negative.")
    state = numpy.random.SeedSequence(seeds).generate_state(1, numpy.uint32)  # torch's generator uses 32 bits
    return torch.Generator().manual_seed(int(state[0]))


def numpy_generator(*seeds: int) -> numpy.random.Generator:
    """Make a numpy generator from several seeds, with the same numbers on every machine."""
    return numpy.random.Generator(numpy.random.Philox(numpy.random.SeedSequence(list(seeds))))


class NegativeSampler:
    """Draws items outside a user's training set uniformly, without rejection.

    A user with c items of n has n - c others; one is drawn by its rank r among them. Of the user's items p_0 < p_1 < …,
    item p_j has p_j - j non-items below it, so the non-item of rank r lies above exactly those j with p_j - j ≤ r: it
    is r plus their number, which one binary search finds. Draws have 53 random bits: a rank's probability is off by
    less than 1 part in 10^10 for catalogs of a million items.
    """

    def __init__(self, train: Interactions) -> None:
        full = (train.counts_by_user >= train.num_items).nonzero().flatten()
        if len(full):
            given = f"{len(full)} users with all {train.num_items} items, the first of them user {int(full[0])}"
            remedy = "Leave these users out, or give the size of the whole catalog."
            raise InvalidData(given, "at least one item outside each user's training set", remedy)
        self.train = train
        self._non_items_below = non_items_below(train)

    def draw(self, users: Tensor, source: torch.Generator) -> Tensor:
        """Draw one negative for every entry of ``users``, a tensor of any shape."""
        chance = torch.empty(users.shape, dtype=torch.float64).uniform_(generator=source)
        return negatives_at(self.train, self._non_items_below, users, chance)

    def of_user(self, user: int, chance: Tensor) -> Tensor:
        """Negatives of one user, one for each number of ``chance`` in [0, 1)."""
        return negatives_at(self.train, self._non_items_below, torch.tensor(user), chance)


def non_items_below(train: Interactions) -> Tensor:
    """Number of its user's non-items below each item, plus ``num_items`` for every user before; ascends."""
    position = torch.arange(len(train), device=train.items.device) - train.offsets[train.users]
    return train.users * train.num_items + (train.items - position)


def negatives_at(train: Interactions, below: Tensor, users: Tensor, chance: Tensor) -> Tensor:
    """Map numbers in [0, 1) to negatives of the users; ``below`` is the result of :func:`non_items_below`."""
    others = train.num_items - (train.offsets[users + 1] - train.offsets[users])
    rank = torch.minimum((chance * others).long(), others - 1)
    found = torch.searchsorted(below, users * train.num_items + rank, right=True)
    return rank + found - train.offsets[users]
