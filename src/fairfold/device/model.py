"""Scores of items by a packed co-occurrence model: ``algorithms.cooccurrence.scorer`` in plain Python."""

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from fairfold.device.records import float32
from fairfold.errors import InvalidMessage

ROWS, PAIRS, NEIGHBORS, POPULARITY = "rows", "pairs", "neighbors", "popularity"
STREAM = "stream"  # rows of all items, which pass by where histories are encoded by them
ZERO_BYTE = 127  # what stands for 0 in rows of eight bits
STEP, ZERO, FACTORS = 16, 208, 2  # of the factors before each row (fairfold.subspace.packed)
FACTOR_OF = [0.0, *(float32(math.exp(float32((code - ZERO) / STEP))) for code in range(1, 256))]
LEVELS = 16  # values that the pairs of a list can have
MAX_ITEMS = 1 << 24
BITS_OF = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
SMALLEST = 1e-30

Held = Mapping[str, Any]  # the description of a projection
Pairs = tuple["array[int]", "array[int]", "array[float]"]  # rarer items, other ones, values


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
    items, known = held["items"], kind == "quantized pairs" and type(held.get("directed")) is bool
    if not known or columns != 3 or type(items) is not int or not 1 <= items <= MAX_ITEMS:
        raise _invalid("a tensor of unknown kind")
    return sum(pair_sizes(held)[1]) if count else 0


def pair_sizes(held: Held) -> tuple[int, tuple[int, int, int, int]]:
    """Low bits of a position in a list of pairs, and the bytes of its levels, codes, low bits and bitmap."""
    count, items = held["kept"][0], held["items"]
    positions = items * items if held["directed"] else items * (items + 1) // 2
    low = max(0, (positions // max(count, 1)).bit_length() - 1)
    bits = (4 * count, low * count, count + (positions - 1 >> low))
    return low, (4 * LEVELS, *(-(-many // 8) for many in bits))


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


def parse_pairs(content: bytes, held: Held) -> Pairs:
    """A list of pairs: rarer items, other ones, and values; those of an item with itself are left out."""
    rarer, other, values = array("I"), array("I"), array("f")
    count, items, directed = held["kept"][0], held["items"], held["directed"]
    if not count:
        return rarer, other, values
    low, sizes = pair_sizes(held)
    starts = [0, *accumulate(sizes)]
    levels = struct.unpack(f"<{LEVELS}f", content[: starts[1]])
    mask, place = (1 << low) - 1, 0
    if not all(map(math.isfinite, levels)):
        raise _invalid("NaN or infinity")
    for at, byte in enumerate(content[starts[3] : starts[4]]):
        for bit in BITS_OF[byte]:
            if place == count:
                raise _invalid("a damaged list of pairs")
            spot, shift = divmod(low * place, 8)
            spot += starts[2]
            bits = int.from_bytes(content[spot : spot + (shift + low + 7) // 8], "little") >> shift & mask
            position = (8 * at + bit - place << low) + bits
            first = position // items if directed else (math.isqrt(8 * position + 1) - 1) // 2
            second = position - (first * items if directed else first * (first + 1) // 2)
            if first >= items:
                raise _invalid("a list of pairs of unknown items")
            if first != second:
                rarer.append(first)
                other.append(second)
                values.append(levels[content[starts[1] + place // 2] >> 4 * (place % 2) & 15])
            place += 1
    if place < count:
        raise _invalid("a damaged list of pairs")
    return rarer, other, values


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
        self.pairs, self.pair_weight = parse_pairs(tensors[PAIRS], projections[PAIRS]), pair_weight
        self.neighbors: Pairs = (array("I"), array("I"), array("f"))
        if NEIGHBORS in projections:
            self.neighbors = parse_pairs(tensors[NEIGHBORS], projections[NEIGHBORS])
        self.log_popularity: list[float] = []
        if POPULARITY in projections:
            first, second, _ = parse_rows(tensors[POPULARITY], projections[POPULARITY])
            curve = [value for both in zip(first, second, strict=True) for value in both]
            self.log_popularity = [math.log(max(value, SMALLEST)) for value in curve] if any(curve) else []
        self.reach = 1 + max(self.known - 1, *(max(of, default=0) for of in (*self.pairs[:2], *self.neighbors[:2])))

    def _add_pairs(self, has: bytearray, added: list[float]) -> None:
        """Add what the items of a history add to the scores of others, beyond the rows."""
        a = self.into
        b = self.out
        for rarer, other, value in zip(*self.pairs, strict=True):
            if not has[rarer] and not has[other]:
                continue
            beyond, back = value, 1.0
            if rarer < self.known and other < self.known:
                beyond -= b[rarer] * sum(map(mul, self.rows[rarer], self.rows[other])) * a[other]
                back = a[rarer] * b[other] / max(a[other] * b[rarer], SMALLEST)
            beyond *= self.pair_weight
            if has[other]:
                added[rarer] += beyond
            if has[rarer]:
                added[other] += beyond * back
        for scored, source, value in zip(*self.neighbors, strict=True):
            if has[source]:
                added[scored] += value

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
        self._add_pairs(has, added)
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
