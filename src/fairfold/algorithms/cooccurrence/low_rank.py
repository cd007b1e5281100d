"""The precision matrix of a large catalogue: a co-occurrence matrix as low rank plus diagonal, and its inverse.

G is sparse, and A = D G D ≈ B Bᵀ + a diagonal, where B has few columns. It comes from passes of orthogonal iteration,
each a product of A with a table of items × columns, and from the last one by Nyström's formula: Y = A Q,
B = Y (QᵀY)^−½. What the diagonal of A has beyond that of B Bᵀ, and λ, are R, and P = (R + B Bᵀ)⁻¹ = R⁻¹ − V Vᵀ with
V = R⁻¹ B (1 + Bᵀ R⁻¹ B)^−½ (Woodbury). So S_ij = ⟨V_i, V_j⟩ / √(P_ii P_jj): no matrix of items × items anywhere. With
as many columns as items, or as users, it is the exact inverse.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fairfold.algorithms.cooccurrence.cooccurrence import columns_of

COLUMNS_AT_ONCE = 128  # of a table that a sparse matrix is multiplied with: its rows then stay in the caches
TABLE_NUMBERS = 1 << 28  # numbers of a table of items × columns at most
MAX_COLUMNS, DRAFT_COLUMNS = 2_048, 512  # of B at most; of one that is there to compare settings
PASSES = 3  # products of A with a table; more do not help
SHIFT = 1e-6  # added to diagonals before a Cholesky decomposition, against the largest number there
PADDED_AT_ONCE = 1 << 22  # numbers of rows that are searched together
PRODUCTS_AT_ONCE = 1 << 20  # numbers of rows that are multiplied together
LISTED_AT_ONCE = 1 << 21  # pairs of a sum that are put into rows together
CANDIDATES = 64  # items that occur with an item most, of which the strongest pairs are chosen


@dataclass(frozen=True)
class SparseGram:
    """A symmetric co-occurrence matrix: the numbers of every row that are not zero."""

    starts: Tensor  # of every row
    columns: Tensor
    values: Tensor
    diagonal: Tensor

    @classmethod
    def of(cls, packed: Tensor, items: int, dtype: torch.dtype = torch.float32) -> Self:
        """The matrix of the leading items of a sparse packed triangle."""
        places, values = packed.indices()[0], packed.values()
        known = int(torch.searchsorted(places, items * (items + 1) // 2))
        kind = torch.int32 if 2 * known < 2**31 else torch.int64
        before, after = torch.zeros(2, items, dtype=torch.int64)  # numbers of every row, up to the diagonal and beyond
        for later, earlier, _ in _listed_parts(places, values, known):
            before += torch.bincount(later, minlength=items)
            after += torch.bincount(earlier[earlier != later], minlength=items)
        starts = (before + after).cumsum(0) - before - after
        free = starts + before  # where the next number beyond the diagonal stands
        columns = torch.empty(int(before.sum() + after.sum()), dtype=kind)
        numbers, diagonal = torch.empty(len(columns), dtype=dtype), torch.zeros(items, dtype=torch.float64)
        first = before.cumsum(0) - before
        for start, (later, earlier, here) in enumerate(_listed_parts(places, values, known)):
            rank = torch.arange(len(later)) + start * LISTED_AT_ONCE - first[later]
            columns[starts[later] + rank], numbers[starts[later] + rank] = earlier.to(kind), here.to(dtype)
            own = later == earlier
            diagonal[later[own]] = here[own].double()
            mirrored, order = earlier[~own].sort(stable=True)
            rows, sizes = torch.unique_consecutive(mirrored, return_counts=True)
            rank = torch.arange(len(mirrored)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
            columns[free[mirrored] + rank], numbers[free[mirrored] + rank] = (
                later[~own][order].to(kind), here[~own][order].to(dtype),
            )  # fmt: skip
            free[rows] += sizes
        return cls(starts.to(kind), columns, numbers, diagonal)

    def __len__(self) -> int:
        return len(self.starts)

    def __matmul__(self, table: Tensor) -> Tensor:
        found = torch.empty_like(table)
        for start in range(0, table.shape[1], COLUMNS_AT_ONCE):
            here = slice(start, start + COLUMNS_AT_ONCE)
            part = table[:, here].contiguous()
            found[:, here] = embedding_bag(self.columns, part, self.starts, mode="sum", per_sample_weights=self.values)
        return found

    def most_similar(self, counts: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The items most similar to every item, [items, count], nearest first, and how similar: see ``similarity``.

        Where there are fewer, an item stands for itself, with 0.
        """
        size = len(self)
        users = counts.to(self.values.dtype).clamp(min=1)
        roots = (users / self.diagonal.to(users.dtype).clamp(min=1e-12)).sqrt()
        found, values = torch.arange(size)[:, None].repeat(1, count), users.new_zeros(size, count)
        ends = torch.cat([self.starts[1:], self.starts.new_tensor([len(self.columns)])])
        lengths, starts = (ends - self.starts).long(), self.starts.long()
        order, at = lengths.argsort(descending=True), 0
        while at < size:
            width = max(1, int(lengths[order[at]]))
            rows = order[at : at + max(1, PADDED_AT_ONCE // width)]
            at += len(rows)
            places = starts[rows, None] + torch.arange(width)
            real = places < starts[rows, None] + lengths[rows, None]
            places = torch.where(real, places, 0)
            columns = self.columns[places].long()
            both = self.values[places] * roots[rows, None] * roots[columns]
            near = both / (users[rows, None] + users[columns] - both).clamp(min=1e-12)
            best = torch.where(real & (columns != rows[:, None]), near, 0).topk(min(count, width), dim=1)
            kept = slice(best.values.shape[1])
            found[rows, kept] = torch.where(best.values > 0, columns.gather(1, best.indices), rows[:, None])
            values[rows, kept] = best.values.clamp(min=0)
        return found, values


def _listed_parts(places: Tensor, values: Tensor, known: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The later and the earlier item of the first pairs of a packed triangle, and their values, some at a time."""
    for start in range(0, known, LISTED_AT_ONCE):
        here = slice(start, min(start + LISTED_AT_ONCE, known))
        later = columns_of(places[here])
        yield later, places[here] - later * (later + 1) // 2, values[here]


@dataclass(frozen=True)
class DiagonalAndFactors:
    """R + B Bᵀ."""

    diagonal: Tensor
    factors: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """That of its numbers."""
        return self.factors.dtype

    def __len__(self) -> int:
        return len(self.factors)

    def __matmul__(self, table: Tensor) -> Tensor:
        return table * self.diagonal.to(self.dtype)[:, None] + self.factors @ (self.factors.T @ table)


def num_columns(items: int, users: int, draft: bool) -> int:
    """Columns of B: no sum has a rank above the number of its users."""
    most = DRAFT_COLUMNS if draft else MAX_COLUMNS
    return max(1, min(items, users, most, max(COLUMNS_AT_ONCE, TABLE_NUMBERS // items)))


def factorize(gram: SparseGram, scales: Tensor, columns: int, passes: int = PASSES) -> Tensor:
    """B of so many columns, for which D G D ≈ B Bᵀ but for the diagonal."""
    weights = scales.to(gram.values.dtype)[:, None]
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(len(gram), min(columns, len(gram)), generator=generator, dtype=gram.values.dtype)
    for number in range(passes):
        table = orthonormal(table)
        if number == passes - 1:
            table = orthonormal(table)  # what rounding has left
        image = (gram @ (table * weights)).mul_(weights)
        if number < passes - 1:
            table = image
    inner = (table.T @ image).double()
    return image @ inverse_root((inner + inner.T) / 2).to(image.dtype)


def orthonormal(table: Tensor) -> Tensor:
    """Columns that span the same space; where there are fewer directions, some are about 0."""
    return table @ inverse_root((table.T @ table).double()).to(table.dtype)


def inverse_root(matrix: Tensor) -> Tensor:
    """C with C Cᵀ = M⁻¹ on the directions in which a symmetric M is well above 0, and 0 on others, which M may have."""
    shift = SHIFT * float(matrix.diagonal().max())
    lower, failed = torch.linalg.cholesky_ex(matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype))
    if not int(failed):
        identity = torch.eye(len(matrix), dtype=matrix.dtype)
        root: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False).T
        return root
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * torch.where(values > shift, values.clamp(min=shift).rsqrt(), 0)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LowRankPrecision:
    """P = (R + B Bᵀ)⁻¹ = R⁻¹ − V Vᵀ."""

    scales: Tensor  # D
    matrix: DiagonalAndFactors
    factors: Tensor  # V, its rows divided by √P_jj
    roots: Tensor  # √P_jj

    @classmethod
    def of(cls, gram: SparseGram, scales: Tensor, factors: Tensor, ridge: float) -> Self:
        """From D G D ≈ B Bᵀ and a diagonal."""
        explained = factors.square().sum(1).double()
        rest = (gram.diagonal * scales.square() - explained).clamp(min=0) + ridge
        shrunk = factors / rest.sqrt().to(factors.dtype)[:, None]
        inner = (shrunk.T @ shrunk).double()
        inner.diagonal().add_(1)
        lower, identity = torch.linalg.cholesky(inner), torch.eye(len(inner), dtype=inner.dtype)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        found = shrunk @ inverse.T.to(shrunk.dtype)  # R^½ V
        left = (1 - found.square().sum(1).double()).clamp(min=1e-6)
        rows = found / left.sqrt().to(found.dtype)[:, None]
        return cls(scales, DiagonalAndFactors(rest, factors), rows, (left / rest).sqrt())

    def correlations(self, near: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distinct pairs of items with those ``near`` them, as the rarer one, the other, and S."""
        size = len(near)
        rarer = torch.maximum(near, torch.arange(size)[:, None]).view(-1)
        other = torch.minimum(near, torch.arange(size)[:, None]).view(-1)
        keys = torch.unique((rarer * size + other)[rarer != other])
        rarer, other = torch.div(keys, size, rounding_mode="floor"), keys % size
        step = max(1, PRODUCTS_AT_ONCE // max(1, self.factors.shape[1]))
        values = self.factors.new_empty(len(keys))  # in one piece: kept pieces between large temporaries pin gigabytes
        for start in range(0, len(keys), step):
            here = slice(start, start + step)
            values[here] = torch.linalg.vecdot(self.factors[rarer[here]], self.factors[other[here]])
        return rarer, other, values
