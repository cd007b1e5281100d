"""Scores of items by a packed co-occurrence model: ``algorithms.cooccurrence.scorer`` in plain Python."""

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any

from fairfold.device.records import float32
from fairfold.errors import InvalidMessage

ROWS, PAIRS, NEIGHBORS, POPULARITY = "rows", "pairs", "neighbors", "popularity"
STREAM = "stream"  # rows of all items, which pass by where histories are encoded by them
ZERO_BYTE = 127  # what stands for 0 in rows of eight bits
STEP, ZERO, FACTORS = 16, 208, 2  # of the factors before each row (fairfold.subspace.packed)
FACTOR_OF = [0.0, *(float32(math.exp(float32((code - ZERO) / STEP))) for code in range(1, 256))]
MAX_ITEMS = 1 << 24
SMALLEST = 1e-30

Held = Mapping[str, Any]  # the description of a projection
Triple = tuple[int, int, float]


def packed_bytes(held: Held) -> int:
    """Bytes of a packed tensor by its description; refuses descriptions that define none."""
    (count, columns), kind = held["kept"], held["kind"]
    rows, shape_columns = held["shape"]
    sizes = (count, columns, rows, shape_columns)
    if not all(type(size) is int for size in sizes) or not 0 <= count <= rows or not 0 <= columns <= shape_columns:
        raise _invalid("a cut tensor that is larger than its whole")
    if kind == "quantized rows":
        bits = held["bits"]
        if type(bits) is not int or not 2 <= bits <= 8 or columns < FACTORS:
            raise _invalid("rows of other bits than 2 to 8")
        return int(count * (FACTORS + -(-(columns - FACTORS) * bits // 8)))
    items = held["items"]
    if kind != "quantized pairs" or columns != 3 or type(items) is not int or not 1 <= items <= MAX_ITEMS:
        raise _invalid("a tensor of unknown kind")
    width = item_bytes(items)
    return 4 + (width + 1) * count + min(items, width * count) if count else 0


def item_bytes(items: int) -> int:
    """Bytes of the number of one of so many items in a list of pairs."""
    return 2 if items <= 1 << 16 else 3


def _invalid(given: str) -> InvalidMessage:
    return InvalidMessage(given, "what FairStrategy sends", "Both sides must run the same fairfold.")


def parse_rows(content: bytes, held: Held) -> tuple[list[float], list[float], list[Any]]:
    """Factors a and b of every row, and its numbers, a byte each."""
    (count, columns), bits = held["kept"], held["bits"]
    columns -= FACTORS
    width = -(-columns * bits // 8)
    most = 2 ** (bits - 1) - 1
    mask = 2**bits - 1
    rows = []
    for start in range(FACTORS * count, FACTORS * count + count * width, width or 1):
        packed = int.from_bytes(content[start : start + width], "little")
        rows.append(array("b", [max((packed >> bits * place & mask) - most, -128) for place in range(columns)]))
    into = [FACTOR_OF[code] for code in content[: FACTORS * count : FACTORS]]
    out = [FACTOR_OF[code] for code in content[1 : FACTORS * count : FACTORS]]
    return into, out, rows or [array("b")] * count


def parse_pairs(content: bytes, held: Held) -> list[Triple]:
    """A list of pairs: a rarer item, another one, and a value; those of an item with itself are left out."""
    count, items = held["kept"][0], held["items"]
    if not count:
        return []
    unit = float32(struct.unpack("<f", content[:4])[0] / 127)
    if not math.isfinite(unit):
        raise _invalid("NaN or infinity")
    width = item_bytes(items)
    counted = items < width * count
    end = 4 + (items if counted else width * count)
    if counted:
        rarer = [item for item in range(items) for _ in range(content[4 + item])][:count]
        rarer += [0] * (count - len(rarer))  # of counts that do not fit: no pairs
    else:
        rarer = _items(content[4:end], width)
    other = _items(content[end : end + width * count], width)
    values = struct.unpack(f"{count}b", content[end + width * count : end + (width + 1) * count])
    if max(*rarer, *other) >= items:
        raise _invalid("a list of pairs of unknown items")
    found = zip(rarer, other, values, strict=True)
    return [(first, second, float32(value * unit)) for first, second, value in found if first != second]


def _items(content: bytes, width: int) -> list[int]:
    """Item numbers of ``width`` bytes each."""
    return [int.from_bytes(content[at : at + width], "little") for at in range(0, len(content), width)]


def encode(content: bytes, columns: int, history: Sequence[int], first: int = 0) -> list[float]:
    """Σ a·w over the items of a history in a block of rows in eight bits, from item ``first`` on."""
    count, sums = len(content) // (FACTORS + columns), [0.0] * columns
    for item in history:
        row = item - first
        if 0 <= row < count:
            factor, start = FACTOR_OF[content[FACTORS * row]], FACTORS * count + row * columns
            numbers = content[start : start + columns]
            sums = [total + factor * (number - ZERO_BYTE) for total, number in zip(sums, numbers, strict=True)]
    return sums


def ndcg_of(ranked: Sequence[int], wanted: Sequence[int], top: int) -> float:
    """NDCG@top of ranked items: the wanted ones discounted by 1/log2(rank + 1), as a share of the most they can be."""
    discounts = [1 / math.log2(place + 2) for place in range(top)]
    relevant = set(wanted)
    gain = sum(discount for item, discount in zip(ranked, discounts, strict=False) if item in relevant)
    return min(gain / sum(discounts[: len(wanted)]), 1.0)


class CoOccurrenceModel:
    """A packed co-occurrence model as a device received it; rows stay in a byte a number."""

    def __init__(self, tensors: Mapping[str, bytes], projections: Mapping[str, Held], pair_weight: float) -> None:
        into, out, rows = parse_rows(tensors[ROWS], projections[ROWS])
        valid = [row for row in range(len(out)) if out[row] > 0]
        self.known = len(valid)
        self.into, self.out = [into[row] for row in valid], [out[row] for row in valid]
        self.rows = [rows[row] for row in valid]
        self.passing = tensors[STREAM] if STREAM in projections else None
        self.links = self._links(parse_pairs(tensors[PAIRS], projections[PAIRS]), pair_weight)
        if NEIGHBORS in projections:
            neighbors = parse_pairs(tensors[NEIGHBORS], projections[NEIGHBORS])
            self.links += [(source, scored, value) for scored, source, value in neighbors]
        self.log_popularity: list[float] = []
        if POPULARITY in projections:
            first, second, _ = parse_rows(tensors[POPULARITY], projections[POPULARITY])
            curve = [value for both in zip(first, second, strict=True) for value in both]
            self.log_popularity = [math.log(max(value, SMALLEST)) for value in curve] if any(curve) else []
        self.reach = 1 + max([self.known - 1, *(max(source, scored) for source, scored, _ in self.links)])

    def _links(self, pairs: list[Triple], pair_weight: float) -> list[Triple]:
        """What an item of a history adds to the score of another, beyond the rows: (item, scored item, value)."""
        a = self.into
        b = self.out
        links = list[Triple]()
        for rarer, other, value in pairs:
            added, back = value, 1.0
            if rarer < self.known and other < self.known:
                added -= b[rarer] * sum(map(mul, self.rows[rarer], self.rows[other])) * a[other]
                back = a[rarer] * b[other] / max(a[other] * b[rarer], SMALLEST)
            added *= pair_weight
            links += [(other, rarer, added), (rarer, other, added * back)]
        return links

    def popularity(self, item: int) -> float:
        """What popularity adds to the score of an item for a user without a history."""
        curve = self.log_popularity
        place = min(math.log2(item + 1), len(curve) - 1)
        first = min(int(place), len(curve) - 2)
        return math.exp(curve[first] + (curve[first + 1] - curve[first]) * (place - first))

    def scores(self, history: Sequence[int], count: int, encoded: Sequence[float] | None = None) -> Any:
        """Scores of the first ``count`` items in single precision; minus infinity where the history gives none.

        ``encoded`` is the history's sum where it is known already.
        """
        has = bytearray(self.reach)
        history_sum = [0.0] * (len(self.rows[0]) if self.rows else 0)
        for item in history:
            if item < self.reach:
                has[item] = 1
            if item < self.known and self.passing is None:
                factor = self.into[item]
                history_sum = [
                    total + factor * number for total, number in zip(history_sum, self.rows[item], strict=True)
                ]
        if self.passing is not None:
            encoded = encode(self.passing, len(history_sum), history)
        history_sum = history_sum if encoded is None else list(encoded)
        added = [0.0] * max(count, self.reach)
        for source, scored, value in self.links:
            if has[source]:
                added[scored] += value
        share = 1 + sum(has[: self.known])
        found = array("f", bytes(4 * count))
        for item in range(count):
            if item < self.known:
                score = sum(map(mul, self.rows[item], history_sum)) * self.out[item] + added[item]
            elif added[item]:
                score = added[item]
            else:
                found[item] = -math.inf
                continue
            found[item] = score + (self.popularity(item) / share if self.log_popularity else 0.0)
        return found

    def best(self, history: Sequence[int], count: int, top: int) -> list[int]:
        """The best of the first ``count`` items outside a history; of equal scores the lower number comes first."""
        scores, excluded = self.scores(history, count), set(history)
        ranked = sorted((item for item in range(count) if item not in excluded), key=lambda item: -scores[item])
        return ranked[:top]

    def ndcg(self, history: Sequence[int], wanted: Sequence[int], catalogue: int, top: int, longest: int) -> float:
        """NDCG@top of the wanted items, ranked by a history; ``longest`` is the longest history that is ranked."""
        best = self.best(history, min(catalogue, self.reach + top + longest), top)
        return ndcg_of(best, wanted, top)
