"""What the server makes of a sum of pairs: partial correlations, their spectrum, their strongest entries; neighbours.

With G the sum, c the items' counts and D = diag((c / mean c)^−β), P = (D G D + λI)⁻¹ is a precision matrix, and
S = −P_ij / √(P_ii P_jj), with a zero diagonal, holds the partial correlations: what two items have in common beyond all
others. A least-squares regression of item j on all others (EASE) predicts x_j by Σ_i x_i · D_i · (−P_ij / P_jj), up to
what depends on j alone; so with a_i = D_i √P_ii and b_j = 1 / √P_jj its scores are b_j Σ_i S_ij a_i x_i. Cut to the
leading eigenvalues s of S, W = U√s, that is b_j ⟨W_j, Σ_i a_i W_i⟩: an item's row, and a history that is a sum of rows.

The spectrum without S. N = I − S is the precision matrix scaled to a unit diagonal, N = Δ P Δ with Δ = diag(1/√P_jj).
So N⁻¹ = Δ⁻¹ (D G D + λI) Δ⁻¹, which is known without an inverse, has the eigenvectors of S, and an eigenvalue s of S is
1/(1 − s) there: the ones that are wanted are the largest, and far apart. A block Krylov space of few products finds
them.

Single precision is enough: what is left of an item beyond all others is no small difference of large numbers, so that
the error of S is 1e-6 of it. Double precision is for small matrices, where it costs nothing, and for sums so large
against λ that two items which always occur together could not be told from one.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

SMALL = 1_500
"""Items up to which all is done in double precision."""

TELLING = 2.0**11
"""The largest number of D G D over λ up to which single precision tells items apart."""

TYPICAL = 75.0
"""Length of a history for which λ is what the settings say."""

BLOCK, SPACE, RESTARTS = 32, 3, 40
"""Directions multiplied at a time; size of a Krylov space against what is wanted, and how often it begins anew."""

SPENT = 0.25
"""Of a new direction, the part that lies in what is known, squared: it has been made of rounding errors alone."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}
"""Residual of an eigenpair against its value."""

MOST_PER_ITEM = 255
"""Pairs that are listed under an item."""

ROWS_AT_ONCE = 256
"""Rows of S that are searched at a time."""


def penalty(ridge: float, length: float) -> float:
    """λ for histories of so many items of the head, in the mean: the longer they are, the smaller.

    The penalty that serves EASE best is nearly the same for all lengths n; in units of x xᵀ/n that would be one over n.
    Sums of pairs weigh users alike and not by n, and want about the square root of that.
    """
    return ridge * sqrt(TYPICAL / max(length, 1.0))


@dataclass(frozen=True)
class Precision:
    """D G D + λI, and its inverse P.

    Attributes:
        scales: D.
        matrix: D G D + λI.
        inverse: P.
        roots: √P_jj.
    """

    scales: Tensor
    matrix: Tensor
    inverse: Tensor
    roots: Tensor

    @classmethod
    def of(cls, gram: Tensor, counts: Tensor, beta: float, ridge: float) -> "Precision":
        """From a sum of pairs, in its precision or a higher one. It uses up the sum."""
        known = counts.double().clamp(min=1)
        scales = (known / known.mean()) ** -beta
        largest = float((gram.diagonal() * scales.square()).max())
        matrix = gram.double() if len(gram) <= SMALL or largest > TELLING * ridge else gram
        own = scales.to(matrix.dtype)
        matrix.mul_(own[:, None]).mul_(own)
        matrix.diagonal().add_(ridge)
        factor = torch.linalg.cholesky(matrix)
        inverse = torch.cholesky_inverse(factor, out=factor)  # in its place: two matrices at a time are enough
        return cls(scales, matrix, inverse, inverse.diagonal().double().sqrt())

    def correlations(self) -> Tensor:
        """S. It uses up the inverse."""
        roots = self.roots.to(self.inverse.dtype)
        found = self.inverse.div_(-roots[:, None]).div_(roots)
        return found.fill_diagonal_(0)

    def spectrum(self, many: int) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues of S, falling, and their vectors as columns."""
        if not many:
            return self.matrix.new_empty(0), self.matrix.new_empty(len(self.matrix), 0)
        values, vectors = leading(self.matrix, self.roots, many)
        signs = vectors.gather(0, vectors.abs().argmax(0)[None]).sign()
        return 1 - 1 / values, vectors * signs


def leading(matrix: Tensor, roots: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of diag(roots) · matrix · diag(roots), which is positive, falling, and their vectors.

    A block is multiplied and put at a right angle to all before it, until the space has its size. The best of what it
    holds is kept, and the next block goes on from there: a Krylov space that begins anew with what it has found.
    """
    scale, size, space = roots.to(matrix.dtype)[:, None], len(matrix), max(SPACE * many, many + 4 * BLOCK)
    if size <= 2 * space:
        values, vectors = torch.linalg.eigh(scale * matrix * scale.T)
        return values[-many:].flip(0), vectors[:, -many:].flip(1)
    basis, images = matrix.new_empty(2, size, space + BLOCK)
    chance = torch.Generator().manual_seed(0)
    block = torch.randn(size, BLOCK, dtype=matrix.dtype, generator=chance)
    block, filled = torch.linalg.qr(block).Q, 0
    for _ in range(RESTARTS):
        while filled < space:
            here, filled = slice(filled, filled + BLOCK), filled + BLOCK
            basis[:, here], images[:, here] = block, (matrix @ (block * scale)) * scale
            block = _beyond(basis[:, :filled], images[:, here], chance)
        values, turned = torch.linalg.eigh(basis[:, :filled].T @ images[:, :filled])
        values, turned = values[-many - BLOCK :], turned[:, -many - BLOCK :]
        vectors, image = basis[:, :filled] @ turned, images[:, :filled] @ turned
        left = (image - vectors * values)[:, -many:].norm(dim=0)
        noise = 4 * torch.finfo(matrix.dtype).eps * values[-1]  # of the largest, in all
        if bool((left <= TOLERANCE[matrix.dtype] * values[-many:] + noise).all()):
            break
        filled = len(values)
        basis[:, :filled], images[:, :filled] = vectors, image
    return values[-many:].flip(0), vectors[:, -many:].flip(1)


