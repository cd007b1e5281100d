"""Nesting of subspaces of different sizes: when one lies inside another, and sums over nested sizes.

The coordinates that share a slot form the blocks of a partition. Subspaces nest exactly when one partition is coarser
than the other, that is when the smaller one's slot is a function of the larger one's. Here that is so when

* both hash the same coordinates with the same hash, chunk and signs,
* coordinates that own a slot in the smaller subspace own one in the larger (``head`` grows), and
* the number of hashed slots of the smaller divides that of the larger.

Slots of the larger one then meet the smaller one in three runs, which is all that ``unfold`` and ``fold`` need::

    larger    | own slots of both | own slots of the larger only | hashed: r adjacent (blocks of chunk) ...
    smaller   | the same          | hashed by the smaller        | ... share one
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.errors import InvalidVector, NotNested
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout
from fairfold.kernels.reference import SUM_DTYPE
from fairfold.subspace.checks import check_vector

if TYPE_CHECKING:
    from fairfold.subspace.subspace import Subspace


def nesting_obstacle(small: "Subspace", big: "Subspace") -> str | None:
    """Say why ``small`` does not lie inside ``big``; None if it does."""
    if small.full_size != big.full_size:
        return f"they are of different full spaces ({small.full_size} and {big.full_size} coordinates)"
    if big.is_full:
        return None  # every subspace lies in the full space
    if small.orthonormal != big.orthonormal:
        return "one has columns of unit length and the other has not"
    if small.size > big.size:
        return f"size {small.size} is larger than {big.size}"
    if not small.shares_hash(big):
        return "they differ in seed, chunk or signs"
    if small.head > big.head:
        return f"{small.head} coordinates own a slot in the smaller, only {big.head} in the larger"
    if big.layout.tail % small.layout.tail:
        return f"{small.layout.tail} hashed slots do not divide {big.layout.tail}"
    return None


def require_nested(subspaces: Iterable["Subspace"]) -> list["Subspace"]:
    """The distinct subspaces from small to large, each inside the next; refused if they are not such a chain."""
    chain = sorted(set(subspaces), key=lambda subspace: (subspace.size, subspace.head))
    for small, big in pairwise(chain):
        require(small, big)
    return chain


def require(small: "Subspace", big: "Subspace") -> None:
    """Refuse ``small`` if it does not lie inside ``big``."""
    reason = nesting_obstacle(small, big)
    if reason is not None:
        given = f"sizes {small.size} and {big.size} used together"
        remedy = "Take the sizes from one chain: fairfold.subspace.nested_subspaces."
        raise NotNested(given, f"nested subspaces, but {reason}", remedy)


@torch.no_grad()
def reduce_all(full: Tensor, subspaces: Sequence["Subspace"], *, trusted: bool = False) -> dict["Subspace", Tensor]:
    """Reduce once for a whole chain: one pass over the full vector, then sums and counts folded size by size.

    Example:
        >>> import torch
        >>> from fairfold.subspace import nested_subspaces
        >>> chain = nested_subspaces(1_024, ["4x", "16x"])
        >>> reduced = reduce_all(torch.ones(1_024), chain)
        >>> [tuple(reduced[subspace].shape) for subspace in chain]
        [(256,), (64,)]
    """
    chain = require_nested(subspaces)
    compacts: dict[Subspace, Tensor] = {}
    hashed = [subspace for subspace in chain if not subspace.is_full]
    if len(hashed) == 1:  # nothing to fold: no counts need to be kept
        return {subspace: subspace.reduce(full, trusted=trusted) for subspace in chain}
    above: Subspace | None = None
    for subspace in reversed(chain):
        if subspace.is_full:
            compacts[subspace] = subspace.reduce(full, trusted=trusted)
            continue
        if above is None:
            sums, counts = subspace.sums_and_counts(full, trusted=trusted)
        else:
            sums, counts = above.fold(sums, counts, subspace, trusted=True)
        above = subspace
        compacts[subspace] = subspace._divided(sums.clone(), counts).to(full.dtype)
    return compacts


def folded(big: Layout, small: Layout, sums: Tensor) -> Tensor:
    """Sums (or counts, int32) at the size of ``small`` from those at the size of ``big``, which ``small`` nests in."""
    low, high = small.head, big.head
    out = torch.zeros(small.size, dtype=sums.dtype, device=sums.device)
    out[:low] = sums[:low]
    if big.tail:
        out[low:] = ops.fold_groups(sums[high:], big.tail // small.tail, small.chunk)
    if sums.is_floating_point():
        ops.accumulate_range(small, sums[low:high], low, out)
    else:
        ops.count_range(small, low, high, out)
    return out


def unfolded(small: Layout, big: Layout, compact: Tensor) -> Tensor:
    """The compact vector of ``big`` that stands for the same full vector."""
    low, high = small.head, big.head
    target = torch.empty(big.size, dtype=compact.dtype, device=compact.device)
    target[:low] = compact[:low]
    ops.recover_range(small, compact, low, target[low:high])
    if big.tail:
        ops.unfold_groups(compact[low:], big.tail // small.tail, small.chunk, target[high:])
    return target


class Sums:
    """The weighted sum of compact vectors, one running total per size.

    One law carries the design: recovery is linear, and S_small·ψ = S_big·unfold(ψ). Totals are kept per size, unfolded
    upwards size by size, and recovered to the full space once, whatever the number of devices. ``a + b`` is the value
    that the devices of both would have given together.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.totals: dict[Subspace, Tensor] = {}

    @torch.no_grad()
    def add(self, subspace: "Subspace", compact: Tensor, weight: float = 1.0) -> None:
        """Add one client's vector with its weight (p_i in the paper, not yet normalized)."""
        check_vector("compact", compact, subspace.size)
        if not 0 <= weight < float("inf"):
            raise InvalidVector(f"weight={weight}", "a finite weight >= 0", "Use the number of samples, or 1.")
        total = self.totals.get(subspace)
        if total is None:
            total = torch.zeros(subspace.size, dtype=SUM_DTYPE[compact.dtype], device=compact.device)
            self.totals[subspace] = total
        total.add_(compact.to(total.dtype), alpha=weight)
        self.weight += weight

    @torch.no_grad()
    def add_sum(self, subspace: "Subspace", total: Tensor, weight: float) -> None:
        """Add the weighted sum of several clients' vectors, checked before, and their weight; it is only read."""
        check_vector("total", total, subspace.size, trusted=True)
        mine = self.totals.get(subspace)
        self.totals[subspace] = total.to(SUM_DTYPE[total.dtype]) if mine is None else mine + total
        self.weight += weight

    def __add__(self, other: "Sums") -> "Sums":
        result = Sums()
        result.weight = self.weight + other.weight
        for part in (self, other):
            for subspace, total in part.totals.items():
                mine = result.totals.get(subspace)
                result.totals[subspace] = total.clone() if mine is None else mine.add_(total)
        return result

    @torch.no_grad()
    def mean(self) -> tuple["Subspace", Tensor]:
        """The weighted mean, in the largest subspace present: recover it to have it in the full space."""
        if not self.totals or self.weight == 0:
            raise InvalidVector("no updates of positive weight", "at least one", "Keep the model as it is.")
        chain = require_nested(self.totals)
        carried = self.totals[chain[0]]
        if len(chain) == 1:
            return chain[0], carried / self.weight
        for below, subspace in pairwise(chain):
            carried = below.unfold(carried, subspace, trusted=True).add_(self.totals[subspace])
        return chain[-1], carried.div_(self.weight)

    def recover(self) -> Tensor:
        """The weighted mean in the full space: Σ pᵢ Sᵢψᵢ with Σ pᵢ = 1."""
        largest, mean = self.mean()
        return mean if largest.is_full and not largest.orthonormal else largest.recover(mean, trusted=True)
