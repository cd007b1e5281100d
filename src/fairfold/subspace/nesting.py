"""How subspaces of different sizes lie inside each other, and what that saves.

The coordinates that share a slot form the blocks of a partition. Subspaces nest exactly when one partition is coarser
than the other, that is when the smaller one's slot is a function of the larger one's. Here that is so when

* both hash the same coordinates with the same hash, chunk and signs,
* whoever owns a slot in the smaller subspace owns one in the larger (``head`` grows), and
* the number of hashed slots of the smaller divides that of the larger.

Slots of the larger one then meet the smaller one in three runs, which is all that ``unfold`` and ``fold`` need::

    larger    | own slots of both | own slots of the larger only | hashed: r neighbours (blocks of chunk) ...
    smaller   | the same          | hashed by the smaller        | ... share one
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.errors import InvalidVector, NotNested
from fairfold.kernels import folding
from fairfold.kernels.hashing import Layout
from fairfold.subspace.checks import check_vector

if TYPE_CHECKING:
    from fairfold.subspace.subspace import Subspace


def hash_identity(layout: Layout) -> tuple[int, int, int, bool]:
    """All that decides where hashed coordinates go, but for the number of slots."""
    return layout.full_size, layout.chunk, layout.key, layout.signed


def obstacle(small: "Subspace", big: "Subspace") -> str | None:
    """Why ``small`` does not lie inside ``big``, or None if it does."""
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
        _require(small, big)
    return chain


def _require(small: "Subspace", big: "Subspace") -> None:
    reason = obstacle(small, big)
    if reason is not None:
        raise NotNested(
            f"sizes {small.size} and {big.size} used together",
            f"nested subspaces, but {reason}",
            "Take the sizes from one chain: fairfold.subspace.nested_subspaces.",
        )


@torch.no_grad()
def unfold(small: "Subspace", big: "Subspace", compact: Tensor) -> Tensor:
    """The compact vector of ``big`` for the full vector that ``compact`` stands for in ``small``."""
    check_vector("compact", compact, small.size)
    _require(small, big)
    if small == big:
        return compact.clone()
    if big.is_full:
        return small.recover(compact)
    if small.orthonormal:
        compact = compact / small._column_lengths(compact)
    out = folding.unfold(small.layout, big.layout, compact)
    if big.orthonormal:
        out *= big._column_lengths(out)
    return out


@torch.no_grad()
def fold(big: "Subspace", small: "Subspace", sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and counts at the size of ``small``, from those at the size of ``big``.

    Sums fold, means do not: the mean of two means is another number when the slots hold unequally many coordinates.
    """
    check_vector("sums", sums, big.size)
    if counts.shape != (big.size,) or counts.is_floating_point():
        raise InvalidVector(
            f"counts of shape {tuple(counts.shape)}, {counts.dtype}",
            f"whole numbers of shape ({big.size},)",
            "Take sums and counts from one call of sums_and_counts.",
        )
    _require(small, big)
    if small == big:
        return sums.clone(), counts.clone()
    return folding.fold(big.layout, small.layout, sums), folding.fold(big.layout, small.layout, counts)


@torch.no_grad()
def reduce_all(full: Tensor, subspaces: Sequence["Subspace"]) -> dict["Subspace", Tensor]:
    """Reduce once for a whole chain: one pass over the full vector, then sums and counts folded size by size."""
    chain = require_nested(subspaces)
    compacts: dict[Subspace, Tensor] = {}
    hashed = [subspace for subspace in chain if not subspace.is_full]
    if len(hashed) == 1:  # nothing to fold: no counts need to be kept
        return {subspace: subspace.reduce(full) for subspace in chain}
    above: Subspace | None = None
    for subspace in reversed(chain):
        if subspace.is_full:
            compacts[subspace] = subspace.reduce(full)
            continue
        if above is None:
            sums, counts = subspace.sums_and_counts(full)
        else:
            sums, counts = fold(above, subspace, sums, counts)
        above = subspace
        compacts[subspace] = subspace._divided(sums.clone(), counts).to(full.dtype)
    return compacts
