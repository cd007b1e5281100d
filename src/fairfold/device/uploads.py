"""What a device computes of its users' histories for the default algorithm: co-occurrence uploads and reports.

``algorithms.cooccurrence`` in plain Python; sums are of multiples of 2⁻¹⁶, exact in any order, so that both give the
same bits.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from fairfold.device.model import CoOccurrenceModel
from fairfold.device.records import float32

UNIT = 1 << 16  # fixed-point steps per 1 of a co-occurrence weight
MAX_DENSE = 1 << 26  # numbers of a sum that is ever dense
HELD_OUT_SHARE, SHORTEST_HISTORY = 0.1, 2
# Sync state of an item of a history that no part of the sum has; else the sum of 2 to the power of each part that has
# it; with all bits inverted where the user no longer has the item
NEW = 0
MAX_PARTS = 16
REPORT_SIZE = 4
MASK = 0xFFFFFFFF
RESIDUAL_STEPS, ROUNDING_ROOM = 256, 0.998  # of sums with noise (fairfold.privacy.gram)


def scatter(value: int) -> int:
    """A hash of an integer to 32 bits."""
    found = value & MASK
    for _ in range(2):
        found = ((found >> 16 ^ found) * 0x45D9F3B) & MASK
    return found >> 16 ^ found


def triangle_size(items: int) -> int:
    """Number of elements of the packed triangle over some items."""
    return items * (items + 1) // 2


def triangle_items(size: int) -> int:
    """The most items whose packed triangle has at most this many elements."""
    return (isqrt(8 * size + 1) - 1) // 2


def part_size(items: int, part: int, parts: int) -> int:
    """Number of elements in the columns part, part + parts, … of the packed triangle over some items."""
    columns = max(0, -(-(items - part) // parts))
    return columns * (part + 1) + parts * columns * (columns - 1) // 2


@dataclass
class UserHistory:
    """All items that a user has or had in this run, ascending, with the sync state of each."""

    items: list[int]
    states: list[int]
    default_quality: float = 0.0  # 1 + the quality of the first candidate, 0 if not measured
    held_out: list[int] = field(default_factory=list)  # for evaluation alone

    def mark_lost(self, current: set[int]) -> None:
        """Update the sync states by the items that the user still has."""
        for place, item in enumerate(self.items):
            if (item in current) == (self.states[place] < NEW):
                self.states[place] = ~self.states[place]

    def uploaded(self, part: int = 0) -> list[int]:
        """The items that a part of the server's sum holds."""
        found = zip(self.items, self.states, strict=True)
        return [item for item, state in found if (~state if state < NEW else state) >> part & 1]

    def mark_uploaded(self, held_out: set[int], part: int = 0) -> None:
        """Update the sync states after an upload of a part, of all but the held-out new items."""
        for place, item in enumerate(self.items):
            if self.states[place] != NEW or item not in held_out:
                self.states[place] |= 1 << part  # cleared, where bits are inverted

    def present(self) -> list[tuple[int, bool]]:
        """The items that the user still has, and whether the server's sum holds them."""
        found = zip(self.items, self.states, strict=True)
        return [(item, state > NEW) for item, state in found if state >= NEW]


def held_out_items(items: Sequence[int]) -> set[int]:
    """The tenth of a history that is not uploaded while candidates are tried; none of a single item."""
    if len(items) < SHORTEST_HISTORY:
        return set()
    count = max(1, round(float32(len(items) * float32(HELD_OUT_SHARE))))
    total = scatter(sum(items))
    order = sorted(items, key=lambda item: scatter(item * 2_654_435_761 + total))
    return set(order[:count])


def pair_weight(length: int, exponent: float) -> float:
    """Weight of a pair in a history of some length: n^−exponent, as a multiple of the unit."""
    return max(1, math.floor(UNIT / math.pow(max(1, length), exponent))) / UNIT


def statistics(
    histories: Sequence[Sequence[int]], window: range, *, is_private: bool, with_pairs: bool
) -> dict[str, Any]:
    """The users of every item of a window, and with the first window the numbers of users, items and pairs."""
    counts = array("d", bytes(8 * len(window)))
    for items in histories:
        weight = math.floor(UNIT / math.sqrt(max(1, len(items)))) / UNIT if is_private else 1.0
        for item in items:
            if item in window:
                counts[item - window.start] += weight
    if window.start:
        return {"counts": counts}
    lengths = [len(items) for items in histories]
    pairs = sum(length * (length + 1) for length in lengths) / 2
    totals = [len(histories), sum(lengths) * (not is_private), pairs * with_pairs]
    return {"counts": counts, "users": array("d", totals)}


