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

from fairfold.errors import NotNested
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout

if TYPE_CHECKING:
    from fairfold.subspace.subspace import Subspace


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
        require(small, big)
    return chain


def require(small: "Subspace", big: "Subspace") -> None:
    """Refuse ``small`` if it does not lie inside ``big``."""
    reason = obstacle(small, big)
    if reason is not None:
        given, remedy = f"sizes {small.size} and {big.size} used together", "fairfold.subspace.nested_subspaces"
        raise NotNested(given, f"nested subspaces, but {reason}", f"Take the sizes from one chain: {remedy}.")


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
    """Sums (or counts, int32) at the size of ``small`` from those at the size of ``big``, which ``small`` nests in.

    Counts of owned slots are 1 each, so for counts the owned slots that ``small`` hashes are counted, not summed.
    """
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
