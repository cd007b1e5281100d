"""What the server makes of a sum of pairs: partial correlations, their spectrum, and their strongest entries.

With G the sum, c the items' counts and D = diag((c / mean c)^−β), P = (D G D + λI)⁻¹ is a precision matrix, and
S = −P_ij / √(P_ii P_jj), with a zero diagonal, holds the partial correlations: what two items have in common beyond all
others. A least-squares regression of item j on all others (EASE) predicts x_j by Σ_i x_i · D_i · (−P_ij / P_jj), up to
what depends on j alone; so with a_i = D_i √P_ii and b_j = 1 / √P_jj its scores are b_j Σ_i S_ij a_i x_i. Cut to the
leading eigenvalues s of S, W = U√s, that is b_j ⟨W_j, Σ_i a_i W_i⟩: an item's row, and a history that is a sum of rows.

The spectrum without S. N = I − S is the precision matrix scaled to a unit diagonal, N = Δ P Δ with Δ = diag(1/√P_jj).
So N⁻¹ = Δ⁻¹ (D G D + λI) Δ⁻¹, which is known without an inverse, has the eigenvectors of S, and an eigenvalue s of S is
1/(1 − s) there: the ones that are wanted are the largest, and far apart. A block Krylov space of few products finds
them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SPARE, POWERS, RESTARTS = 16, 4, 12
"""Directions beyond those wanted, products before a Krylov space is begun anew, and how often it is."""

MOST_PER_ITEM = 255
"""Pairs that are listed under an item."""

TOLERANCE = 1e-7
"""Residual of an eigenpair against its value."""


@dataclass(frozen=True)
class Precision:
    """D G D + λI, and its inverse P.

    Attributes:
        scales: D.
        matrix: D G D + λI.
        inverse: P.
    """

    scales: Tensor
    matrix: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, gram: Tensor, counts: Tensor, beta: float, ridge: float) -> "Precision":
        """From a sum of pairs, in double precision. It uses up the sum."""
        known = counts.double().clamp(min=1)
        scales = (known / known.mean()) ** -beta
        matrix = gram.mul_(scales[:, None]).mul_(scales)
        matrix.diagonal().add_(ridge)
        return cls(scales, matrix, torch.cholesky_inverse(torch.linalg.cholesky(matrix)))

    @property
    def roots(self) -> Tensor:
        """√P_jj."""
        return self.inverse.diagonal().sqrt()

    def correlations(self) -> Tensor:
        """S. It uses up the inverse."""
        roots = self.roots
        found = self.inverse.div_(-roots[:, None]).div_(roots)
        return found.fill_diagonal_(0)

    def spectrum(self, many: int) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues of S, falling, and their vectors as columns."""
        roots = self.roots
        values, vectors = leading(roots[:, None] * self.matrix * roots, many)
        signs = vectors.gather(0, vectors.abs().argmax(0)[None]).sign()
        return 1 - 1 / values, vectors * signs


def leading(matrix: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a symmetric, positive matrix, falling, and their vectors."""
    size, width = len(matrix), many + SPARE
    if size <= 2 * POWERS * width:
        return _exact(matrix, many)
    block = torch.randn(size, width, dtype=matrix.dtype, generator=torch.Generator().manual_seed(0))
    for _ in range(RESTARTS):
        basis = torch.linalg.qr(block).Q
        for _ in range(POWERS):
            block = matrix @ basis[:, -width:]
            for _ in range(2):  # once leaves what rounding brings back
                block = block - basis @ (basis.T @ block)
            basis = torch.cat([basis, torch.linalg.qr(block).Q], dim=1)
        image = matrix @ basis
        values, turned = torch.linalg.eigh(basis.T @ image)
        values, turned = values[-width:], turned[:, -width:]
        block = basis @ turned
        wanted = (image @ turned - block * values)[:, -many:].norm(dim=0) <= TOLERANCE * values[-many:]
        if bool(wanted.all()):
            return values[-many:].flip(0), block[:, -many:].flip(1)
    return _exact(matrix, many)


def _exact(matrix: Tensor, many: int) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values[-many:].flip(0), vectors[:, -many:].flip(1)


def strongest(correlations: Tensor, rows: Tensor, counts: Tensor, many: int) -> Tensor:
    """Pairs of which the rows say least, [many, 3]: the rarer item, the other one, and their correlation.

    By the size of what is left, |S − W Wᵀ|, times (c_i c_j)^¼: pairs of items that occur together often. No item is the
    rarer one of more than 255, which a byte can count.
    """
    popular = counts.double().clamp(min=1) ** 0.25
    left = torch.addmm(correlations, rows, rows.T, alpha=-1).abs_()
    left.mul_(popular[:, None]).mul_(popular).tril_(-1)
    value, place = left.reshape(-1).topk(min(many, left.numel()))
    place = place[value > 0]
    rarer, other = torch.div(place, len(left), rounding_mode="floor"), place % len(left)
    kept = _nth(rarer) < MOST_PER_ITEM
    rarer, other = rarer[kept], other[kept]
    found = torch.zeros(many, 3, dtype=torch.float64)
    found[: len(rarer)] = torch.stack([rarer.double(), other.double(), correlations[rarer, other]], dim=1)
    return found


def _nth(values: Tensor) -> Tensor:
    """How often each value occurs before its place."""
    order = values.argsort(stable=True)
    ascending = values[order]
    found = torch.empty_like(values)
    found[order] = torch.arange(len(values)) - torch.searchsorted(ascending, ascending)
    return found
