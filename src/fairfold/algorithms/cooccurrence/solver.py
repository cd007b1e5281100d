"""The model that follows from co-occurrence sums: partial correlations, their spectrum, strongest pairs, neighbors.

With G the sum, c the items' counts and D = diag((c / mean c)^−β), P = (D G D + λI)⁻¹ is a precision matrix, and
S = −P_ij / √(P_ii P_jj), with a zero diagonal, holds the partial correlations. A least-squares regression of item j on
all others (EASE) predicts x_j by Σ_i x_i · D_i · (−P_ij / P_jj), up to what depends on j alone; so with a_i = D_i √P_ii
and b_j = 1 / √P_jj its scores are b_j Σ_i S_ij a_i x_i. Cut to the leading eigenvalues s of S, W = U√s, that is
b_j ⟨W_j, Σ_i a_i W_i⟩: an item's row, and a history that is a sum of rows.

*The spectrum without S.* N = I − S is the precision matrix scaled to a unit diagonal, N = Δ P Δ with Δ = diag(1/√P_jj).
So N⁻¹ = Δ⁻¹ (D G D + λI) Δ⁻¹, known without an inverse, has the eigenvectors of S, and an eigenvalue s of S is
1/(1 − s) there: the wanted ones are the largest, and far apart. A block Krylov space of few products finds them.

*Precision.* Single precision gives S to 1e-6. Double precision is for small matrices, where it costs nothing, and for
sums so large against λ that two items which always occur together could not be distinguished.

*Differential privacy.* λ is twice the edge of the noise (:mod:`fairfold.privacy.gram`) and β is 0.3.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence import low_rank
from fairfold.algorithms.cooccurrence.cooccurrence import unpack_triangle
from fairfold.algorithms.cooccurrence.local_inverse import (
    LocalPrecision,
    Neighborhoods,
    Pairs,
    SparseGram,
    SparseRows,
    num_related,
)
from fairfold.algorithms.cooccurrence.low_rank import DiagonalAndFactors, LowRankPrecision
from fairfold.algorithms.cooccurrence.scorer import NEIGHBORS, PAIRS, POPULARITY, ROWS, CoOccurrenceArchitecture
from fairfold.methods.truncated import CURVE
from fairfold.privacy.gram import noise_edge
from fairfold.subspace.packed import FACTORS
from fairfold.typing import Weights

SMALL_MATRIX = 1_500  # items up to which all is done in double precision
MAX_SINGLE_RATIO = 2.0**11  # the largest number of D G D over λ up to which single precision distinguishes items
TYPICAL_LENGTH = 75.0  # length of a history by which λ follows the weight of pairs
# Directions multiplied at a time, size of a Krylov space against the number of eigenpairs, and restarts at most
KRYLOV_BLOCK, KRYLOV_FACTOR, MAX_RESTARTS = 32, 3, 40
EXHAUSTED = 0.25  # squared part of a direction in the known space above which it is rounding errors alone
# Residual of an eigenpair against its value. What the last pairs of a wide table miss, others like them hold.
TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-7}
MAX_PAIRS_PER_ITEM = 255  # pairs that are listed under an item: a byte counts them
ROWS_AT_ONCE = 256  # rows of a matrix searched at a time
LEAST_COLUMNS = 128  # of a table of items × columns, however many items there are
POPULAR_PAIRS = 0.0625  # power of the counts of a pair's items that its strength is multiplied by
NOISE_EDGES, NOISE_BETA = 2.0, 0.3  # λ over the edge of the noise, and β, under differential privacy
SymmetricMatrix = Tensor | DiagonalAndFactors | SparseRows
FEW_DIRECTIONS = 5  # directions above the noise below which a model is hardly better than popularity


class SolverSettings(NamedTuple):
    """What a model is solved with: λ, columns, β, weight of neighbors, number of items, weight of popularity."""

    ridge: float
    columns: float
    beta: float
    neighbor_weight: float
    items: float
    popularity_weight: float = 0.0

    def description(self) -> str:
        """The settings in a phrase."""
        neighbors = f"neighbours × {self.neighbor_weight:.2g}" if self.neighbor_weight else "no neighbours"
        popularity = f"popularity × {self.popularity_weight:.2g}" if self.popularity_weight else "no popularity"
        return f"λ = {self.ridge:.3g}, β = {self.beta:.2g}, {int(self.items):,} items, {neighbors}, {popularity}"


def scaled_ridge(ridge: float, exponent: float) -> float:
    """λ for pairs that weigh n^−exponent: as much larger than ``ridge``, for 1/n, as pairs of a usual history are.

    Long and short histories, and many users and few, want about the same (docs/default-recommender-evidence.md).
    """
    return ridge * float(TYPICAL_LENGTH ** (1 - exponent))


@dataclass(frozen=True)
class Precision:
    """D G D + λI, and its inverse P."""

    scales: Tensor  # D
    matrix: Tensor  # D G D + λI
    inverse: Tensor  # P
    roots: Tensor  # √P_jj

    @classmethod
    def of(cls, gram: Tensor, counts: Tensor, beta: float, ridge: float) -> "Precision":
        """From a co-occurrence matrix, which is overwritten, in its precision or a higher one."""
        scales = item_scales(counts, beta)
        largest = float((gram.diagonal() * scales.square()).max())
        double = len(gram) <= SMALL_MATRIX or largest > MAX_SINGLE_RATIO * ridge
        matrix = gram.double() if double else gram
        factors = scales.to(matrix.dtype)
        matrix.mul_(factors[:, None]).mul_(factors)
        matrix.diagonal().add_(ridge)
        cholesky = torch.linalg.cholesky(matrix)
        inverse = torch.cholesky_inverse(cholesky, out=cholesky)  # in place: two matrices at a time are enough
        return cls(scales, matrix, inverse, inverse.diagonal().double().sqrt())

    def correlations(self) -> Tensor:
        """S, in place of the inverse."""
        roots = self.roots.to(self.inverse.dtype)
        return self.inverse.div_(-roots[:, None]).div_(roots).fill_diagonal_(0)


def spectrum(precision: Precision | LowRankPrecision | LocalPrecision, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of S, falling, and their vectors as columns."""
    roots, local = precision.roots, isinstance(precision, LocalPrecision)
    if not count:
        dtype = precision.pairs[2].dtype if isinstance(precision, LocalPrecision) else precision.matrix.dtype
        return torch.empty(0, dtype=dtype), torch.empty(len(roots), 0, dtype=dtype)
    matrix: SymmetricMatrix
    if isinstance(precision, LocalPrecision):
        matrix, roots = precision.correlations, torch.ones_like(roots)
    else:
        matrix = precision.matrix
    values, vectors = top_eigenpairs(matrix, roots, count)
    signs = vectors.gather(0, vectors.abs().argmax(0)[None]).sign()
    return values if local else 1 - 1 / values, vectors * signs


