"""The precision matrix of a large catalogue that few users have: low rank plus diagonal, which is exact for them.

No sum has a rank above the number of its users. So G is sparse, and A = D G D = B Bᵀ, where B has as many columns as
there are users. It comes from passes of orthogonal iteration, each a product of A with a table of items × columns, and
from the last one by Nyström's formula: Y = A Q, B = Y (QᵀY)^−½. What the diagonal of A has beyond that of B Bᵀ, and λ,
are R, and P = (R + B Bᵀ)⁻¹ = R⁻¹ − V Vᵀ with V = R⁻¹ B (1 + Bᵀ R⁻¹ B)^−½ (Woodbury). So S_ij is
⟨V_i, V_j⟩ / √(P_ii P_jj), without a matrix of items × items. For many users see :mod:`.local_inverse`.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence.local_inverse import Pairs, SparseGram

TABLE_NUMBERS = 1 << 28  # numbers of a table of items × columns at most
MAX_COLUMNS = 2_048  # of B at most
PASSES = 3  # products of A with a table; more do not help
SHIFT = 1e-6  # added to diagonals before a Cholesky decomposition, against the largest number there
PRODUCTS_AT_ONCE = 1 << 20  # numbers of rows that are multiplied together
CANDIDATES = 64  # items that occur with an item most, of which the strongest pairs are chosen


def is_exact(items: int, users: int) -> bool:
    """Whether there is room for as many columns as users."""
    return users <= min(MAX_COLUMNS, TABLE_NUMBERS // items)


@dataclass(frozen=True)
class DiagonalAndFactors:
    """A matrix R + B Bᵀ: a diagonal, and a product of few columns."""

    diagonal: Tensor
    factors: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the values."""
        return self.factors.dtype

    def __len__(self) -> int:
        return len(self.factors)

    def __matmul__(self, table: Tensor) -> Tensor:
        return table * self.diagonal.to(self.dtype)[:, None] + self.factors @ (self.factors.T @ table)


def factorize(gram: SparseGram, scales: Tensor, columns: int, passes: int = PASSES) -> Tensor:
    """Factors B of so many columns, for which D G D ≈ B Bᵀ but for the diagonal."""
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

    def correlations(self, near: Tensor) -> Pairs:
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
