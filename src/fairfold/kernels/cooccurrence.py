"""Co-occurrence sums and packed rows in plain torch: the specification of the faster bodies."""

from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS_AT_ONCE = 1 << 20  # pairs that are listed at a time


def pair_sums(items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor, max_items: int) -> Tensor:
    """The packed co-occurrence matrix Σ weight · x xᵀ over histories, of the first ``max_items`` items.

    History u is ``items[begins[u]:ends[u]]`` and ascends; the pair (i, j), i ≤ j, is at j(j + 1)/2 + i. Sums are formed
    in double precision.
    """
    total = torch.zeros(max_items * (max_items + 1) // 2, dtype=torch.float64)
    lengths = truncated_lengths(items, begins, ends, max_items)
    batches = (lengths * (lengths + 1) // 2).cumsum(0) // PAIRS_AT_ONCE
    for batch in range(int(batches[-1]) + 1 if len(batches) else 0):
        histories = (batches == batch).nonzero().flatten()
        total.index_add_(0, *listed_pairs(items, begins[histories], lengths[histories], weights[histories].double()))
    return total.to(weights.dtype)


def truncated_lengths(items: Tensor, begins: Tensor, ends: Tensor, max_items: int) -> Tensor:
    """The number of each history's items among the first ``max_items``."""
    below = torch.zeros(len(items) + 1, dtype=torch.int32)
    torch.cumsum(items < max_items, 0, dtype=torch.int32, out=below[1:])
    return (below[ends] - below[begins]).long()


def listed_pairs(items: Tensor, begins: Tensor, lengths: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The position of every pair, an item with itself and all before it in the same history, and its weight."""
    start = torch.repeat_interleave(begins, lengths)
    before = _ranges(lengths)
    later = torch.repeat_interleave(torch.arange(len(start)), before + 1)
    column = items[start[later] + before[later]]
    places = column * (column + 1) // 2 + items[start[later] + _ranges(before + 1)]
    return places, torch.repeat_interleave(weights, lengths)[later]


def _ranges(lengths: Tensor) -> Tensor:
    """0, 1, … below each length, concatenated."""
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)


@dataclass(frozen=True)
class PackedRows:
    """A table quantized to 2 to 8 bits a number, in bytes, of which rows are read as they are stored.

    Two bytes for every row come first, the row headers, whose meaning is the caller's. Then come the rows, each from a
    byte of its own, bit by bit: whole numbers from −m to m = 2^(bits − 1) − 1, counted from 0. There may be no columns.
    """

    content: Tensor
    rows: int
    columns: int
    bits: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, ids: Tensor) -> Tensor:
        width = -(-self.columns * self.bits // 8)
        shifts = torch.arange(8, dtype=torch.uint8)
        codes = self.content[2 * self.rows :].view(self.rows, width)[ids]
        digits = (codes[..., None] >> shifts & 1).flatten(1)[:, : self.columns * self.bits]
        whole = digits.view(len(ids), self.columns, self.bits) << shifts[: self.bits]
        values: Tensor = whole.sum(-1, dtype=torch.uint8).float() - (2 ** (self.bits - 1) - 1)
        return values

    @property
    def row_headers(self) -> Tensor:
        """The two bytes of every row, as floats."""
        return self.content[: 2 * self.rows].view(self.rows, 2).float()


def packed_products(table: PackedRows, ids: Tensor, vectors: Tensor) -> Tensor:
    """Products of vectors with chosen rows, [vectors, rows]."""
    return vectors @ table[ids].T


def packed_sum(table: PackedRows, ids: Tensor, factors: Tensor) -> Tensor:
    """The sum of chosen rows, each times its factor."""
    return factors @ table[ids]
