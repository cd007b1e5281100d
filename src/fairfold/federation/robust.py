"""Robust aggregation: the mean of local models' changes, whatever a few hostile clients send (Byzantine robustness).

The rules are the field's. *clipped*: changes are scaled to the median of their norms at most. *trimmed*: of every
number the largest and the smallest are left out (Yin et al. 2018). *median*: the median of every number (FedMedian).
*multi-krum*: the changes that lie nearest to others are averaged (Blanchard et al. 2017). They look at single updates:
the server keeps those of a round, and secure aggregation excludes them. Clients of each size are combined apart.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.federation.aggregation import CombinesRobustly, RobustRule
from fairfold.federation.algorithm import Algorithm, mean_change
from fairfold.federation.updates import Aggregate, ClientTask, Update
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.config import Settings

COMPARED = 16  # updates of a size that are kept until they can be compared with one another
FEWEST = 3  # updates that can be compared with one another; fewer are clipped together with nothing


class RobustAggregate(Aggregate):
    """The updates of a round, kept one by one, and combined by a rule for every size."""

    def __init__(self, rule: RobustRule) -> None:
        super().__init__()
        self.rule = rule
        self.kept: dict[tuple[int, int], tuple[ClientTask, list[Update]]] = {}

    def add(self, task: ClientTask, update: Update, *, alone: bool = False) -> None:
        """Keep an update until all are combined; one without weight has no part in a mean, whatever its numbers."""
        if alone:
            super().add(task, update, alone=True)
        elif update.weight:
            self.kept.setdefault((task.size, task.round_number), (task, []))[1].append(update.dense())

    def __len__(self) -> int:
        return super().__len__() + len(self.kept)

    @property
    def weight(self) -> float:
        """Total weight of all updates."""
        return super().weight + sum(update.weight for _, updates in self.kept.values() for update in updates)

    def parts(self) -> Iterator[tuple[ClientTask, Update]]:
        """Every task with the updates to it: their weight, times their changes as the rule combines them."""
        yield from super().parts()
        for task, updates in self.kept.values():
            yield task, combine(self.rule, updates)

    def updates(self) -> Iterable[tuple[ClientTask, Update]]:
        """Every update with its task."""
        return ((task, update) for task, updates in self.kept.values() for update in updates)


class BoundedAggregate(Aggregate):
    """Sums of changes whose norms are held below a multiple of the median of those that have come, for every size.

    That is what a server does with updates of devices where nothing else is asked for: it leaves honest changes as they
    are, keeps no more than the first few updates of a size, and no change at the bound of all numbers gets through.
    """

    def __init__(self, settings: "Settings") -> None:
        super().__init__()
        self.algorithm: Algorithm = settings.algorithm
        bounds = CombinesRobustly.of(self.algorithm)
        self.times = bounds.groups_times_median if settings.fleet.secure_groups > 1 else bounds.times_median
        self._norms: dict[int, list[float]] = {}
        self._waiting: dict[int, list[tuple[ClientTask, Update]]] = {}

    def add(self, task: ClientTask, update: Update, *, alone: bool = False) -> None:
        """Add an update, bounded; the first ones wait until there are enough to compare.

        One without weight has no part in a mean, and its numbers would have no bound.
        """
        if not update.weight:
            return
        if alone:
            super().add(task, update, alone=True)
            return
        norms = self._norms.setdefault(task.size, [])
        norms.append(sum(float(change.square().sum()) for change in self._changes(task, update).values()) ** 0.5)
        waiting = self._waiting.setdefault(task.size, [])
        if len(norms) <= COMPARED:
            waiting.append((task, update))
        else:
            self._flush(task.size)
            self._add_bounded(task, update, norms[-1])

    def _changes(self, task: ClientTask, update: Update) -> Weights:
        sums = update.dense().sums.items()
        return {name: mean_change(self.algorithm, task, name, vector, update.weight) for name, vector in sums}

    def _add_bounded(self, task: ClientTask, update: Update, norm: float) -> None:
        bound = self.times * median(self._norms[task.size])
        if norm > bound:
            sent = task.vectors if self.algorithm.sends_weights else {}
            scaled = {name: change * (bound / norm) for name, change in self._changes(task, update).items()}
            sums = {name: (change + sent.get(name, 0.0)) * update.weight for name, change in scaled.items()}
            update = Update(sums, update.weight)
        super().add(task, update)

    def _flush(self, size: int) -> None:
        norms, waiting = self._norms[size], self._waiting.pop(size, [])
        for (task, update), norm in zip(waiting, norms, strict=False):
            self._add_bounded(task, update, norm)

    @property
    def weight(self) -> float:
        """Total weight of all updates."""
        return super().weight + sum(update.weight for of in self._waiting.values() for _, update in of)

    def parts(self) -> Iterable[tuple[ClientTask, Update]]:
        """Every task with the sum of the updates to it."""
        for size in list(self._waiting):
            self._flush(size)
        return super().parts()


def hostile_groups(groups: int) -> int:
    """How many of some groups of clients, three or more, a combination holds: fewer than a third; of three one."""
    return max(1, (groups - 1) // 3)


def winsorized_sum(values: Tensor) -> Tensor:
    """The sum over rows, three or more, each number held between the smallest and largest of rows that may be honest.

    Where h rows may be hostile, these are the (h + 1)-th smallest and the (h + 1)-th largest of all.
    """
    ordered, hostile = values.sort(dim=0).values, hostile_groups(len(values))
    return values.clamp(min=ordered[hostile], max=ordered[-1 - hostile]).sum(0)


def combined_statistics(settings: "Settings", groups: Sequence[Update]) -> Update:
    """The statistics of some groups of clients together, three or more: of numbers of an item the Winsorized sum."""
    kinds, total = settings.algorithm.statistics(settings), reduce(add, groups)
    by_item = [name for name in total.sums if kinds[name].per_item]
    return Update(
        total.sums | {name: winsorized_sum(torch.stack([of.sums[name] for of in groups])) for name in by_item},
        total.weight,
    )


def combine(rule: RobustRule, updates: list[Update]) -> Update:
    """One update in place of several, all with a weight: their weight, and the change that a rule makes of theirs."""
    lengths = {name: len(vector) for name, vector in updates[0].sums.items()}
    changes = torch.stack([torch.cat([update.sums[name] for name in lengths]) / update.weight for update in updates])
    weights = changes.new_tensor([update.weight for update in updates])
    mean = _RULES[rule.kind](changes, weights, rule.num_hostile(len(updates)))
    total = sum(update.weight for update in updates)
    parts = torch.split(mean * total, list(lengths.values()))
    return Update(dict(zip(lengths, parts, strict=True)), total)


def clipped_mean(changes: Tensor, weights: Tensor, _hostile: int) -> Tensor:
    """The weighted mean of changes whose norms are held below their median."""
    norms = changes.norm(dim=1)
    scales = (norms.quantile(0.5) / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    mean: Tensor = (weights * scales / weights.sum()) @ changes
    return mean


def trimmed_mean(changes: Tensor, _weights: Tensor, hostile: int) -> Tensor:
    """The mean of every number without its largest and smallest values, so many on each side."""
    ordered = changes.sort(dim=0).values
    return ordered[hostile : len(ordered) - hostile].mean(0)


def coordinate_median(changes: Tensor, _weights: Tensor, _hostile: int) -> Tensor:
    """The median of every number."""
    ordered, middle = changes.sort(dim=0).values, (len(changes) - 1) // 2
    return (ordered[middle] + ordered[len(changes) // 2]) / 2


def multi_krum(changes: Tensor, weights: Tensor, hostile: int) -> Tensor:
    """The weighted mean of the changes with the smallest sums of squared distances to their nearest others."""
    count = len(changes)
    if count < FEWEST:
        return clipped_mean(changes, weights, hostile)
    squares = torch.cdist(changes, changes).square()
    nearest = squares.sort(dim=1).values[:, 1 : max(count - hostile - 1, 2)]
    chosen = nearest.sum(1).argsort(stable=True)[: count - hostile]
    mean: Tensor = (weights[chosen] / weights[chosen].sum()) @ changes[chosen]
    return mean


_RULES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "clipped": clipped_mean,
    "trimmed": trimmed_mean,
    "median": coordinate_median,
    "multi-krum": multi_krum,
}
