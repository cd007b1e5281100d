"""The precision matrix of a large catalogue: a sparse co-occurrence matrix, inverted around every item.

The inverse of A = D G D + λI says of item j how the others predict it: the regression weights −P_ij / P_jj. Most of
them are next to nothing, and those that are not belong to items that occur with j often. So each item is regressed on
the ``RELATED`` items that are most related to it, G_ij / √((G_ii + m)(G_jj + m)) with m a multiple of G's mean
diagonal: of a matrix of so many rows, that of the item and these, the last column of the inverse is found. P_jj is
what stands there for the item itself; of a pair that two items are regressed on, S is the mean. No matrix of
items × items is anywhere, and with as many related items as there are others it is the exact inverse.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fairfold.kernels import ops

RELATED = 64  # items that an item is regressed on, at most
BLOCK_NUMBERS = 1 << 28  # of the blocks of all items, which are kept while settings are tuned
SHRINKAGE = 16.0  # m over the mean diagonal: about what λ is
COLUMNS_AT_ONCE = 128  # of a table that a sparse matrix is multiplied with: its rows then stay in the caches
BLOCKS_AT_ONCE = 1 << 20  # numbers of blocks that are inverted together: few, which then stay in the caches

Pairs = tuple[Tensor, Tensor, Tensor]  # the rarer item of each pair, the other one, and a value


@dataclass(frozen=True)
class SparseRows:
    """A square matrix as the numbers of every row that are not zero."""

    starts: Tensor  # of every row
    columns: Tensor
    values: Tensor

    @classmethod
    def of_pairs(cls, pairs: Pairs, size: int) -> Self:
        """The symmetric matrix with these numbers, and zeros on its diagonal."""
        rarer, other, values = pairs
        rows, order = torch.cat([rarer, other]).sort(stable=True)
        starts = torch.searchsorted(rows, torch.arange(size))
        return cls(starts, torch.cat([other, rarer])[order], torch.cat([values, values])[order])

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the values."""
        return self.values.dtype

    @property
    def lengths(self) -> Tensor:
        """How many numbers each row has."""
        return torch.cat([self.starts[1:], self.starts.new_tensor([len(self.columns)])]).sub_(self.starts).long()

    def __matmul__(self, table: Tensor) -> Tensor:
        found = torch.empty_like(table)
        for start in range(0, table.shape[1], COLUMNS_AT_ONCE):
            here = slice(start, start + COLUMNS_AT_ONCE)
            part = table[:, here].contiguous()
            found[:, here] = embedding_bag(self.columns, part, self.starts, mode="sum", per_sample_weights=self.values)
        return found


@dataclass(frozen=True)
class SparseGram(SparseRows):
    """A symmetric co-occurrence matrix: the numbers of every row that are not zero."""

    diagonal: Tensor

    @classmethod
    def of(cls, packed: Tensor, items: int, dtype: torch.dtype = torch.float32) -> Self:
        """The matrix of the leading items of a sparse packed triangle."""
        places, values = packed.indices()[0], packed.values()
        known = int(torch.searchsorted(places, items * (items + 1) // 2))
        kind = torch.int32 if 2 * known < 2**31 else torch.int64
        rows = ops.symmetric_rows(places[:known], values[:known], items, kind, dtype)
        return cls(rows[0].to(kind), *rows[1:])

    def most_similar(self, counts: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The items most similar to every item, [items, count], nearest first, and how similar: see ``similarity``."""
        users = counts.to(self.dtype).clamp(min=1)
        roots = (users / self.diagonal.to(users.dtype).clamp(min=1e-12)).sqrt()
        return ops.strongest(self.starts, self.columns, self.values, roots, users, count)

    def most_related(self, count: int) -> Tensor:
        """The items most related to every item, [items, count]."""
        roots = (self.diagonal + SHRINKAGE * self.diagonal.mean()).rsqrt().to(self.dtype)
        return ops.strongest(self.starts, self.columns, self.values, roots, None, count)[0]

    def neighborhoods(self, related: Tensor) -> "Neighborhoods":
        """The matrix among each item and its related ones."""
        members = torch.cat([related, torch.arange(len(self))[:, None]], dim=1)
        return Neighborhoods(members, ops.member_blocks(self.starts, self.columns, self.values, members))


def num_related(items: int) -> int:
    """How many items each one is regressed on: as many as there is memory for."""
    return max(1, min(RELATED, items - 1, isqrt(BLOCK_NUMBERS // items) - 1))


@dataclass(frozen=True)
class Neighborhoods:
    """The matrix among each item and its related ones; the item itself stands last, and for those that it has not."""

    members: Tensor  # [items, width]
    blocks: Tensor  # [items, width, width]

    def columns(self, scales: Tensor, ridge: float) -> Tensor:
        """The item's column of the inverse of its block, scaled and with λ on its diagonal; alone if not definite."""
        size, width = self.members.shape
        weights = scales.to(self.blocks.dtype)
        found = self.blocks.new_zeros(size, width)
        step = max(1, BLOCKS_AT_ONCE // width**2)
        for start in range(0, size, step):
            members = self.members[start : start + step]
            real = members != members[:, -1:]
            real[:, -1] = True
            scale = torch.where(real, weights[members], 0)
            block = (self.blocks[start : start + step] * scale[:, :, None]).mul_(scale[:, None, :])
            block.diagonal(dim1=1, dim2=2).add_(torch.where(real, ridge, 1.0))
            lower, failed = torch.linalg.cholesky_ex(block)
            alone = failed.nonzero().flatten()
            lower[alone] = block[alone].diagonal(dim1=1, dim2=2).clamp(min=ridge).sqrt().diag_embed()
            last = (1 / lower[:, -1, -1])[:, None, None] * torch.eye(width, dtype=block.dtype)[:, -1:]
            found[start : start + step] = torch.linalg.solve_triangular(lower.mT, last, upper=True)[:, :, 0]
        return found


@dataclass(frozen=True)
class LocalPrecision:
    """P of a large catalogue: its diagonal, and S where it is known."""

    scales: Tensor  # D
    roots: Tensor  # √P_jj
    pairs: Pairs  # of distinct items, and S

    @classmethod
    def of(cls, neighborhoods: Neighborhoods, scales: Tensor, ridge: float) -> Self:
        """From the co-occurrence matrix around every item."""
        columns, members = neighborhoods.columns(scales, ridge), neighborhoods.members
        size = len(members)
        roots = columns[:, -1].sqrt()
        near, item = members[:, :-1], torch.arange(size)[:, None]
        values = -columns[:, :-1] / (roots[:, None] * roots[near])
        real = near != item
        keys = (torch.maximum(near, item) * size + torch.minimum(near, item))[real]
        keys, place, times = torch.unique(keys, return_inverse=True, return_counts=True)
        mean = values.new_zeros(len(keys)).index_add_(0, place, values[real]) / times
        pairs = (torch.div(keys, size, rounding_mode="floor"), keys % size, mean)
        return cls(scales, roots.double(), pairs)

    @property
    def correlations(self) -> SparseRows:
        """S as a matrix."""
        return SparseRows.of_pairs(self.pairs, len(self.roots))
