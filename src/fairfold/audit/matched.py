"""How well scores find a history: against items as popular as its own, and among all.

Popularity alone finds much of anybody's history, so only a comparison with *equally popular* items says what a word
tells of a person. Items that a person has and another one has not are compared with equally popular ones that the other
has and the person has not. So an order of items that comes from neither of the two, whatever it is, finds the
histories of both equally well: a half, in the mean. Items of the catalogue would not do. Of two that as many have, one
that people with short histories have is more often somebody's, and an order by that would seem to find histories.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.data import Interactions

ALIKE = 0.1
"""How far, as a share, the popularity of two items may be apart for them to be called equal."""

MOST = 256
"""Items of a history that are compared with those of another."""

Pairs = tuple[Tensor, Tensor]
"""Items of a user, and for each of them an equal of somebody else's."""

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


def matched_items(train: Interactions, user: int, others: list[int], source: torch.Generator) -> list[Pairs]:
    """All pairs of a user's items with equals of each of some others; items that both have are left out.

    Of long histories some items are drawn.
    """
    mine, popularity, found = train.of(user), train.counts_by_item, list[Pairs]()
    for other in others:
        theirs = train.of(other)
        own = _some(mine[~torch.isin(mine, theirs)], source)
        equals = _some(theirs[~torch.isin(theirs, mine)], source)
        # Each is had by one of the two: without them both are as popular as they are with them.
        many, as_many = popularity[own][:, None].double(), popularity[equals].double()
        first, second = ((many - as_many).abs() <= ALIKE * torch.maximum(many, as_many)).nonzero().T
        found.append((own[first], equals[second]))
    return found


def _some(items: Tensor, source: torch.Generator) -> Tensor:
    return items if len(items) <= MOST else items[torch.randperm(len(items), generator=source)[:MOST]]


def matched_auc(scores: Tensor, pairs: list[Pairs]) -> float:
    """The chance that an item of a history scores above its equal: a half where scores say nothing, NaN of no items."""
    found = [_above(scores[mine], scores[equals]) for mine, equals in pairs if len(mine)]
    return sum(found) / len(found) if found else float("nan")


def _above(ahead: Tensor, behind: Tensor) -> float:
    return float(((ahead > behind).double() + 0.5 * (ahead == behind)).mean())


def precision(scores: Tensor, mine: Tensor, source: torch.Generator) -> float:
    """The share of a history among as many first items of all; equal scores in an order by chance."""
    order = torch.randperm(len(scores), generator=source)
    first = order[scores[order].argsort(descending=True, stable=True)[: len(mine)]]
    return float(torch.isin(first, mine).double().mean())
