"""Rows of a table in few bits, read as they are stored, in plain torch: the specification.

Two bytes for every row come first, which are others' to read. Then come the rows, each from a byte of its own, bit by
bit: whole numbers from −m to m = 2^(bits − 1) − 1, counted from 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """A table of so many rows and columns, of which there may be none, 2 to 8 bits a number, in bytes."""

    content: Tensor
    rows: int
    columns: int
    bits: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Chosen rows, as numbers."""
        width, bits = -(-self.columns * self.bits // 8), torch.arange(8, dtype=torch.uint8)
        codes = self.content[2 * self.rows :].view(self.rows, width)[ids]
        digits = (codes[..., None] >> bits & 1).flatten(1)[:, : self.columns * self.bits]
        whole = digits.view(len(ids), self.columns, self.bits) << bits[: self.bits]
        found: Tensor = whole.sum(-1, dtype=torch.uint8).float() - (2 ** (self.bits - 1) - 1)
        return found

    @property
    def ahead(self) -> Tensor:
        """The two bytes ahead of every row, as numbers."""
        return self.content[: 2 * self.rows].view(self.rows, 2).float()


def packed_products(table: PackedRows, ids: Tensor, vectors: Tensor) -> Tensor:
    """Products of vectors with chosen rows, [vectors, rows]."""
    return vectors @ table[ids].T


def packed_sum(table: PackedRows, ids: Tensor, factors: Tensor) -> Tensor:
    """The sum of chosen rows, each times its factor."""
    return factors @ table[ids]
