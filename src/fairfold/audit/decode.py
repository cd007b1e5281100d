"""Histories read from exact sums of several devices, and users named over several rounds.

*Sums of pairs.* An item that one member of a cohort has alone shows that member's whole history: all numbers of its row
are the same 1/n. What was read is taken off, and shows the next.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.algorithms.correlations import SUM, Correlations
from fairfold.algorithms.pairs import UNIT, items_of, matrix_of, size_of, weights_of
from fairfold.audit.devices import Seen
from fairfold.protocol.plan import Plan
from fairfold.settings.privacy import PrivatePrivacy

LEADING = 3_000
"""Items of a sum of pairs that are looked at."""

SURELY, ROUGHLY = 6, 0.2
"""Items of a history that is read without exact numbers, and how far off, as a share, these may be."""

LONGEST = 20_000
"""Items of a history that a weight is looked up for."""

FEWEST = 3
"""Items of a history that was read: of fewer, one would hit by chance."""


def can_decode(plan: Plan) -> bool:
    """Whether there is a way for this algorithm; where there is none, none was tried."""
    return isinstance(plan.algorithm, Correlations)


def decoded(plan: Plan, seen: Seen, blur: float = 0.0) -> list[Tensor]:
    """Histories, as ascending items, that the sum of a cohort gives away; its numbers may be off by ``blur``."""
    if isinstance(plan.algorithm, Correlations):
        read = _from_products if isinstance(plan.settings.privacy, PrivatePrivacy) else _from_pairs
        return read(seen.answer.sums[SUM], blur) if SUM in seen.answer.sums else []
    return []


# -- sums of pairs -----------------------------------------------------------------------------------------------------


def _from_pairs(packed: Tensor, blur: float) -> list[Tensor]:
    items = min(items_of(len(packed)), LEADING)
    weights = weights_of(torch.arange(1, LONGEST))
    left = matrix_of(packed[: size_of(items)].float())
    slack = 0.25 / UNIT + blur
    found, tried = list[Tensor](), torch.zeros(items, dtype=torch.bool)
    while True:
        worn = left > slack
        many, most = worn.sum(1), left.max(1).values
        # All numbers of the row alike: as their sum and the largest of them say.
        alike = (left.where(worn, most[:, None]) >= most[:, None] - 2 * slack).all(1)
        open_rows = (alike & (many >= FEWEST) & ~tried).nonzero().flatten()
        if not len(open_rows):
            return found
        for row in open_rows.tolist():
            tried[row] = True
            mine, weight = (left[row] > slack).nonzero().flatten(), float(left[row, row])
            if len(mine) < FEWEST or not bool(((weights[len(mine) - 1 :] - weight).abs() <= slack).any()):
                continue
            block = left[mine[:, None], mine]
            if bool((block >= weight - 2 * slack).all()) and float(left[row, mine].max()) <= weight + 2 * slack:
                left[mine[:, None], mine] = (block - weight).clamp(min=0)
                found.append(mine)


def _from_products(packed: Tensor, blur: float) -> list[Tensor]:
    """The same where a member says v vᵀ: the row of an item that one has alone is a multiple of v."""
    left, found = matrix_of(packed[: size_of(min(items_of(len(packed)), LEADING))].double()), list[Tensor]()
    for row in left.diagonal().argsort(descending=True).tolist():
        if float(left[row, row]) <= blur:
            continue
        vector = left[row] / left[row, row].sqrt()
        mine = (vector > vector.max() / 2).nonzero().flatten()
        outer = torch.outer(vector[mine], vector[mine])
        if len(mine) >= SURELY and bool(((left[mine[:, None], mine] - outer).abs() <= ROUGHLY * outer).all()):
            left -= torch.outer(vector, vector)
            found.append(mine)
    return found


# -- what that is worth ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """What was read, judged by what there was: the share of every user's history, wrong pairs, and whose each is."""

    shares: dict[int, float]
    wrong: int
    whose: dict[int, int]


def judged(found: list[Tensor], histories: dict[int, Tensor]) -> Read:
    """Each history that was read is that of the user whom it fits best; one that fits nobody by half is wrong."""
    shares, whose, wrong = dict.fromkeys(histories, 0.0), dict[int, int](), 0
    for place, items in sorted(enumerate(found), key=lambda one: -len(one[1])):
        free = [user for user in histories if user not in whose.values()]
        hits = {user: int(torch.isin(items, histories[user]).sum()) for user in free}
        best = max(hits, key=lambda user: hits[user], default=None)
        if best is None or 2 * hits[best] < len(items):
            wrong += len(items)
            continue
        whose[place], wrong = best, wrong + len(items) - hits[best]
        shares[best] = hits[best] / max(len(histories[best]), 1)
    return Read(shares, wrong, whose)


class Tracks:
    """Histories that were read in several rounds: who was there every time a history was is its user."""

    def __init__(self) -> None:
        self._tracks: list[tuple[set[int], set[int], set[int]]] = []

    def note(self, found: list[Tensor], cohort: list[int], whose: dict[int, int]) -> None:
        """Add a round with its known cohort; ``whose`` is the truth, by which names are judged."""
        for place, items in enumerate(found):
            mine, best, like = set(items.tolist()), -1, 0.5
            for number, (known, _, _) in enumerate(self._tracks):
                both = len(mine & known) / len(mine | known)
                best, like = (number, both) if both > like else (best, like)
            true = {whose[place]} if place in whose else set[int]()
            if best < 0:
                self._tracks.append((mine, set(cohort), true))
            else:
                known, candidates, owners = self._tracks[best]
                self._tracks[best] = (known | mine, candidates & set(cohort), owners | true)

    def named(self) -> tuple[int, int]:
        """Users who were named rightly, and names that were wrong."""
        names = [(candidates, owners) for _, candidates, owners in self._tracks if len(candidates) == 1]
        right = {next(iter(candidates)) for candidates, owners in names if candidates == owners}
        return len(right), sum(candidates != owners for candidates, owners in names)