def _beyond(past: Tensor, block: Tensor, chance: torch.Generator) -> Tensor:
    """An orthonormal block at a right angle to all before it; by chance where these hold already what it says."""
    while True:
        block = torch.linalg.qr(block - past @ (past.T @ block)).Q
        known = past.T @ block  # what rounding brings back: little, or all where there was nothing but rounding
        spent = known.square().sum(0) > SPENT
        if not bool(spent.any()):
            found: Tensor = torch.linalg.qr(block - past @ known).Q
            return found
        block[:, spent] = torch.randn(len(block), int(spent.sum()), dtype=block.dtype, generator=chance)


def neighbours(gram: Tensor, counts: Tensor, many: int) -> Tensor:
    """The items most alike to every item, [many · items, 3]: the item, another, likeness; the nearest of all first.

    With r_i = √(c_i / G_ii), r_i G_ij r_j is how many have both, as far as users of all lengths do: q_ij. Likeness is
    q_ij / (c_i + c_j − q_ij), the share of those who have either (Jaccard). An item without so many neighbours has
    itself in their place, which says nothing.
    """
    size, own = len(gram), counts.to(gram.dtype).clamp(min=1)
    roots = (own / gram.diagonal().clamp(min=1e-12)).sqrt()
    place, value = torch.arange(size).repeat(many, 1), gram.new_zeros(many, size)
    for start in range(0, size, ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        both = gram[here] * roots[here, None] * roots
        both.diagonal(start).zero_()
        found = (both / (own[here, None] + own - both).clamp(min=1e-12)).topk(min(many, size), dim=1)
        real = found.values.T > 0
        place[: len(real), here] = torch.where(real, found.indices.T, place[: len(real), here])
        value[: len(real), here] = torch.where(real, found.values.T, 0)
    return torch.stack([torch.arange(size).repeat(many).double(), place.view(-1).double(), value.view(-1).double()], 1)


def strongest(correlations: Tensor, counts: Tensor, many: int) -> Tensor:
    """The pairs that say most, [many, 3]: the rarer item, the other, their correlation.

    By |S_ij| (c_i c_j)^¼: pairs of items that occur together often. No item is the rarer one of more than 255, which a
    byte can count.
    """
    popular = (counts.double().clamp(min=1) ** 0.25).to(correlations.dtype)
    value, place, least = correlations.new_empty(0), torch.empty(0, dtype=torch.int64), 0.0
    for start in range(0, len(correlations), ROWS_AT_ONCE):
        here, stop = slice(start, start + ROWS_AT_ONCE), start + ROWS_AT_ONCE
        left = correlations[here, :stop].abs().mul_(popular[here, None]).mul_(popular[:stop]).tril_(start - 1)
        first, second = (left > least).nonzero(as_tuple=True)
        value = torch.cat([value, left[first, second]])
        place = torch.cat([place, (first + start) * len(correlations) + second])
        value, best = value.topk(min(many, len(value)))
        place, least = place[best], float(value[-1]) if len(value) == many else 0.0
    rarer, other = torch.div(place, len(correlations), rounding_mode="floor"), place % len(correlations)
    kept = _nth(rarer) < MOST_PER_ITEM
    rarer, other = rarer[kept], other[kept]
    found = torch.zeros(many, 3, dtype=torch.float64)
    found[: len(rarer)] = torch.stack([rarer.double(), other.double(), correlations[rarer, other].double()], dim=1)
    return found


def _nth(values: Tensor) -> Tensor:
    """How often each value occurs before its place."""
    order = values.argsort(stable=True)
    ascending = values[order]
    found = torch.empty_like(values)
    found[order] = torch.arange(len(values)) - torch.searchsorted(ascending, ascending)
    return found
