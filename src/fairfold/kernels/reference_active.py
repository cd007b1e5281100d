"""Training on the slots that are touched, in plain torch: the specification.

A client's optimiser starts fresh each round, so a slot that no row of the round touches has no gradient and no moments
and does not move. Work on the *active* slots alone gives the numbers of dense training.
"""

import torch
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.kernels.hashing import Layout, slots_and_signs
from fairfold.kernels.reference import row_coordinates


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


def accumulate_positions(values: Tensor, found: Tensor, signs: Tensor, sums: Tensor) -> None:
    """Add the signed values of rows into ``sums``, which has one entry an active slot, in place."""
    sums.index_add_(0, found.reshape(-1), (values.to(sums.dtype) * signs).reshape(-1))


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
