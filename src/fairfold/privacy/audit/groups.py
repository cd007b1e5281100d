"""Promotion under masks where devices have secure sums by groups: some of them send numbers of their choice.

Each is in a group of its own, and says what a sum of its group may hold (``federation.bounds``): that all users of the
group have the target beside some popular items, and in the statistics, and it may take away what others of its group
say. The server combines the groups' sums as in a run.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import (
    SUM,
    CoOccurrenceUpload,
    model_of,
    triangle_size,
)
from fairfold.algorithms.cooccurrence.groups import combined
from fairfold.config import Settings
from fairfold.data import Dataset, Interactions
from fairfold.federation.algorithm import COUNTS
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import secure_groups
from fairfold.federation.robust import combined_statistics
from fairfold.federation.updates import PublicStatistics, State
from fairfold.privacy.audit.fleet import shares_of_items

BESIDE = (16, 64, 1 << 20)  # popular items with which all users of the group are said to have the target


class Attack(NamedTuple):
    """What a hostile device says for all users of its group, or takes from what its group says."""

    counted: bool  # that they have the target, in the statistics
    itself: bool  # the same, in the co-occurrences
    alone: bool  # that they have no other pairs
    beside: int  # popular items that they have with it; 0 for no attack

    def description(self) -> str:
        """In words."""
        parts = [f"beside {'all' if self.beside > max(BESIDE[:-1]) else self.beside} items"]
        parts += (
            ["in statistics"] * self.counted + ["of the item itself"] * self.itself + ["and nothing else"] * self.alone
        )
        return ", ".join(parts)


NOTHING = Attack(False, False, False, 0)


def promotion_in_groups(
    settings: Settings, train: Interactions, targets: list[int], hostile: int = 1
) -> tuple[float, Attack]:
    """The share of honest users who get a promoted item, a mean over targets; and the best attack of hostile devices.

    Each of them joins a group of its own: those of the first users.
    """
    best = (0.0, NOTHING)
    for attack in map(Attack._make, product((False, True), (False, True), (False, True), BESIDE)):
        best = max(best, (share_of_attack(settings, train, targets, attack, hostile), attack))
    return best


def share_of_attack(
    settings: Settings, train: Interactions, targets: list[int], attack: Attack, hostile: int = 1
) -> float:
    """The share of honest users who get a promoted item, by one attack: a mean over targets."""
    shares = list[float]()
    for target in targets:
        federation, state, number = _attacked(settings, train, target, attack, hostile)
        if state is None:  # no model follows from the sums: the round is dropped
            shares.append(0.0)
            continue
        shares += shares_of_items(federation, state, [number], train.num_users)
    return sum(shares) / len(shares)


def _attacked(
    settings: Settings, train: Interactions, target: int, attack: Attack, hostile: int
) -> tuple[Federation, State | None, int]:
    """A federation, its state when all groups have uploaded, and the target's number."""
    algorithm = settings.algorithm
    assert isinstance(algorithm, CoOccurrence)
    group = secure_groups(settings, train.num_users)
    members = [(group == one).nonzero().flatten() for one in range(settings.fleet.secure_groups)]
    users, bad = [len(one) for one in members], list(dict.fromkeys(group.tolist()))[:hostile]
    for of in bad:
        users[of] += 1
    popular = train.counts_by_item.argsort(descending=True, stable=True)
    beside = popular[popular != target][: attack.beside]

    groups = [algorithm.client_statistics(settings, train.of_users(one), range(train.num_items)) for one in members]
    for of in bad if attack.counted else []:
        groups[of].sums[COUNTS][target] = users[of]
    counts = combined_statistics(settings, groups).sums[COUNTS]
    numbers = counts.argsort(descending=True, stable=True).argsort()
    total = sum(users)
    everything = algorithm.client_statistics(settings, train, range(train.num_items)).sums
    public = PublicStatistics(train.num_items, total, everything | {COUNTS: counts.sort(descending=True).values})
    nothing = Interactions.from_pairs(torch.tensor([]), torch.tensor([]), train.num_users, train.num_items)
    data = Dataset("fleet", train, nothing).renumbered(numbers)
    federation = Federation.of(settings, data, public)

    plan, number = federation.plan, int(numbers[target])
    head = model_of(plan).head
    size, sums = triangle_size(head), list[Tensor]()
    for one in members:
        mine = data.train.of_users(one)
        upload = CoOccurrenceUpload.of(mine.items, mine.counts_by_user, head, algorithm.history_exponent)
        sums.append(upload.dense(head, torch.float64))
    others = numbers[beside]
    others = others[others < head]
    if attack.beside and number < head:
        low, high = others.clamp(max=number), others.clamp(min=number)
        items = torch.arange(head)
        for of in bad:
            own = sums[of]
            if attack.alone:
                diagonal = own[items * (items + 3) // 2]
                own.zero_()[items * (items + 3) // 2] = diagonal
            own[high * (high + 1) // 2 + low] = users[of]
            if attack.itself:
                own[number * (number + 3) // 2] = users[of]
    state = federation.initial()
    whole = combined(sums, size)
    held = State(state.full, 1, {SUM: {SUM: whole}})
    try:
        solved = algorithm.solve(plan, whole, algorithm.solver_settings(plan, held))
    except RuntimeError:  # sums that are not positive definite
        return federation, None, number
    full = {name: of.to(state.full[name].dtype).reshape(-1) for name, of in solved.items()}
    return federation, State(state.full | full, 1, held.algorithm_state), number
