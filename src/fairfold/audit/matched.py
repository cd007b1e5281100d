"""How well scores find a history: against items as popular as its own, and among all.

Popularity alone finds much of anybody's history, so only a comparison with *equally popular* items says what a word
tells of a person. Each item of a history is paired with one that the user does not have, and that as many others do.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.data import Interactions

NEAR = 4
"""Items on either side in the order of popularity among which the one to compare with is drawn."""

ALIKE = 0.1
"""How far, as a share, the popularity of two items may be apart for them to be called equal."""

DRAWS = 2_000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Figure:
    """A mean over targets with its 95 % interval: the bootstrap's, over targets."""

    value: float
    low: float
    high: float
    many: int

    @classmethod
    def of(cls, values: list[float], seed: int = 0) -> "Figure":
        """Of a value for each target; those of whom nothing could be measured are left out."""
        found = torch.tensor([value for value in values if value == value], dtype=torch.float64)
        if not len(found):
            return cls(float("nan"), float("nan"), float("nan"), 0)
        source = torch.Generator().manual_seed(seed)
        means = found[torch.randint(len(found), (DRAWS, len(found)), generator=source)].mean(1)
        low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return cls(float(found.mean()), low, high, len(found))


def matched_items(train: Interactions, user: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Those of a user's items that have equals, and for each an item that as many others have, and the user has not."""
    mine = train.of(user)
    popularity = train.counts_by_item.clone()
    popularity[mine] -= 1  # what others have: the user's own share would tell
    others = torch.ones(train.num_items, dtype=torch.bool)
    others[mine] = False
    others = others.nonzero().flatten()
    if not len(others):
        return mine[:0], mine[:0]
    # By chance among equals: the numbers of items may go by popularity, in which the user took part.
    chance = torch.rand(train.num_items, generator=source, dtype=torch.float64)
    keys = popularity + chance
    ordered, order = keys[others].sort()
    place = torch.searchsorted(ordered, keys[mine])
    step = torch.randint(NEAR, (len(mine),), generator=source)
    above = torch.randint(2, (len(mine),), generator=source).bool()
    chosen = torch.where(above, place + step, place - 1 - step).clamp(0, len(others) - 1)
    equals = others[order[chosen]]
    off = (popularity[mine] - popularity[equals]).abs()
    alike = off <= (ALIKE * popularity[mine]).clamp(min=1)  # what has no equal says nothing
    return mine[alike], equals[alike]


def matched_auc(scores: Tensor, mine: Tensor, equals: Tensor) -> float:
    """The chance that an item of a history scores above its equal: a half where scores say nothing, NaN of no items."""
    ahead, behind = scores[mine], scores[equals]
    return float(((ahead > behind).double() + 0.5 * (ahead == behind)).mean())


def precision(scores: Tensor, mine: Tensor, source: torch.Generator) -> float:
    """The share of a history among as many first items of all; equal scores in an order by chance."""
    order = torch.randperm(len(scores), generator=source)
    first = order[scores[order].argsort(descending=True, stable=True)[: len(mine)]]
    return float(torch.isin(first, mine).double().mean())
