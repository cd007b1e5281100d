"""Sums of pairs: what histories say of items that occur together, in the packed triangle of a symmetric matrix.

The pair (i, j) with i ≤ j stands at j(j + 1)/2 + i: column after column. So the pairs among the leading h items are the
first h(h + 1)/2 numbers, whatever comes behind: blocks of all sizes nest as prefixes of one vector.

A user who has n items weighs each of their n² pairs 1/n, rounded down to a multiple of 2⁻¹⁶. Sums of such numbers below
256 are exact in single precision, so no order and no grouping changes them by a bit; and the matrix of a user, whose
n² equal numbers have the norm n · weight, never exceeds norm 1.
"""

from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor

UNIT = 1 << 16
PAIRS_AT_ONCE = 1 << 20
"""Pairs listed at a time, and numbers of a block of dense rows."""

HEAVY = 0.07
"""Whose history is this share of all items has their pairs from a dense product: cheaper than a list of them."""

BLOCK = 256
"""Columns of such a product at a time: the matrix itself is never made."""


def size_of(items: int) -> int:
    """Numbers of the triangle over so many items."""
    return items * (items + 1) // 2


def items_of(size: int) -> int:
    """The same the other way round: the most items whose triangle has at most so many numbers."""
    return (isqrt(8 * size + 1) - 1) // 2


def weights_of(lengths: Tensor) -> Tensor:
    """What a pair of users with so many items weighs: 1/n, as a multiple of the unit."""
    return (UNIT // lengths.clamp(min=1)).clamp(min=1).to(torch.get_default_dtype()) / UNIT


def pair_sums(histories: list[Tensor], weights: Tensor, items: int) -> Tensor:
    """The packed sum over users of weight · x xᵀ over the leading items; histories ascend."""
    mine = [history[: int(torch.searchsorted(history, items))] for history in histories]
    total = torch.zeros(size_of(items), dtype=weights.dtype)
    heavy = [place for place, history in enumerate(mine) if len(history) > max(HEAVY * items, 8)]
    dense = set(heavy) if len(heavy) > 1 else set()
    for places in _batches(mine, [place for place in range(len(mine)) if place not in dense and len(mine[place])]):
        _add_listed(total, [mine[place] for place in places], weights[places])
    step = max(1, PAIRS_AT_ONCE * 16 // items)
    for start in range(0, len(heavy) if dense else 0, step):
        some = heavy[start : start + step]
        _add_dense(total, [mine[place] for place in some], weights[some], items)
    return total


def _batches(histories: list[Tensor], places: list[int]) -> Iterator[list[int]]:
    """Users whose pairs are listed together."""
    batch, listed = list[int](), 0
    for place in places:
        many = size_of(len(histories[place]))
        if batch and listed + many > PAIRS_AT_ONCE:
            yield batch
            batch, listed = [], 0
        batch.append(place)
        listed += many
    if batch:
        yield batch


def _add_listed(total: Tensor, histories: list[Tensor], weights: Tensor) -> None:
    """Pair by pair: an item with itself and all before it in the same history."""
    lengths = torch.tensor([len(history) for history in histories])
    items, first = torch.cat(histories), torch.cumsum(lengths, 0) - lengths
    start = torch.repeat_interleave(first, lengths)
    before = torch.arange(len(items)) - start + 1
    later = torch.repeat_interleave(torch.arange(len(items)), before)
    nth = torch.arange(len(later)) - torch.repeat_interleave(torch.cumsum(before, 0) - before, before)
    column = items[later]
    place = torch.div(column * (column + 1), 2, rounding_mode="floor") + items[start[later] + nth]
    total.index_add_(0, place, torch.repeat_interleave(weights, lengths)[later])


def _add_dense(total: Tensor, histories: list[Tensor], weights: Tensor, items: int) -> None:
    """By products of dense columns, a block of them at a time."""
    rows = torch.zeros(len(histories), items, dtype=total.dtype)
    owner = torch.repeat_interleave(torch.arange(len(histories)), torch.tensor([len(one) for one in histories]))
    rows[owner, torch.cat(histories)] = 1
    for start in range(0, items, BLOCK):
        stop = min(start + BLOCK, items)
        block = (rows[:, start:stop] * weights[:, None]).T @ rows[:, :stop]
        for column in range(start, stop):
            total[size_of(column) : size_of(column + 1)] += block[column - start, : column + 1]


def frobenius(packed: Tensor) -> float:
    """Norm of the symmetric matrix: what stands off the diagonal counts twice."""
    items = torch.arange(items_of(len(packed)))
    diagonal = packed[torch.div(items * (items + 3), 2, rounding_mode="floor")].double()
    squares = 2 * float(torch.dot(packed, packed)) - float(diagonal.square().sum())
    return float(max(squares, 0.0) ** 0.5)


def matrix_of(packed: Tensor) -> Tensor:
    """The symmetric matrix in double precision."""
    items = items_of(len(packed))
    full = torch.zeros(items, items, dtype=torch.float64)
    for column in range(items):
        full[column, : column + 1] = packed[size_of(column) : size_of(column + 1)]
        full[:column, column] = full[column, :column]
    return full
