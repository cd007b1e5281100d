"""Leading blocks in few bits, and the leading part of a list of pairs: models cut to bytes, every byte of them counted.

What a device holds travels as floats, on the grid that its bits allow; :meth:`Projection.packed` is how it is stored.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairfold.projections.blocks import LeadingBlock

PAIR_BYTES = 5
"""Of a pair in a list: two items of two bytes, and a value of one."""

DIGIT = 128
"""Items of a list are written as two digits of this base, which half floats hold exactly."""


@dataclass(frozen=True)
class RoundedBlock(LeadingBlock):
    """The leading part of a table, each row rounded to whole multiples of its own largest number; of a vector, halves.

    Attributes:
        shape: Of the tensor.
        kept: How much of each side.
        bits: Of a number; 16 are a half float.
    """

    kind: ClassVar[str] = "rounded block"
    bits: int = 8

    @property
    def bytes(self) -> int:
        """Rows begin at a byte of their own, after their largest number in two."""
        if self.bits == 16:
            return 2 * self.size
        return self.kept[0] * (2 + -(-self.kept[1] * self.bits // 8))

    def reduce(self, full: Tensor) -> Tensor:
        """Cut and round."""
        cut = super().reduce(full)
        if self.bits == 16:
            return cut.to(torch.float16).to(full.dtype)
        whole, unit = self._whole(cut)
        return (whole * unit).to(full.dtype).view(-1)

    def _whole(self, cut: Tensor) -> tuple[Tensor, Tensor]:
        """Whole numbers and, by row, what they are multiples of."""
        rows, most = cut.view(self.kept), 2 ** (self.bits - 1) - 1
        largest = rows.abs().amax(1, keepdim=True).to(torch.float16).to(cut.dtype)
        unit = largest / most
        return (rows / torch.where(unit > 0, unit, 1)).round().clamp(-most, most), unit

    def packed(self, compact: Tensor) -> Tensor:
        """Bytes: the rows' largest numbers, then their whole numbers, bit by bit."""
        if self.bits == 16:
            return compact.to(torch.float16).view(torch.uint8)
        whole, unit = self._whole(compact)
        most = 2 ** (self.bits - 1) - 1
        places = torch.arange(self.bits)
        digits = ((whole.long() + most)[..., None] >> places & 1).view(self.kept[0], -1)
        digits = torch.nn.functional.pad(digits, (0, -digits.shape[1] % 8)).view(-1, 8)
        content = (digits << torch.arange(8)).sum(1).to(torch.uint8)
        return torch.cat([(unit * most).to(torch.float16).view(-1).view(torch.uint8), content])

    def unpacked(self, content: Tensor) -> Tensor:
        """The numbers that :meth:`packed` stored."""
        if self.bits == 16:
            return content.clone().view(torch.float16).float()
        (rows, columns), most = self.kept, 2 ** (self.bits - 1) - 1
        largest, rest = content[: 2 * rows].clone().view(torch.float16).float(), content[2 * rows :].long()
        digits = (rest[:, None] >> torch.arange(8) & 1).view(rows, -1)[:, : columns * self.bits]
        whole = (digits.view(rows, columns, self.bits) << torch.arange(self.bits)).sum(-1) - most
        numbers: Tensor = whole * (largest / most)[:, None]
        return numbers.view(-1)

    def facts(self) -> dict[str, Any]:
        """What is kept of every side, and the bits."""
        return super().facts() | {"bits": self.bits}

    @classmethod
    def of_facts(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        """See the base class."""
        kept, bits = LeadingBlock.of_facts(shape, facts).kept, facts["bits"]
        if type(bits) is not int or not (bits == 16 if len(shape) == 1 else 2 <= bits <= 8 and len(shape) == 2):
            raise ValueError(f"{bits!r} bits for a tensor of shape {shape}")
        return cls(shape, kept, bits)


@dataclass(frozen=True)
class PairList(LeadingBlock):
    """The leading part of a list of pairs, a row each: two items in two digits each, and a value, rounded to a byte."""

    kind: ClassVar[str] = "pair list"

    @property
    def bytes(self) -> int:
        """Of the pairs, and of their largest value."""
        return PAIR_BYTES * self.kept[0] + (4 if self.kept[0] else 0)

    def _largest(self, values: Tensor) -> Tensor:
        return values.abs().max().float() if len(values) else torch.tensor(0.0)

    def reduce(self, full: Tensor) -> Tensor:
        """Cut, and round the values."""
        rows = self._cut(full).clone()
        unit = self._largest(rows[:, 4]).to(full.dtype) / 127
        rows[:, 4] = (rows[:, 4] / torch.where(unit > 0, unit, 1)).round() * unit
        return rows.view(-1)

    def packed(self, compact: Tensor) -> Tensor:
        """Bytes: the largest value, the items, the values."""
        rows = compact.view(self.kept)
        if not len(rows):
            return torch.empty(0, dtype=torch.uint8)
        unit = self._largest(rows[:, 4]) / 127
        values = (rows[:, 4] / torch.where(unit > 0, unit, 1)).round().to(torch.int8)
        items = (rows[:, 0:4:2] * DIGIT + rows[:, 1:4:2]).to(torch.int32).to(torch.uint16)
        head = (unit * 127).view(1).view(torch.uint8)
        return torch.cat([head, items.contiguous().view(-1).view(torch.uint8), values.view(torch.uint8)])

    def unpacked(self, content: Tensor) -> Tensor:
        """The rows that :meth:`packed` stored."""
        many = self.kept[0]
        if not many:
            return torch.empty(0)
        unit = content[:4].clone().view(torch.float32) / 127
        items = content[4 : 4 + 4 * many].clone().view(torch.uint16).to(torch.int32).view(many, 2)
        rows = torch.empty(many, 5)
        rows[:, 0:4:2], rows[:, 1:4:2] = items // DIGIT, items % DIGIT
        rows[:, 4] = content[4 + 4 * many :].clone().view(torch.int8) * unit
        return rows.view(-1)

    @classmethod
    def of_facts(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        """See the base class."""
        kept = tuple(facts["kept"])
        good = len(shape) == 2 and len(kept) == 2 and all(type(side) is int for side in kept)
        if not good or shape[1] != 5 or kept[1] != 5 or not 0 <= kept[0] <= shape[0]:
            raise ValueError(f"a list {kept} of pairs of shape {shape}")
        return cls(shape, (kept[0], kept[1]))
