"""The catalogue numbered so that items which share a row are alike.

Which rows the hash folds together is fixed; which *items* stand there is a matter of numbering, and costs a device
nothing. Items that the same devices own can change places among themselves: there they are ordered by their mean
rating, along the rows that they share where they are not owned. The means come from two sums over devices before the
first round, beside the counts that rank the items by popularity: what a rating is above its user's mean.
"""

from itertools import pairwise

import torch
from torch import Tensor

from fairfold.data import Dataset, Interactions
from fairfold.federation.least_squares import rows_of, subspace_of
from fairfold.federation.settings import Settings
from fairfold.federation.task import Task
from fairfold.simulate.federation import Federation
from fairfold.subspace.nesting import require_nested


def numbered_alike(data: Dataset, settings: Settings) -> Dataset:
    """The data set with its items renumbered for a federation of these settings."""
    return data.renumbered(places(data.train, settings, Federation.of(settings, Task(data, settings))))


def places(train: Interactions, settings: Settings, federation: Federation) -> Tensor:
    """The new number of every item."""
    (name,) = federation.task.tables
    held = [held.projections for held in federation.assignments(0) if held.projections is not None]
    chain = require_nested(subspace_of(projections[name]) for projections in held)
    place = torch.arange(train.num_items)
    means = mean_ratings(train, settings.damping)
    cuts = sorted({0, train.num_items, *(subspace.head // settings.factors for subspace in chain)})
    for start, stop in pairwise(cuts):
        here = torch.arange(start, stop)
        row = rows_of(chain[0], here, settings.factors)  # equal tails: what the smallest size folds, all fold alike
        place[here[means[here].argsort(stable=True)]] = here[row.argsort(stable=True)]
    return place


def mean_ratings(train: Interactions, damping: float) -> Tensor:
    """What an item's ratings are above their users' means, drawn to 0 by ``damping`` imagined ratings."""
    assert train.ratings is not None
    ratings, counts = train.ratings.double(), train.counts_by_user
    means = torch.zeros(train.num_users, dtype=torch.float64).index_add_(0, train.users, ratings) / counts.clamp(min=1)
    sums = torch.zeros(train.num_items, dtype=torch.float64).index_add_(0, train.items, ratings - means[train.users])
    return sums / (train.counts_by_item + damping)
