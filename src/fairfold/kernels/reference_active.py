"""Training on the slots that are touched, in plain torch: the specification.

A client's optimiser starts fresh each round, so a slot that no row of the round touches has no gradient and no moments
and does not move. Work on the *active* slots alone gives the numbers of dense training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.kernels.hashing import Layout, slots_and_signs
from fairfold.kernels.reference import row_coordinates

BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
ADAGRAD_EPSILON = 1e-10


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of a batch in increasing order, each once, and the signed values summed into each."""
    slots, signs = slots_and_signs(layout, row_coordinates(rows, values.shape[1]))
    touched, inverse = torch.unique(slots, return_inverse=True)
    sums = torch.zeros(len(touched), dtype=values.dtype, device=values.device)
    sums.index_add_(0, inverse.reshape(-1), (values * signs).reshape(-1))
    return touched, sums


def active_slots(layout: Layout, rows: Tensor, row_size: int) -> Tensor:
    """The slots of all rows of a round, in increasing order, each once (int64)."""
    slots, _ = slots_and_signs(layout, row_coordinates(rows, row_size))
    active: Tensor = torch.unique(slots)
    return active


def number(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Equal keys numbered alike, in the order of their first appearance: numbers (int32), and the key of each."""
    flat = keys.reshape(-1).long()
    distinct, inverse = torch.unique(flat, return_inverse=True)
    first = torch.full_like(distinct, len(flat))
    first.scatter_reduce_(0, inverse, torch.arange(len(flat), device=flat.device), "amin")
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=flat.device)
    return rank[inverse].to(torch.int32).view(keys.shape), distinct[order]


def positions(layout: Layout, rows: Tensor, row_size: int, active: Tensor) -> tuple[Tensor, Tensor]:
    """Where each coordinate of the rows stands in ``active``, and its sign: int32 and int8, (len(rows), row_size)."""
    slots, signs = slots_and_signs(layout, row_coordinates(rows, row_size))
    found = torch.searchsorted(active, slots)
    present = found < len(active)
    if not bool(present.all()) or not bool((active[found] == slots).all()):
        raise InvalidVector(
            "a slot or position outside of the active ones",
            "rows that took part in active_slots",
            "Make the list of active slots from all rows of the round.",
        )
    return found.to(torch.int32), signs


def recover_positions(source: Tensor, found: Tensor, signs: Tensor) -> Tensor:
    """The values of rows, from the vector gathered at the active slots."""
    return source[found.long()] * signs.to(source.dtype)


def recover_lines(source: Tensor, found: Tensor, signs: Tensor, lines: Tensor) -> Tensor:
    """:func:`recover_positions` of chosen lines of ``found`` and ``signs``, shape (*lines.shape, row length)."""
    return recover_positions(source, found[lines], signs[lines])


def accumulate_positions(values: Tensor, found: Tensor, signs: Tensor, sums: Tensor) -> None:
    """Add the signed values of rows into ``sums``, which has one entry an active slot, in place."""
    sums.index_add_(0, found.reshape(-1), (values.to(sums.dtype) * signs).reshape(-1))


def accumulate_lines(values: Tensor, found: Tensor, signs: Tensor, lines: Tensor, sums: Tensor) -> None:
    """:func:`accumulate_positions` at chosen lines of ``found`` and ``signs``."""
    accumulate_positions(values, found[lines], signs[lines], sums)


def adagrad_slots(compact: Tensor, slots: Tensor, gradient: Tensor, state: Tensor, rate: float, epsilon: float) -> None:
    """One step of ``torch.optim.Adagrad`` on distinct slots of ``compact``, in place; one gradient and state a slot."""
    state.addcmul_(gradient, gradient)
    compact[slots] -= rate * gradient / (state.sqrt() + epsilon)


def adam_slots(
    compact: Tensor,
    slots: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int,
    rate: float,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    """Step number ``step`` (from 1) of ``torch.optim.Adam`` on distinct slots of ``compact``, in place."""
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    denominator = square.sqrt() / (1 - betas[1] ** step) ** 0.5 + epsilon
    compact[slots] -= rate / (1 - betas[0] ** step) * mean / denominator


def step_prefix(
    values: Tensor, gradient: Tensor, moments: Sequence[Tensor], rates: Tensor, moving: Tensor, number: Tensor
) -> None:
    """One step of SGD, Adagrad or Adam (0, 1 or 2 moments) on a front part of the values; its gradient becomes 0.

    Args:
        values: Moved in place.
        gradient: Of the values.
        moments: Kept between steps, from zeros.
        rates: A line a step: its size, for Adam already divided by 1 - β₁ᵗ, and the root of 1 - β₂ᵗ (1 for the others).
        moving: How many values move, a number a step.
        number: Which step it is, from 0.
    """
    step = int(number)
    end = int(moving[step])
    rate, root = rates[step].tolist()
    part, slope, kept = values[:end], gradient[:end], [moment[:end] for moment in moments]
    part.sub_(direction(slope, kept, root), alpha=rate)
    slope.zero_()


def direction(slope: Tensor, moments: Sequence[Tensor], root: float) -> Tensor:
    """Where SGD, Adagrad or Adam (0, 1 or 2 moments, written) goes for a gradient, per unit of the rate."""
    if len(moments) == 1:
        moments[0].addcmul_(slope, slope)
        return slope / (moments[0].sqrt() + ADAGRAD_EPSILON)
    if len(moments) == 2:
        moments[0].lerp_(slope, 1 - BETAS[0])
        moments[1].mul_(BETAS[1]).addcmul_(slope, slope, value=1 - BETAS[1])
        return moments[0] / (moments[1].sqrt() / root + ADAM_EPSILON)
    return slope
