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
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fairfold.federation.aggregation import CombinesRobustly, RobustRule
from fairfold.federation.algorithm import Algorithm, mean_change
from fairfold.federation.updates import Aggregate, ClientTask, Update
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.config import Settings

COMPARED = 16  # updates of a size that are kept until they can be compared with one another
FEWEST = 3  # updates of a size that can be compared with one another
MODEL = "model"  # name of the norm of all vectors of the model together


class Compared(NamedTuple):
    """An update that waits for others to be compared with, and the most users that it may be of."""

    task: ClientTask
    update: Update
    users: int


class RobustAggregate(Aggregate):
    """The updates of a round, kept one by one, and combined by a rule for every size.

    A size of which there are too few to compare has changes of at most the median norm of all updates.
    """

    def __init__(self, settings: "Settings", rule: RobustRule) -> None:
        super().__init__()
        self.rule, self._bounds = rule, Bounds(settings)
        self.kept: dict[tuple[int, int], list[Compared]] = {}

    def add(self, task: ClientTask, update: Update, *, alone: bool = False, users: int = 1) -> None:
        """Keep an update until all are combined; one without weight has no part in a mean, whatever its numbers."""
        if alone:
            super().add(task, update, alone=True)
        elif update.weight:
            one = Compared(task, update.dense(), users)
            self._bounds.see(one)
            self.kept.setdefault((task.size, task.round_number), []).append(one)

    def __len__(self) -> int:
        return super().__len__() + len(self.kept)

    @property
    def weight(self) -> float:
        """Total weight of all updates."""
        return super().weight + sum(update.weight for _, update in self.updates())

    def parts(self) -> Iterator[tuple[ClientTask, Update]]:
        """Every task with the updates to it: their weight, times their changes as the rule combines them."""
        yield from super().parts()
        for of_size in self.kept.values():
            few = len(of_size) < FEWEST
            updates = [self._bounds.held(one, 1.0 if few else float("inf")) for one in of_size]
            yield of_size[0].task, combine(self.rule, updates)

    def updates(self) -> Iterable[tuple[ClientTask, Update]]:
        """Every update with its task."""
        return ((one.task, one.update) for of_size in self.kept.values() for one in of_size)


class BoundedAggregate(Aggregate):
    """Sums of changes whose norms are held below a multiple of the median of those that have come, for every size.

    That is what a server does with updates of devices where nothing else is asked for: it leaves honest changes as they
    are, keeps no more than the first few updates of a size, and no change at the bound of all numbers gets through.
    """

    def __init__(self, settings: "Settings") -> None:
        super().__init__()
        self._bounds = Bounds(settings)
        self._waiting: dict[int, list[Compared]] = {}

    def add(self, task: ClientTask, update: Update, *, alone: bool = False, users: int = 1) -> None:
        """Add an update, bounded; the first ones wait until there are enough to compare.

        One without weight has no part in a mean, and its numbers would have no bound.
        """
        if not update.weight:
            return
        if alone:
            super().add(task, update, alone=True)
            return
        one = Compared(task, update, users)
        waiting = self._waiting.setdefault(task.size, [])
        if self._bounds.see(one) <= COMPARED:
            waiting.append(one)
        else:
            self._flush(task.size)
            super().add(task, self._bounds.held(one))

    def _flush(self, size: int) -> None:
        for one in self._waiting.pop(size, []):
            super().add(one.task, self._bounds.held(one))

    @property
    def weight(self) -> float:
        """Total weight of all updates."""
        return super().weight + sum(one.update.weight for of in self._waiting.values() for one in of)

    def parts(self) -> Iterable[tuple[ClientTask, Update]]:
        """Every task with the sum of the updates to it."""
        for size in list(self._waiting):
            self._flush(size)
        return super().parts()


class Bounds:
    """The norms and weights of updates that have come, which bound those of each."""

    def __init__(self, settings: "Settings") -> None:
        self.algorithm: Algorithm = settings.algorithm
        bounds = CombinesRobustly.of(self.algorithm)
        self.times = bounds.groups_times_median if settings.fleet.secure_groups > 1 else bounds.times_median
        self.bounds_weights = bounds.weighs_samples
        self.norms: dict[int, list[dict[str, float]]] = {}  # by size, of each update
        self.weights = list[float]()  # of a user

    def see(self, one: Compared) -> int:
        """Note an update; how many of its size have come."""
        norms = self.norms.setdefault(one.task.size, [])
        norms.append({name: norm for name, (norm, _) in self._measured(one).items()})
        self.weights.append(one.update.weight / one.users)
        return len(norms)

    def held(self, one: Compared, times: float | None = None) -> Update:
        """An update with at most a multiple of the median norm, and of the median weight of a user.

        A device chooses its size: of one that hardly anybody else has, the norms of all sizes are the measure.
        """
        sums, weight = dict(one.update.sums), one.update.weight
        if len(norms := self.norms[one.task.size]) < FEWEST:
            norms = [norm for of in self.norms.values() for norm in of]
        sent = one.task.vectors if self.algorithm.sends_weights else {}
        for name, (norm, changes) in self._measured(one).items():
            bound = (self.times if times is None else times) * median(of[name] for of in norms if name in of)
            if norm > bound:
                scaled = {part: change * (bound / norm) for part, change in changes.items()}
                sums |= {part: (change + sent.get(part, 0.0)) * weight for part, change in scaled.items()}
        most = self.times * median(self.weights) * one.users
        if self.bounds_weights and weight > most:
            return Update({name: total * (most / weight) for name, total in sums.items()}, most)
        return Update(sums, weight)

    def _measured(self, one: Compared) -> dict[str, tuple[float, Weights]]:
        """Norms of changes: of all vectors of the model together, and of every other sum, which has other units."""
        changes = self._changes(one)
        model = {name: change for name, change in changes.items() if name in one.task.vectors}
        others = {name: {name: change} for name, change in changes.items() if name not in model}
        groups = ({MODEL: model} if model else {}) | others
        return {
            name: (float(sum(float(change.square().sum()) for change in of.values()) ** 0.5), of)
            for name, of in groups.items()
        }

    def _changes(self, one: Compared) -> Weights:
        sums, weight = one.update.dense().sums.items(), one.update.weight
        return {name: mean_change(self.algorithm, one.task, name, vector, weight) for name, vector in sums}


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
