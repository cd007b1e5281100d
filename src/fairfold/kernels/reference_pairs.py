"""Sums of pairs of items that occur together, in plain torch: the specification."""

import torch
from torch import Tensor

PAIRS_AT_ONCE = 1 << 20
"""Pairs that are listed at a time."""


def pair_sums(items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor, leading: int) -> Tensor:
    """The packed sum over histories of weight · x xᵀ over the leading items, added up in double precision.

    History u is ``items[begins[u]:ends[u]]`` and ascends; the pair (i, j), i ≤ j, stands at j(j + 1)/2 + i.
    """
    total = torch.zeros(leading * (leading + 1) // 2, dtype=torch.float64)
    lengths = leading_lengths(items, begins, ends, leading)
    batch = (lengths * (lengths + 1) // 2).cumsum(0) // PAIRS_AT_ONCE
    for some in range(int(batch[-1]) + 1 if len(batch) else 0):
        mine = (batch == some).nonzero().flatten()
        _add(total, items, begins[mine], lengths[mine], weights[mine].double())
    return total.to(weights.dtype)


def leading_lengths(items: Tensor, begins: Tensor, ends: Tensor, leading: int) -> Tensor:
    """How many of each history's items are among the leading ones."""
    below = torch.zeros(len(items) + 1, dtype=torch.int32)
    torch.cumsum(items < leading, 0, dtype=torch.int32, out=below[1:])
    return (below[ends] - below[begins]).long()


def _add(total: Tensor, items: Tensor, begins: Tensor, lengths: Tensor, weights: Tensor) -> None:
    """Pair by pair: an item with itself and all before it in the same history."""
    start = torch.repeat_interleave(begins, lengths)
    before = _counted(lengths)
    later = torch.repeat_interleave(torch.arange(len(start)), before + 1)
    column = items[start[later] + before[later]]
    place = column * (column + 1) // 2 + items[start[later] + _counted(before + 1)]
    total.index_add_(0, place, torch.repeat_interleave(weights, lengths)[later])


def _counted(lengths: Tensor) -> Tensor:
    """0, 1, … up to each length, one after another."""
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
