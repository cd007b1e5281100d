"""What a device computes between receiving ψ and sending ψ′: the paper's Algorithm 2.

A *local solver* is a function of the compact vector, the subspace, the user's own items and the user's private vector.
It returns the new compact vector and the new private vector, of which only the first leaves the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fairfold.federation.settings import Settings
from fairfold.kernels import ops
from fairfold.subspace import Subspace

BLOCK_ITEMS = 8_192
"""Items realised at a time where a solver walks the catalogue: the table itself is never made."""


@dataclass(frozen=True)
class Device:
    """What one device holds in a round: its subspace, its own data and its private vector."""

    subspace: Subspace
    num_items: int
    items: Tensor
    user: Tensor
    generator: torch.Generator


LocalSolver = Callable[[Tensor, Device, Settings], tuple[Tensor, Tensor]]


def closed_form(compact: Tensor, device: Device, settings: Settings) -> tuple[Tensor, Tensor]:
    """Solve the user's vector exactly, then take one step on the squared error over the whole catalogue.

    With items V (never realised), own items weighing 1 and all others w: u solves
    ((1 − w)·Σ⁺ v vᵀ + w·VᵀV + ridge·I) u = Σ⁺ v, and the gradient is g = w·V u uᵀ + Σ⁺ ((1 − w)·v·u − 1) uᵀ. The step
    is the *projected* one, the mean and not the sum of a slot's coordinates: what a step outside the subspace would
    leave inside it (tests/laws: equal to plain gradient descent where columns have unit length).
    """
    weight, own = settings.unobserved_weight, device.items
    rows = device.subspace.recover_rows(compact, own, settings.factors)
    user = solve_user(rows, gram(compact, device, settings), settings)
    stream = device.subspace.stream(compact.dtype)
    for first, block in item_blocks(compact, device, settings):
        gradient = weight * torch.outer(block @ user, user)
        mine = own[(own >= first) & (own < first + len(block))] - first
        gradient[mine] += ((1 - weight) * (block[mine] @ user) - 1)[:, None] * user
        stream.add(first * settings.factors, gradient.view(-1))
    return compact - settings.local_step * stream.finish(), user


def solve_user(rows: Tensor, gram_matrix: Tensor, settings: Settings) -> Tensor:
    """The user's vector from the rows of their own items and the Gram matrix of all items: their own history alone."""
    weight = settings.unobserved_weight
    matrix = (1 - weight) * rows.T @ rows + weight * gram_matrix
    matrix.diagonal().add_(settings.ridge)
    solution: Tensor = torch.linalg.solve(matrix, rows.sum(0))
    return solution


def gram(compact: Tensor, device: Device, settings: Settings) -> Tensor:
    """VᵀV of all items, block by block."""
    total = torch.zeros(settings.factors, settings.factors, dtype=compact.dtype)
    for _, block in item_blocks(compact, device, settings):
        total.addmm_(block.T, block)
    return total


def item_blocks(compact: Tensor, device: Device, settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """The item table a block at a time, each with the number of its first item."""
    factors = settings.factors
    for first in range(0, device.num_items, BLOCK_ITEMS):
        last = min(first + BLOCK_ITEMS, device.num_items)
        block = torch.empty((last - first) * factors, dtype=compact.dtype)
        ops.recover_range(device.subspace.layout, compact, first * factors, block)
        yield first, block.view(-1, factors)


def gradient(compact: Tensor, device: Device, settings: Settings) -> tuple[Tensor, Tensor]:
    """E epochs of stochastic gradient descent inside the subspace on the pairwise (BPR) loss, as in the paper."""
    compact, user = compact.clone(), device.user.clone()
    for _ in range(settings.local_epochs):
        order = torch.randperm(len(device.items), generator=device.generator)
        for positives in torch.split(device.items[order], settings.batch_size):
            negatives = torch.randint(device.num_items, positives.shape, generator=device.generator)
            both = torch.cat([positives, negatives])
            rows = device.subspace.recover_rows(compact, both, settings.factors)
            better, worse = rows.chunk(2)
            # d/dx of -log(sigmoid(x)), x being by how much the touched item leads.
            slope = (-functional.sigmoid(-(better - worse) @ user) / len(positives))[:, None]
            row_gradient = torch.cat([slope * user, -slope * user])
            user = user - settings.local_step * (slope * (better - worse)).sum(0)
            compact -= settings.local_step * device.subspace.accumulate_rows(row_gradient, both)
    return compact, user


SOLVERS: dict[str, LocalSolver] = {"closed_form": closed_form, "gradient": gradient}