def top_eigenpairs(
    matrix: Tensor | DiagonalAndFactors | SparseRows, roots: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The largest eigenpairs of diag(roots) · matrix · diag(roots), falling, by a block Krylov method with restarts."""
    scale = roots.to(matrix.dtype)[:, None]
    size = len(matrix)
    space = max(KRYLOV_FACTOR * count, count + 4 * KRYLOV_BLOCK)
    if size <= 2 * space:
        whole = matrix if isinstance(matrix, Tensor) else matrix @ torch.eye(size, dtype=matrix.dtype)
        values, vectors = torch.linalg.eigh(scale * whole * scale.T)
        return values[-count:].flip(0), vectors[:, -count:].flip(1)
    basis, images = torch.empty(2, size, space + KRYLOV_BLOCK, dtype=matrix.dtype)
    # The matrix within the space, upper half
    small = torch.zeros(space + KRYLOV_BLOCK, space + KRYLOV_BLOCK, dtype=matrix.dtype)
    source = torch.Generator().manual_seed(0)
    block = torch.linalg.qr(torch.randn(size, KRYLOV_BLOCK, dtype=matrix.dtype, generator=source)).Q
    filled = 0
    for _ in range(MAX_RESTARTS):
        while filled < space:
            here = slice(filled, filled + KRYLOV_BLOCK)
            filled += KRYLOV_BLOCK
            basis[:, here] = block
            images[:, here] = (matrix @ (block * scale)) * scale
            inside = basis[:, :filled].T @ images[:, here]
            small[:filled, here] = inside
            block = _orthogonal_block(basis[:, :filled], images[:, here], inside, source)
        values, rotation = torch.linalg.eigh(small[:filled, :filled], UPLO="U")
        values, rotation = values[-count - KRYLOV_BLOCK :], rotation[:, -count - KRYLOV_BLOCK :]
        vectors, image = basis[:, :filled] @ rotation, images[:, :filled] @ rotation
        residuals = (image - vectors * values)[:, -count:].norm(dim=0)
        rounding = 4 * torch.finfo(matrix.dtype).eps * values[-1]
        if bool((residuals <= TOLERANCE[matrix.dtype] * values[-count:] + rounding).all()):
            break
        filled = len(values)
        basis[:, :filled], images[:, :filled] = vectors, image
        small[:filled, :filled] = values.diag()
    return values[-count:].flip(0), vectors[:, -count:].flip(1)


def _orthogonal_block(basis: Tensor, block: Tensor, inside: Tensor, source: torch.Generator) -> Tensor:
    """A block made orthonormal, and orthogonal to a basis whose part in it is ``inside``; random where exhausted."""
    while True:
        block = torch.linalg.qr(block - basis @ inside).Q
        inside = basis.T @ block  # by rounding: little, or all where there was nothing but rounding
        exhausted = inside.square().sum(0) > EXHAUSTED
        if not bool(exhausted.any()):
            found: Tensor = torch.linalg.qr(block - basis @ inside).Q
            return found
        block[:, exhausted] = torch.randn(len(block), int(exhausted.sum()), dtype=block.dtype, generator=source)
        inside = basis.T @ block


def nearest_neighbors(gram: Tensor, counts: Tensor, count: int) -> Tensor:
    """The items most similar to every item, [count · items, 3]: item, neighbor, similarity; nearest of all first.

    With r_i = √(c_i / G_ii), r_i G_ij r_j estimates how many users have both: q_ij. Similarity is Jaccard's,
    q_ij / (c_i + c_j − q_ij). An item with fewer neighbors is listed with itself, which is ignored.
    """
    size = len(gram)
    users = counts.to(gram.dtype).clamp(min=1)
    roots = (users / gram.diagonal().clamp(min=1e-12)).sqrt()
    places = torch.arange(size).repeat(count, 1)
    values = gram.new_zeros(count, size)
    for start in range(0, size, ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        both = gram[here] * roots[here, None] * roots
        both.diagonal(start).zero_()
        found = (both / (users[here, None] + users - both).clamp(min=1e-12)).topk(min(count, size), dim=1)
        real = found.values.T > 0
        places[: len(real), here] = torch.where(real, found.indices.T, places[: len(real), here])
        values[: len(real), here] = torch.where(real, found.values.T, 0)
    items = torch.arange(size).repeat(count)
    return torch.stack([items.double(), places.view(-1).double(), values.view(-1).double()], 1)


def neighbor_list(near: Tensor, similarity: Tensor) -> Tensor:
    """Neighbors and similarities, [items, count], as rows like those of :func:`nearest_neighbors`."""
    items = torch.arange(len(near)).repeat(near.shape[1])
    return torch.stack([items.double(), near.T.reshape(-1).double(), similarity.T.reshape(-1).double()], 1)


def strongest_pairs(correlations: Tensor, counts: Tensor, count: int) -> Tensor:
    """The pairs with the largest |S_ij| (c_i c_j)^(1/16), [count, 3]: the rarer item (of at most 255), other, value."""
    weights = (counts.double().clamp(min=1) ** POPULAR_PAIRS).to(correlations.dtype)
    values, places = correlations.new_empty(0), torch.empty(0, dtype=torch.int64)
    least = 0.0
    for start in range(0, len(correlations), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        strength = correlations[start:stop, :stop].abs().mul_(weights[start:stop, None]).mul_(weights[:stop])
        first, second = (strength.tril_(start - 1) > least).nonzero(as_tuple=True)
        values = torch.cat([values, strength[first, second]])
        places = torch.cat([places, (first + start) * len(correlations) + second])
        values, best = values.topk(min(count, len(values)))
        places = places[best]
        least = float(values[-1]) if len(values) == count else 0.0
    rarer, other = torch.div(places, len(correlations), rounding_mode="floor"), places % len(correlations)
    return _pair_list(rarer, other, correlations[rarer, other], count)


def strongest_of(listed: Pairs, counts: Tensor, count: int) -> Tensor:
    """The strongest of some pairs: as :func:`strongest_pairs` of all."""
    rarer, other, values = listed
    weights = (counts.double().clamp(min=1) ** POPULAR_PAIRS).to(values.dtype)
    best = (values.abs() * weights[rarer] * weights[other]).topk(min(count, len(values))).indices
    return _pair_list(rarer[best], other[best], values[best], count)


def _pair_list(rarer: Tensor, other: Tensor, values: Tensor, count: int) -> Tensor:
    """Pairs as rows, padded with zeros to ``count``, of no item more than fit."""
    kept = _occurrence(rarer) < MAX_PAIRS_PER_ITEM
    rows = torch.stack([rarer.double(), other.double(), values.double()], dim=1)[kept]
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


def _occurrence(values: Tensor) -> Tensor:
    """How often each value occurs before its position."""
    order = values.argsort(stable=True)
    ascending = values[order]
    found = torch.empty_like(values)
    found[order] = torch.arange(len(values)) - torch.searchsorted(ascending, ascending)
    return found


def popularity_curve(counts: Tensor, users: int, chosen: SolverSettings) -> Tensor:
    """What popularity adds to a score, at the items 0, 1, 3, 7, …: the share of users, weighted by D like a history."""
    known = counts.double().clamp(min=1)
    shares = chosen.popularity_weight * (known / known.mean()) ** -chosen.beta * known / max(users, 1)
    return shares[(2 ** torch.arange(CURVE) - 1).clamp(max=len(shares) - 1)]


class LargeCatalogue:
    """The last sparse matrix of items: of other settings of the solver it is the same."""

    def __init__(self) -> None:
        self._packed: Tensor | None = None
        self._gram: SparseGram | None = None
        self._neighborhoods: Neighborhoods | None = None

    def gram(self, packed: Tensor, items: int) -> SparseGram:
        """The leading items' matrix of a sparse sum."""
        values = packed.values()
        same = self._packed is not None and self._packed.data_ptr() == values.data_ptr()
        if not same or self._gram is None or len(self._gram) != items:
            dtype = torch.float64 if items <= SMALL_MATRIX else torch.float32
            self._packed, self._neighborhoods = values, None
            self._gram = SparseGram.of(packed, items, dtype)
        return self._gram

    def neighborhoods(self, gram: SparseGram) -> Neighborhoods:
        """The related items of every item, by the last co-occurrence matrix; computed once for each matrix."""
        if self._neighborhoods is None:
            self._neighborhoods = gram.neighborhoods(gram.most_related(num_related(len(gram))))
        return self._neighborhoods


def item_scales(counts: Tensor, beta: float) -> Tensor:
    """Weights D of items by their numbers of users: popular items weigh less."""
    known = counts.double().clamp(min=1)
    return (known / known.mean()) ** -beta


def solve_model(
    gram: Tensor | SparseGram, counts: Tensor, chosen: SolverSettings, architecture: CoOccurrenceArchitecture
) -> Weights:
    """The model's tensors from a co-occurrence matrix, which is overwritten; items beyond it stay zero."""
    head, width = architecture.tables[ROWS]
    counts = counts[: len(gram)]
    found = Weights()
    wanted_neighbors = architecture.neighbors if chosen.neighbor_weight else 0
    precision: Precision | LowRankPrecision | LocalPrecision
    if isinstance(gram, Tensor):
        nearest = nearest_neighbors(gram, counts, wanted_neighbors)
        precision = Precision.of(gram, counts, chosen.beta, chosen.ridge)
    else:
        nearest = neighbor_list(*gram.most_similar(counts, wanted_neighbors))
        scales, users = item_scales(counts, chosen.beta), architecture.num_known_users
        if low_rank.is_exact(len(gram), users):
            precision = LowRankPrecision.of(gram, scales, low_rank.factorize(gram, scales, users), chosen.ridge)
        else:
            precision = LocalPrecision.of(architecture.catalogue.neighborhoods(gram), scales, chosen.ridge)
    if NEIGHBORS in architecture.dense:
        listed = torch.arange(head).double()[:, None].repeat(architecture.neighbors, 1, 3)
        listed[..., 2] = 0
        if wanted_neighbors:
            listed[:, : len(gram)] = nearest.view(len(listed), len(gram), 3)
            listed[..., 2] *= chosen.neighbor_weight
        found[NEIGHBORS] = listed.view(-1, 3)
    values, vectors = spectrum(precision, min(int(chosen.columns), len(gram)))
    rows = vectors * values.clamp(min=0).sqrt()
    into, out = precision.scales * precision.roots, 1 / precision.roots
    listed_pairs = architecture.dense[PAIRS][0]
    if isinstance(precision, Precision):
        pairs = strongest_pairs(precision.correlations(), counts, listed_pairs)
    elif isinstance(precision, LowRankPrecision):
        near = gram.most_similar(counts, low_rank.CANDIDATES)[0]  # type: ignore[union-attr]
        pairs = strongest_of(precision.correlations(near), counts, listed_pairs)
    else:
        pairs = strongest_of(precision.pairs, counts, listed_pairs)
    rarer, other = pairs[:, :2].long().T
    pairs[:, 2] *= out[rarer] * into[other]
    table = torch.zeros(head, width, dtype=rows.dtype)
    table[: len(rows), : FACTORS + rows.shape[1]] = torch.cat([into[:, None], out[:, None], rows], dim=1)
    found[POPULARITY] = popularity_curve(counts, architecture.num_known_users, chosen)
    return found | {ROWS: table, PAIRS: pairs}


def settings_under_noise(items: int, columns: int, noise: float) -> SolverSettings:
    """What a model is solved with under noise."""
    return SolverSettings(NOISE_EDGES * noise_edge(items, noise), columns, NOISE_BETA, 0.0, items)


def noise_notes(packed: Tensor, noise: float, items: int) -> list[str]:
    """A sentence on what noise has left of a sum; it follows from the sum, and costs no privacy."""
    gram = unpack_triangle(packed)
    above = int((torch.linalg.eigvalsh(gram.double()) > noise_edge(len(gram), noise)).sum())
    note = f"{len(gram):,} of {items:,} items are modeled, and {above} directions stand out of the noise."
    few = "These users are too few for this ε: what noise leaves is no better than popularity, and may be far worse."
    return [note if above >= FEW_DIRECTIONS else f"{note} {few}"]
