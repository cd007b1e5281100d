"""What a device computes between receiving ψ and sending ψ′: the paper's Algorithm 2.

A *local solver* takes what the device received and what it has (:class:`Device`) and returns what it learned. Only the
compact vectors leave the device; the user's own vectors stay.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.federation.projection import Hashed, Projection
from fairfold.federation.settings import Settings
from fairfold.federation.task import Task, Weights
from fairfold.kernels import ops
from fairfold.subspace import Subspace

BLOCK_ITEMS = 8_192
"""Items realised at a time where a solver walks the catalogue: the table itself is never made."""


@dataclass(frozen=True)
class Device:
    """One device in one round.

    Attributes:
        client: Its number.
        task: What it trains; its own samples are those of ``client``.
        projections: What it holds of every tensor.
        own: Its user's vectors, where they are private.
        generator: Its random numbers.
        round_number: Rounds done before this one.
        largest: What the largest devices of the round hold, for solvers that speak in their terms.
        passing: Rows of the server's table that pass by the device, where they are streamed.
    """

    client: int
    task: Task
    projections: dict[str, Projection]
    own: Weights
    generator: torch.Generator
    round_number: int = 0
    largest: dict[str, Projection] | None = None
    passing: Tensor | None = None


@dataclass(frozen=True)
class Trained:
    """What came of it: the compact vectors, which are sent, and the user's own, which are not.

    Attributes:
        compacts: ψ′; from a solver of sums that remember, their change (:func:`fairfold.federation.replies.change_of`).
        own: The user's vectors.
    """

    compacts: Weights
    own: Weights


LocalSolver = Callable[[Weights, Device, Settings], Trained]


def gradient(received: Weights, device: Device, settings: Settings) -> Trained:
    """E epochs of gradient steps inside the subspaces, with a fresh optimiser: F(S·ψ) minimised over ψ."""
    task, projections = device.task, device.projections
    compacts = {name: vector.clone().requires_grad_() for name, vector in received.items()}
    own = {name: vector.clone().requires_grad_() for name, vector in device.own.items()}
    optimiser = local_optimiser([*compacts.values(), *own.values()], settings)
    me = torch.tensor(device.client)
    for batch in task.batches(device.client, device.generator):
        users = [own[name] if name in own else projections[name].rows(compacts[name], me) for name in task.own]
        rows = [projections[name].rows(compacts[name], batch.items) for name in task.tables]
        dense = {name: projections[name].whole(compacts[name]) for name in task.dense}
        loss = task.losses(batch, dense, users, rows).mean()
        if settings.prox:
            loss = loss + 0.5 * settings.prox * _distance(compacts, received, projections)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return Trained(_detached(compacts), _detached(own))


def local_optimiser(parameters: list[Tensor], settings: Settings) -> torch.optim.Optimizer:
    """The device's optimiser, as torch has it."""
    if settings.local_optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=settings.local_step)
    if settings.local_optimiser == "adagrad":
        return torch.optim.Adagrad(parameters, lr=settings.local_step)
    return torch.optim.Adam(parameters, lr=settings.local_step)


def _distance(compacts: Weights, received: Weights, projections: dict[str, Projection]) -> Tensor:
    """‖S(ψ − ψ_received)‖²: norms live in the full space, where a slot counts as often as it has coordinates."""
    total = torch.zeros(())
    for name, compact in compacts.items():
        total = total + (projections[name].whole(compact) - projections[name].whole(received[name])).square().sum()
    return total


def _detached(weights: Weights) -> Weights:
    return {name: tensor.detach() for name, tensor in weights.items()}


def closed_form(received: Weights, device: Device, settings: Settings) -> Trained:
    """Solve the user's vector exactly, then take one step on the squared error over the whole catalogue.

    With items V (never realised), own items weighing 1 and all others w: u solves
    ((1 − w)·Σ⁺ v vᵀ + w·VᵀV + ridge·I) u = Σ⁺ v, and the gradient is g = w·V u uᵀ + Σ⁺ ((1 − w)·v·u − 1) uᵀ. The step
    is the *projected* one, the mean and not the sum of a slot's coordinates: what a step outside the subspace would
    leave inside it (tests/laws: equal to plain gradient descent where columns have unit length).
    """
    (name, compact), (own_name,) = next(iter(received.items())), device.task.own
    projection = device.projections[name]
    assert isinstance(projection, Hashed)
    subspace, weight = projection.subspace, settings.unobserved_weight
    mine = device.task.data.train.of(device.client)
    rows = subspace.recover_rows(compact, mine, settings.factors)
    user = solve_user(rows, gram(compact, subspace, settings.factors), settings)
    stream = subspace.stream(compact.dtype)
    for first, block in item_blocks(compact, subspace, settings.factors):
        gradient_block = weight * torch.outer(block @ user, user)
        here = mine[(mine >= first) & (mine < first + len(block))] - first
        gradient_block[here] += ((1 - weight) * (block[here] @ user) - 1)[:, None] * user
        stream.add(first * settings.factors, gradient_block.view(-1))
    return Trained({name: compact - settings.local_step * stream.finish()}, {own_name: user})


def solve_user(rows: Tensor, gram_matrix: Tensor, settings: Settings) -> Tensor:
    """The user's vector from the rows of their own items and the Gram matrix of all items: their own history alone."""
    weight = settings.unobserved_weight
    matrix = (1 - weight) * rows.T @ rows + weight * gram_matrix
    matrix.diagonal().add_(settings.ridge)
    solution: Tensor = torch.linalg.solve(matrix, rows.sum(0))
    return solution


def gram(compact: Tensor, subspace: Subspace, factors: int) -> Tensor:
    """VᵀV of all items, block by block."""
    total = torch.zeros(factors, factors, dtype=compact.dtype)
    for _, block in item_blocks(compact, subspace, factors):
        total.addmm_(block.T, block)
    return total


def item_blocks(compact: Tensor, subspace: Subspace, factors: int) -> Iterator[tuple[int, Tensor]]:
    """The item table a block at a time, each with the number of its first item."""
    num_items = subspace.full_size // factors
    for first in range(0, num_items, BLOCK_ITEMS):
        last = min(first + BLOCK_ITEMS, num_items)
        block = torch.empty((last - first) * factors, dtype=compact.dtype)
        ops.recover_range(subspace.layout, compact, first * factors, block)
        yield first, block.view(-1, factors)


SOLVERS: dict[str, LocalSolver] = {"closed_form": closed_form, "gradient": gradient}