def upload(
    users: Sequence[UserHistory],
    *,
    head: int,
    leading: int,
    share: float,
    most: int | None,
    exponent: float,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """The change of the users' co-occurrences, whose sync states are brought up to date.

    Dense, or where that takes fewer bytes the nonzero values with their positions; with ``most`` None, as secure
    aggregation needs it, dense and of all items, or of a part of their pairs: its number, and how many there are.
    """
    added, retracted = list[tuple[list[int], float]](), list[tuple[list[int], float]]()
    for user in users:
        before = [item for item in user.uploaded(part[0]) if item < head]
        user.mark_uploaded(held_out_items(user.items) if share < 1 else set(), part[0])
        now = [item for item in user.uploaded(part[0]) if item < head]
        if now != before:
            added.append((now[:most], pair_weight(len(now), exponent)))
            retracted.append((before[:most], -pair_weight(len(before), exponent)))
    return pack_pairs(added + retracted, leading, part, dense=most is None)


def private_upload(
    users: Sequence[UserHistory], item_shares: Sequence[float], leading: int, *, share: float
) -> dict[str, Any]:
    """The packed sum of v vᵀ over the leading items, for a sum with noise (``privacy.gram``)."""
    total = array("q", bytes(8 * triangle_size(leading)))
    for user in users:
        user.mark_uploaded(held_out_items(user.items) if share < 1 else set())
        steps = residual_steps(user.items, item_shares)[:leading]
        place = 0
        for column, first in enumerate(steps):
            if first:
                for row in range(column + 1):
                    total[place + row] += first * steps[row]
            place += column + 1
    return {"sum": array("f", [number / RESIDUAL_STEPS**2 for number in total])}


def residual_steps(items: Sequence[int], item_shares: Sequence[float]) -> list[int]:
    """Residuals of a history (has an item, minus how likely that is), scaled so that their triangle has a norm ≤ √½."""
    known = {item for item in items if item < len(item_shares)}
    if not known:
        return [0] * len(item_shares)
    residuals = [(item in known) - min(1.0, len(known) * part) for item, part in enumerate(item_shares)]
    squares = sum(number**2 for number in residuals)
    fourths = sum(number**4 for number in residuals)
    scale = max(math.sqrt(squares) * (1 + fourths / max(squares**2, 1e-24)) ** 0.25, 1e-12)
    shrink = ROUNDING_ROOM
    while True:
        steps = [round(number / scale * shrink * RESIDUAL_STEPS) for number in residuals]
        if sum(step**2 for step in steps) ** 2 + sum(step**4 for step in steps) <= RESIDUAL_STEPS**4:
            return steps
        shrink *= ROUNDING_ROOM


def pack_pairs(
    histories: Sequence[tuple[list[int], float]], leading: int, part: tuple[int, int] = (0, 1), *, dense: bool = False
) -> dict[str, Any]:
    """The packed sum of pairs of weighted histories over the leading items, or a part of it."""
    number, parts = part
    cut = [([item for item in items if item < leading], weight) for items, weight in histories]
    pairs = sum(triangle_size(len(items)) for items, _ in cut)
    is_dense = dense or 2 * pairs >= triangle_size(leading) <= MAX_DENSE
    size = part_size(leading, number, parts) if is_dense else 0
    packed = array("f", bytes(4 * size))  # exact: multiples of the unit below 256
    sparse = dict[int, float]()
    for items, weight in cut:
        for place, column in enumerate(items):
            if column % parts != number:
                continue
            first = part_size(column, number, parts)
            for row in items[: place + 1]:
                if is_dense:
                    packed[first + row] += weight
                else:
                    sparse[first + row] = sparse.get(first + row, 0.0) + weight
    if is_dense:
        return {"sum": packed}
    places = sorted(sparse)
    kind = "q" if triangle_size(leading) > 1 << 31 else "i"
    return {"sum.indices": array(kind, places), "sum": array("f", [sparse[place] for place in places])}


def report(
    users: Sequence[UserHistory],
    model: CoOccurrenceModel,
    *,
    is_default: bool,
    share: float,
    catalogue: int,
    top: int,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """The sum of the users' reports on a candidate; the default's quality is remembered in their histories."""
    reporting = list[tuple[UserHistory, list[int], list[int]]]()
    for user in users:
        present = user.present()
        given = [item for item, uploaded in present if uploaded]
        held_out = [item for item, uploaded in present if not uploaded]
        chance = scatter(sum(item for item, _ in present) * 7 + len(present))
        if given and held_out and chance < share * 2**32 and (is_default or user.default_quality > 0):
            reporting.append((user, given, held_out))
    longest = max((len(given) for _, given, _ in reporting), default=0)
    total = [0] * REPORT_SIZE
    for user, given, held_out in reporting:
        tick()
        quality = model.ndcg(given, held_out, catalogue, top, longest)
        better = 0.0 if is_default else quality - (user.default_quality - 1)
        if is_default:
            user.default_quality = float32(1 + float32(quality))
        numbers = (1.0, quality, better, better**2)
        total = [so_far + round(number * UNIT) for so_far, number in zip(total, numbers, strict=True)]
    return {"quality": array("f", [number / UNIT for number in total])}
