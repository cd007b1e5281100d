"""Sums of pairs: what histories say of items that occur together, in the packed triangle of a symmetric matrix.

The pair (i, j) with i ≤ j stands at j(j + 1)/2 + i: column after column. So the pairs among the leading h items are the
first h(h + 1)/2 numbers, whatever comes behind: blocks of all sizes nest as prefixes of one vector.

A user who has n items weighs each of their n² pairs 1/n, rounded down to a multiple of 2⁻¹⁶. Sums of such numbers below
256 are exact in single precision, so no order and no grouping changes them by a bit; and the matrix of a user, whose
n² equal numbers have the norm n · weight, never exceeds norm 1.
"""

from math import isqrt

import torch
from torch import Tensor

from fairfold.kernels import ops
from fairfold.protocol.words import numbers_of

UNIT = 1 << 16

BLOCK = 256
"""Columns that are mirrored at a time."""


def size_of(items: int) -> int:
    """Numbers of the triangle over so many items."""
    return items * (items + 1) // 2


def items_of(size: int) -> int:
    """The same the other way round: the most items whose triangle has at most so many numbers."""
    return (isqrt(8 * size + 1) - 1) // 2


def weights_of(lengths: Tensor) -> Tensor:
    """What a pair of users with so many items weighs: 1/n, as a multiple of the unit."""
    return (UNIT // lengths.clamp(min=1)).clamp(min=1).to(torch.get_default_dtype()) / UNIT


def among(items: Tensor, lengths: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Some of the items of histories, one after another, and the lengths that are left."""
    user = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return items[which], torch.bincount(user[which], minlength=len(lengths))


def pair_sums(histories: list[Tensor], weights: Tensor, items: int) -> Tensor:
    """The packed sum over users of weight · x xᵀ over the leading items; histories ascend."""
    lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
    ends = lengths.cumsum(0)
    together = torch.cat([torch.empty(0, dtype=torch.int64), *histories])
    return ops.pair_sums(together, ends - lengths, ends, weights, items)


def frobenius(packed: Tensor) -> float:
    """Norm of the symmetric matrix: what stands off the diagonal counts twice."""
    numbers = numbers_of(packed)
    if packed.is_sparse:
        places = packed.coalesce().indices()[0]
        columns = ((8 * places + 1).double().sqrt() - 1).div(2).long()
        diagonal = numbers[places == columns * (columns + 3) // 2].double()
    else:
        items = torch.arange(items_of(len(packed)))
        diagonal = packed[torch.div(items * (items + 3), 2, rounding_mode="floor")].double()
    squares = 2 * float(torch.dot(numbers, numbers)) - float(diagonal.square().sum())
    return float(max(squares, 0.0) ** 0.5)


def matrix_of(packed: Tensor) -> Tensor:
    """The symmetric matrix."""
    items = items_of(len(packed))
    full = packed.new_zeros(items, items)
    for column in range(items):
        full[column, : column + 1] = packed[size_of(column) : size_of(column + 1)]
    for start in range(0, items, BLOCK):  # no second matrix on the way
        rows = full[start : start + BLOCK]
        full[:start, start : start + BLOCK] = rows[:, :start].T
        corner = rows[:, start : start + BLOCK]
        corner += corner.tril(-1).T
    return full
