"""Histories read from exact sums of several devices, and users named over several rounds.

*Sums of pairs.* An item that one member of a cohort has alone shows that member's whole history: all numbers of its row
are the same 1/n. What was read is taken off, and shows the next.

*Least squares.* A row is the sum of the words δ of those who have the item. Items that one member has alone have equal
rows, which give δ away; every other row is then a sum of some of these, and which ones is found by meeting in the
middle.
"""

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.correlations import SUM, Correlations
from fairfold.algorithms.least_squares import LeastSquares, owned_rows
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

LARGEST_HALF = 1 << 12
"""Sums of one half of the members' words that are listed."""

MOST_TRIED = 1 << 18
"""Sums that may be like a row by one number, and are compared by all."""

FEWEST = 3
"""Items of a history that was read: of fewer, one would hit by chance."""


def can_decode(plan: Plan) -> bool:
    """Whether there is a way for this algorithm; where there is none, none was tried."""
    return isinstance(plan.algorithm, Correlations | LeastSquares)


def decoded(plan: Plan, seen: Seen, blur: float = 0.0) -> list[Tensor]:
    """Histories, as ascending items, that the sum of a cohort gives away; its numbers may be off by ``blur``."""
    if isinstance(plan.algorithm, Correlations):
        read = _from_products if isinstance(plan.settings.privacy, PrivatePrivacy) else _from_pairs
        return read(seen.answer.sums[SUM], blur) if SUM in seen.answer.sums else []
    if isinstance(plan.algorithm, LeastSquares):
        (name,), factors = plan.architecture.tables, plan.settings.model.factors
        space = subspace_of(seen.sent.projections[name])
        if space.head or space.is_full:
            rows = seen.answer.sums[name].double().view(-1, factors)[: owned_rows(space, factors)]
            return _from_rows(rows, blur)
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


# -- least squares -----------------------------------------------------------------------------------------------------


def _from_rows(rows: Tensor, blur: float) -> list[Tensor]:
    length = rows.norm(dim=1)
    spoken = (length > max(float(length.max()) * 1e-9, blur)).nonzero().flatten() if len(rows) else length.long()
    if len(spoken) < FEWEST:
        return []
    some = rows[spoken]
    slack = max(float(some.abs().max()) * 2e-6, blur)
    source = torch.Generator().manual_seed(0)
    line = torch.randn(rows.shape[1], generator=source, dtype=rows.dtype)
    atoms = _atoms(some, line, slack)
    if not len(atoms):
        return []
    members, _ = _ways(some, atoms, line, slack)
    return [spoken[mine] for mine in members.T.bool() if int(mine.sum()) >= FEWEST]


def _atoms(rows: Tensor, line: Tensor, slack: float) -> Tensor:
    """Words of single members: rows that occur more than once, and are no sum of others."""
    order = (rows @ line).argsort()
    ordered = rows[order]
    same = (ordered[1:] - ordered[:-1]).abs().amax(1) <= slack
    group = torch.cat([torch.zeros(1, dtype=torch.int64), (~same).cumsum(0)])
    many = torch.bincount(group)
    firsts = torch.cat([torch.zeros(1, dtype=torch.int64), (~same).nonzero().flatten() + 1])
    found = ordered[firsts[many >= 2]]
    return found[_ways(found, found, line, slack)[1] == 1]  # else it is itself, and a sum of others


def _ways(rows: Tensor, atoms: Tensor, line: Tensor, slack: float) -> tuple[Tensor, Tensor]:
    """Whose words each row is the sum of, [rows, atoms], none where that is not clear; and in how many ways it is."""
    half = (len(atoms) + 1) // 2
    left, right = _subsets(half), _subsets(len(atoms) - half)
    left_sums = left @ atoms[:half]
    right_sums = right @ atoms[half:] if len(atoms) > half else torch.zeros(1, rows.shape[1], dtype=rows.dtype)
    ordered, order = (right_sums @ line).sort()
    width, found = 4 * slack * float(line.abs().sum()), torch.zeros(len(rows), len(atoms), dtype=rows.dtype)
    ahead, ways = left_sums @ line, torch.zeros(len(rows), dtype=torch.int64)
    for number, row in enumerate(rows):
        wanted = row @ line - ahead
        low, high = torch.searchsorted(ordered, wanted - width), torch.searchsorted(ordered, wanted + width)
        many = high - low
        mine = torch.repeat_interleave(torch.arange(len(left)), many)
        if not 0 < len(mine) <= MOST_TRIED:
            continue
        other = order[torch.arange(len(mine)) - (many.cumsum(0) - many)[mine] + low[mine]]
        hits = (left_sums[mine] + right_sums[other] - row).abs().amax(1) <= 4 * slack
        ways[number] = int(hits.sum())
        if ways[number] == 1:
            found[number, :half] = left[mine[hits][0]]
            found[number, half:] = right[other[hits][0]]
    return found, ways


def _subsets(many: int) -> Tensor:
    """All subsets of so many, or all small ones where that is too many, [subsets, many]."""
    if 1 << many <= LARGEST_HALF:
        numbers = torch.arange(1 << many)
        return (numbers[:, None] >> torch.arange(many) & 1).double()
    chosen, most = list[tuple[int, ...]]([()]), 0
    while len(chosen) < LARGEST_HALF and most < many:
        most += 1
        chosen += list(combinations(range(many), most))[: LARGEST_HALF - len(chosen)]
    found = torch.zeros(len(chosen), many, dtype=torch.float64)
    for number, members in enumerate(chosen):
        found[number, list(members)] = 1
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
