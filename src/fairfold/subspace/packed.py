"""Quantized projections: leading rows in few bits, and lists of pairs; floats on a client, packed elsewhere."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.kernels.reference import PackedRows
from fairfold.subspace.blocks import LeadingBlock
from fairfold.subspace.projection import register_projection

FACTORS = 2  # columns before a row's numbers: its factor in a history, and its factor when it is scored
STEP, ZERO = 16, 208  # a factor's byte is its natural logarithm in steps of a sixteenth, from e⁻¹³ to e³; 0 is none


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
    """The leading part of a list of pairs, as rows (rarer item, more popular item, value rounded to a byte).

    An item is stored in two bytes, or in three where there are more than 65,536. Where there are many pairs the rarer
    items are not listed: it is counted how many pairs each of the items has, of which the list has at most 255.
    """

    kind: ClassVar[str] = "quantized pairs"
    is_packed: ClassVar[bool] = True
    items: int = 1  # how many there are

    @property
    def bytes(self) -> int:
        return pair_bytes(self.kept[0], self.items)

    def reduce(self, full: Tensor) -> Tensor:
        """Truncate, round the values, and sort by the rarer item."""
        rows = self._leading_part(full)
        rows = rows[(rows[:, 0].double() * self.items + rows[:, 1]).argsort(stable=True)]
        unit = self._largest_value(rows[:, 2]) / 127
        values = (rows[:, 2] / torch.where(unit > 0, unit, 1)).round() * unit
        return torch.cat([rows[:, :2], values[:, None].to(rows.dtype)], dim=1).view(-1)

    def _largest_value(self, values: Tensor) -> Tensor:
        return values.abs().max().float() if len(values) else torch.tensor(0.0)

    @property
    def _counted(self) -> bool:
        return self.items < item_bytes(self.items) * self.kept[0]

    def packed(self, compact: Tensor) -> Tensor:
        """Pack to bytes: the largest value, the rarer items or their counts, the other items, the values."""
        rows = compact.view(self.kept)
        if not len(rows):
            return torch.empty(0, dtype=torch.uint8)
        unit = self._largest_value(rows[:, 2]) / 127
        values = (rows[:, 2] / torch.where(unit > 0, unit, 1)).round().to(torch.int8)
        listed = rows[:, :2].T.to(torch.int32).contiguous().view(torch.uint8).view(2, -1, 4)  # little-endian
        rarer, other = listed[..., : item_bytes(self.items)].reshape(2, -1)
        if self._counted:
            rarer = torch.bincount(rows[:, 0].long(), minlength=self.items).to(torch.uint8)
        return torch.cat([(unit * 127).view(1).view(torch.uint8), rarer, other, values.view(torch.uint8)])

    def unpacked(self, content: Tensor) -> Tensor:
        many = self.kept[0]
        if not many:
            return torch.empty(0)
        unit, content = content[:4].clone().view(torch.float32) / 127, content[4:]
        width = item_bytes(self.items)
        first, other, values = torch.split(content, [self.items if self._counted else width * many, width * many, many])
        if self._counted:
            rarer = torch.repeat_interleave(torch.arange(self.items), first.long())[:many]
            rarer = torch.nn.functional.pad(rarer, (0, many - len(rarer)))  # of counts that do not fit: no pairs
        else:
            rarer = _decode_items(first, width)
        found = [rarer.float(), _decode_items(other, width).float(), values.clone().view(torch.int8) * unit]
        return torch.stack(found, dim=1).view(-1)

    def description(self) -> dict[str, Any]:
        return super().description() | {"items": self.items}

    @classmethod
    def from_description(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        kept, items = tuple(facts["kept"]), facts["items"]
        good = len(shape) == 2 and len(kept) == 2 and all(type(side) is int for side in (*kept, items))
        if not good or shape[1] != 3 or kept[1] != 3 or not 0 <= kept[0] <= shape[0] or not 1 <= items <= 1 << 24:
            raise ValueError(f"a list {kept} of pairs of shape {shape} of {items!r} items")
        return cls(shape, (kept[0], kept[1]), items)


def item_bytes(items: int) -> int:
    """Bytes of the number of one of so many items; a float holds such a number exactly."""
    return 2 if items <= 1 << 16 else 3


def pair_bytes(pairs: int, items: int) -> int:
    """Bytes of a list of pairs."""
    width = item_bytes(items)
    return 4 + (width + 1) * pairs + min(items, width * pairs) if pairs else 0


def pairs_within(budget: int, items: int) -> int:
    """The largest number of pairs that fits a budget in bytes."""
    width, budget = item_bytes(items), budget - 4
    listed = budget // (2 * width + 1)
    return max(0, listed if width * listed < items else max(listed, (budget - items) // (width + 1)))


def _decode_items(content: Tensor, width: int) -> Tensor:
    bytes_of_each = content.view(-1, width).to(torch.int32)
    return (bytes_of_each << (8 * torch.arange(width, dtype=torch.int32))).sum(1, dtype=torch.int32)
