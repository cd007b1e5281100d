"""Decoding histories from exact sums of several clients, and naming users over several rounds.

An item that only one member of a cohort has reveals that member's whole history: all numbers of its co-occurrence row
are the same n^−κ (1/√n by default). What was decoded is subtracted, and reveals the next.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence import cooccurrence
from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.cooccurrence import SUM, triangle_items, triangle_size, unpack_triangle
from fairfold.config.fleet import DifferentialPrivacy
from fairfold.federation.plan import Plan
from fairfold.privacy.audit.replay import Observation

MAX_ITEMS = 3_000  # items of a co-occurrence sum that are decoded
MIN_NOISY_ITEMS, NOISY_TOLERANCE = 6, 0.2  # fewest items, and relative tolerance, of a history from inexact numbers
MAX_HISTORY = 20_000
MIN_HISTORY = 3  # fewest items of a decoded history: shorter ones would match by chance


def can_decode(plan: Plan) -> bool:
    """Whether a decoder is implemented for the algorithm."""
    return isinstance(plan.algorithm, CoOccurrence)


def decode_histories(plan: Plan, seen: Observation, blur: float = 0.0) -> list[Tensor]:
    """Histories, as ascending items, that the sum of a cohort reveals; its numbers may be off by ``blur``."""
    if not isinstance(plan.algorithm, CoOccurrence) or SUM not in seen.update.sums:
        return []
    read = _from_products if isinstance(plan.settings.privacy, DifferentialPrivacy) else _from_pairs
    return read(seen.update.sums[SUM], blur, plan.algorithm.history_exponent)


def _from_pairs(packed: Tensor, blur: float, exponent: float) -> list[Tensor]:
    items = min(triangle_items(len(packed)), MAX_ITEMS)
    weights = cooccurrence.history_weights(torch.arange(1, MAX_HISTORY), exponent)
    left = unpack_triangle(packed[: triangle_size(items)].float())
    slack = 0.25 / cooccurrence.UNIT + blur
    found, tried = list[Tensor](), torch.zeros(items, dtype=torch.bool)
    while True:
        worn = left > slack
        many, most = worn.sum(1), left.max(1).values
        # All numbers of the row alike: as their sum and the largest of them say.
        alike = (left.where(worn, most[:, None]) >= most[:, None] - 2 * slack).all(1)
        open_rows = (alike & (many >= MIN_HISTORY) & ~tried).nonzero().flatten()
        if not len(open_rows):
            return found
        for row in open_rows.tolist():
            tried[row] = True
            mine, weight = (left[row] > slack).nonzero().flatten(), float(left[row, row])
            if len(mine) < MIN_HISTORY or not bool(((weights[len(mine) - 1 :] - weight).abs() <= slack).any()):
                continue
            block = left[mine[:, None], mine]
            if bool((block >= weight - 2 * slack).all()) and float(left[row, mine].max()) <= weight + 2 * slack:
                left[mine[:, None], mine] = (block - weight).clamp(min=0)
                found.append(mine)


def _from_products(packed: Tensor, blur: float, _: float) -> list[Tensor]:
    """Decode sums of v vᵀ: the row of an item that only one member has is a multiple of v."""
    items, found = min(triangle_items(len(packed)), MAX_ITEMS), list[Tensor]()
    left = unpack_triangle(packed[: triangle_size(items)].double())
    for row in left.diagonal().argsort(descending=True).tolist():
        if float(left[row, row]) <= blur:
            continue
        vector = left[row] / left[row, row].sqrt()
        mine = (vector > vector.max() / 2).nonzero().flatten()
        outer = torch.outer(vector[mine], vector[mine])
        fits = ((left[mine[:, None], mine] - outer).abs() <= NOISY_TOLERANCE * outer).all()
        if len(mine) >= MIN_NOISY_ITEMS and bool(fits):
            left -= torch.outer(vector, vector)
            found.append(mine)
    return found


@dataclass(frozen=True)
class DecodingScore:
    """Decoded histories compared with the truth: share of every history, wrong pairs, and the user of each."""

    shares: dict[int, float]
    wrong: int
    users: dict[int, int]


def score_decoding(found: list[Tensor], histories: dict[int, Tensor]) -> DecodingScore:
    """Assign each decoded history to the user whom it fits best; one that fits no user by half is wrong."""
    shares, users, wrong = dict.fromkeys(histories, 0.0), dict[int, int](), 0
    for place, items in sorted(enumerate(found), key=lambda one: -len(one[1])):
        free = [user for user in histories if user not in users.values()]
        hits = {user: int(torch.isin(items, histories[user]).sum()) for user in free}
        best = max(hits, key=lambda user: hits[user], default=None)
        if best is None or 2 * hits[best] < len(items):
            wrong += len(items)
            continue
        users[place] = best
        wrong += len(items) - hits[best]
        shares[best] = hits[best] / max(len(histories[best]), 1)
    return DecodingScore(shares, wrong, users)


class HistoryTracks:
    """Links histories decoded in several rounds: the client present in every cohort of a history is its user."""

    def __init__(self) -> None:
        self._tracks: list[tuple[set[int], set[int], set[int]]] = []

    def add(self, found: list[Tensor], cohort: list[int], users: dict[int, int]) -> None:
        """Add a round with its known cohort; ``users`` is the truth, for evaluation only."""
        for place, items in enumerate(found):
            mine = set(items.tolist())
            jaccard = [len(mine & known) / len(mine | known) for known, _, _ in self._tracks]
            true = {users[place]} if place in users else set[int]()
            if max(jaccard, default=0.0) > 0.5:
                best = jaccard.index(max(jaccard))
                known, candidates, owners = self._tracks[best]
                self._tracks[best] = (known | mine, candidates & set(cohort), owners | true)
            else:
                self._tracks.append((mine, set(cohort), true))

    def named(self) -> tuple[int, int]:
        """Numbers of users named correctly, and of wrong names."""
        names = [(candidates, owners) for _, candidates, owners in self._tracks if len(candidates) == 1]
        right = {next(iter(candidates)) for candidates, owners in names if candidates == owners}
        return len(right), sum(candidates != owners for candidates, owners in names)
