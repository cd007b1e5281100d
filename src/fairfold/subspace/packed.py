"""Quantized projections: leading rows in few bits, and lists of pairs; floats on a client, packed elsewhere."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.errors import InvalidMessage
from fairfold.kernels.reference import PackedRows
from fairfold.subspace.projection import LeadingBlock, register_projection

FACTORS = 2  # columns before a row's numbers: its factor in a history, and its factor when it is scored
STEP, ZERO = 16, 208  # a factor's byte is its natural logarithm in steps of a sixteenth, from e⁻¹³ to e³; 0 is none
LEVEL_BITS, LEVELS = 4, 16  # values of pairs: which level each one has, of how many
STEPS, LLOYD_STEPS = 1024, 30  # of the histogram by which levels are found, and of the search
NUMBERS_AT_ONCE = 1 << 16  # that are packed together; a multiple of 8


def bytes_of(factors: Tensor) -> Tensor:
    """Encode the factors of rows as bytes: their logarithms in steps of a sixteenth."""
    found = ((factors.clamp(min=1e-30).log() * STEP).round() + ZERO).clamp(1, 255)
    return torch.where(factors > 0, found, 0)


def factors_of(codes: Tensor) -> Tensor:
    """Decode the factors of rows from their codes of a byte."""
    return torch.where(codes > 0, ((codes - ZERO) / STEP).exp(), 0)


@register_projection
@dataclass(frozen=True)
class QuantizedRows(LeadingBlock):
    """Leading rows (a, b, w) of a table that is used in products b_j ⟨w_j, Σ a_i w_i⟩, each of them in few bits.

    Such a product is the same for (u·a, u·b, w/u) with any u > 0. So a row's own largest number need not be held: with
    it as the unit the numbers of w are whole, and the factors carry it, in a byte each.
    """

    kind: ClassVar[str] = "quantized rows"
    is_packed: ClassVar[bool] = True
    bits: int = 8  # of a number of w

    @property
    def bytes(self) -> int:
        return self.kept[0] * row_bytes(self.kept[1] - FACTORS, self.bits)

    def reduce(self, full: Tensor) -> Tensor:
        cut, most = self._leading_part(full), 2 ** (self.bits - 1) - 1
        factors, numbers = cut[:, :FACTORS], cut[:, FACTORS:]
        unit = torch.nn.functional.pad(numbers.abs(), (0, 1)).amax(1, keepdim=True) / most  # there may be no numbers
        unit = torch.where(unit > 0, unit, 1)
        whole = (numbers / unit).round().clamp(-most, most)
        return torch.cat([factors_of(bytes_of(factors * unit)), whole], dim=1).reshape(-1)

    def packed(self, compact: Tensor) -> Tensor:
        """Pack to bytes: all factors, then the integers of each row, bit by bit."""
        rows, most = compact.view(self.kept), 2 ** (self.bits - 1) - 1
        factors = bytes_of(rows[:, :FACTORS]).to(torch.uint8).view(-1)
        numbers = (rows[:, FACTORS:] + most).to(torch.uint8)
        digits = (numbers[..., None] >> torch.arange(self.bits, dtype=torch.uint8) & 1).flatten(1)
        digits = torch.nn.functional.pad(digits, (0, -digits.shape[1] % 8)).view(-1, 8)
        return torch.cat([factors, (digits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)])

    def unpacked(self, content: Tensor) -> Tensor:
        table = self.table(content)
        return torch.cat([factors_of(table.row_headers), table[torch.arange(len(table))]], dim=1).view(-1)

    def table(self, content: Tensor) -> PackedRows:
        """Packed rows for lookups without unpacking; the factors are ahead of the integers."""
        return PackedRows(content, self.kept[0], self.kept[1] - FACTORS, self.bits)

    def description(self) -> dict[str, Any]:
        return super().description() | {"bits": self.bits}

    @classmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        kept, bits = LeadingBlock.from_description(shape, facts).kept, facts["bits"]
        if type(bits) is not int or not 2 <= bits <= 8 or len(shape) != 2 or kept[1] < FACTORS:
            raise ValueError(f"{bits!r} bits for a table of shape {shape}")
        return cls(shape, kept, bits)


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a row with its factors."""
    return FACTORS + -(-columns * bits // 8)


@register_projection
@dataclass(frozen=True)
class QuantizedPairs(LeadingBlock):
    """The leading part of a list of pairs, as rows (item, other item, value) of which values are one of 16 levels.

    A pair has a position in the table of items × items, or in its lower triangle where the first item is the rarer one
    (``directed`` says which). Positions are sorted and kept as Elias-Fano codes: their low bits as they are, and for
    the k-th pair, whose other bits are h, bit h + k of a bitmap. So n pairs always take the same number of bytes.
    """

    kind: ClassVar[str] = "quantized pairs"
    is_packed: ClassVar[bool] = True
    items: int = 1  # how many there are
    directed: bool = False  # whether (j, i) may stand beside (i, j)

    @property
    def bytes(self) -> int:
        return pair_bytes(self.kept[0], self.items, self.directed)

    @property
    def _low_bits(self) -> int:
        return low_bits(self.kept[0], num_positions(self.items, self.directed))

    def reduce(self, full: Tensor) -> Tensor:
        """Truncate, round the values to levels, and sort by position."""
        rows = self._leading_part(full)
        rows = rows[self._positions(rows).argsort(stable=True)]
        levels = best_levels(rows[:, 2])
        values = levels[nearest_levels(rows[:, 2], levels)]
        return torch.cat([rows[:, :2], values[:, None].to(rows.dtype)], dim=1).view(-1)

    def _positions(self, rows: Tensor) -> Tensor:
        item, other = rows[:, 0].long(), rows[:, 1].long()
        return (item * self.items if self.directed else item * (item + 1) // 2) + other

    def packed(self, compact: Tensor) -> Tensor:
        """Pack to bytes: the levels, the level of each pair, low bits of its position, the bitmap."""
        rows = compact.view(self.kept)
        many, low = self.kept[0], self._low_bits
        if not many:
            return torch.empty(0, dtype=torch.uint8)
        levels = torch.unique(rows[:, 2].float())
        levels = torch.cat([levels, levels[-1:].expand(LEVELS - len(levels))])
        positions = self._positions(rows)
        bitmap = torch.zeros(self._bitmap_bytes * 8, dtype=torch.uint8)
        bitmap[(positions >> low) + torch.arange(many)] = 1
        codes = nearest_levels(rows[:, 2], levels)
        return torch.cat(
            [levels.view(torch.uint8), pack_bits(codes, LEVEL_BITS), pack_bits(positions, low), pack_bits(bitmap, 1)]
        )

    @property
    def _bitmap_bytes(self) -> int:
        return -(-(self.kept[0] + (num_positions(self.items, self.directed) - 1 >> self._low_bits)) // 8)

    def unpacked(self, content: Tensor) -> Tensor:
        many, low = self.kept[0], self._low_bits
        if not many:
            return torch.empty(0)
        sizes = [4 * LEVELS, -(-many * LEVEL_BITS // 8), -(-many * low // 8), self._bitmap_bytes]
        first, codes, lows, bitmap = torch.split(content, sizes)
        levels, places = first.clone().view(torch.float32), unpack_bits(bitmap, 8 * len(bitmap), 1).nonzero()[:, 0]
        if len(places) != many or not bool(levels.isfinite().all()):
            raise InvalidMessage("a damaged list of pairs", f"{many} pairs, and finite values", "Send it anew.")
        positions = (places - torch.arange(many) << low) + unpack_bits(lows, many, low)
        if self.directed:
            item, other = torch.div(positions, self.items, rounding_mode="floor"), positions % self.items
        else:
            item = torch.div((8 * positions + 1).double().sqrt() - 1, 2, rounding_mode="floor").long()
            other = positions - item * (item + 1) // 2
        values = levels[unpack_bits(codes, many, LEVEL_BITS)]
        return torch.stack([item.float(), other.float(), values], dim=1).view(-1)

    def description(self) -> dict[str, Any]:
        return super().description() | {"items": self.items, "directed": self.directed}

    @classmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        kept = tuple(facts["kept"])
        items, directed = facts["items"], facts["directed"]
        good = len(shape) == 2 and len(kept) == 2 and all(type(side) is int for side in (*kept, items))
        good = good and type(directed) is bool
        if not good or shape[1] != 3 or kept[1] != 3 or not 0 <= kept[0] <= shape[0] or not 1 <= items <= 1 << 24:
            raise ValueError(f"a list {kept} of pairs of shape {shape} of {items!r} items")
        return cls(shape, (kept[0], kept[1]), items, directed)


def num_positions(items: int, directed: bool) -> int:
    """Positions that a pair of items can have."""
    return items * items if directed else items * (items + 1) // 2


def low_bits(pairs: int, positions: int) -> int:
    """Bits of each position that are kept as they are: with the bitmap of the others they take the fewest bytes."""
    return max(0, (positions // max(pairs, 1)).bit_length() - 1)


def pair_bytes(pairs: int, items: int, directed: bool = False) -> int:
    """Bytes of a list of pairs."""
    positions = num_positions(items, directed)
    low = low_bits(pairs, positions)
    bits = (LEVEL_BITS * pairs, low * pairs, pairs + (positions - 1 >> low))
    return 4 * LEVELS + sum(-(-many // 8) for many in bits) if pairs else 0


def pairs_within(budget: int, items: int, directed: bool = False) -> int:
    """The largest number of pairs that fits a budget in bytes, or one less where parts end within a byte."""
    possible = range(8 * max(budget, 0) // (LEVEL_BITS + 1) + 2)  # a bit of the bitmap each, at least
    return max(0, bisect_right(possible, budget, key=lambda pairs: pair_bytes(pairs, items, directed)) - 1)


def best_levels(values: Tensor) -> Tensor:
    """Levels for values that are then off by little in the square mean, rising: Lloyd's algorithm.

    It starts where a cube root of the values' density has its quantiles, as is best for many levels.
    """
    ordered = values.double().sort().values
    found, many = torch.unique_consecutive(ordered), len(ordered)
    if len(found) <= LEVELS:
        found = found if len(found) else torch.zeros(1)
        return torch.nn.functional.pad(found[None], (0, LEVELS - len(found)), mode="replicate")[0].float()
    density = torch.histc(ordered, STEPS).pow(1 / 3).cumsum(0)
    starts = torch.searchsorted(density, (torch.arange(LEVELS) + 0.5) / LEVELS * density[-1])
    levels = torch.lerp(ordered[0], ordered[-1], (starts.double() + 0.5) / STEPS)
    sums = torch.nn.functional.pad(ordered.cumsum(0), (1, 0))
    for _ in range(LLOYD_STEPS):
        inner = torch.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2)
        ends = torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=many)
        counts = ends.diff()
        levels = torch.where(counts > 0, sums[ends].diff() / counts.clamp(min=1), levels)
    return levels.float()


def nearest_levels(values: Tensor, levels: Tensor) -> Tensor:
    """Number of the level that is nearest to each value."""
    return torch.bucketize(values.float().contiguous(), (levels[1:] + levels[:-1]) / 2)


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """The lowest bits of numbers, one after another, as bytes; the lowest bit is the first."""
    parts = torch.split(numbers.long(), NUMBERS_AT_ONCE)
    digits = torch.cat([(part[:, None] >> torch.arange(bits) & 1).to(torch.uint8).view(-1) for part in parts])
    digits = torch.nn.functional.pad(digits, (0, -len(digits) % 8)).view(-1, 8)
    return (digits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(content: Tensor, count: int, bits: int) -> Tensor:
    """Numbers of so many bits from their bytes."""
    found = torch.zeros(count, dtype=torch.int64)
    for start in range(0, count if bits else 0, NUMBERS_AT_ONCE):  # each part begins with a byte
        part = content[start * bits // 8 : -(-min(start + NUMBERS_AT_ONCE, count) * bits // 8)]
        digits = (part[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1)
        here = found[start : start + NUMBERS_AT_ONCE]
        here += (digits[: len(here) * bits].view(-1, bits).long() << torch.arange(bits)).sum(1)
    return found
