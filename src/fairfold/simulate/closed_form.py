"""A round of the closed-form solver, all clients of a size at once: the numbers of ``loop`` up to rounding.

The step of a client is linear in its user's outer product: Σ over clients of w·V u uᵀ is w·V·(Σ u uᵀ), a d × d matrix
whatever the cohort. So a size's table is recovered once, walked once, and reduced once; what is left for each client
is a solve with its own items.
"""

import torch
from torch import Tensor

from fairfold.federation.aggregate import RoundTotals, ServerState, aggregate
from fairfold.federation.projection import Hashed, Projection
from fairfold.federation.replies import Rejections, fault_of, problem_with, spoil
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.send import send
from fairfold.federation.task import Weights
from fairfold.federation.train import Device, closed_form, solve_user
from fairfold.simulate.federation import Federation


def run_round(state: ServerState, private: Weights, federation: Federation, rejections: Rejections) -> ServerState:
    """One round; see :func:`fairfold.simulate.loop.run_round`."""
    settings, number = federation.settings, state.round_number
    assignments = federation.assignments(number)
    cohort = federation.cohort(number)
    totals = RoundTotals(state.full)
    for group, received in enumerate(send(state.full, assignments)):
        projections = assignments[group].projections
        clients = cohort[federation.group[cohort] == group].tolist()
        if projections is None or received is None or not clients:
            continue
        answering = [
            client for client in clients if _answers(client, received, projections, federation, number, rejections)
        ]
        _add_group(answering, received, projections, private, federation, totals)
        for client in set(clients) - set(answering):  # they learned, although nobody heard of it
            _add_group([client], received, projections, private, federation, RoundTotals(state.full))
    return aggregate(state, totals, settings)


def _answers(
    client: int,
    received: Weights,
    projections: dict[str, Projection],
    federation: Federation,
    number: int,
    rejections: Rejections,
) -> bool:
    """Whether this client's reply arrives and can be used; one that fails is made in full and checked."""
    settings = federation.settings
    fault = fault_of(settings, generator(settings, Purpose.FAULTS, number, client))
    if fault is None:
        return True
    source = generator(settings, Purpose.TRAINING, number, client)
    trained = closed_form(received, Device(client, federation.task, projections, {}, source), settings)
    problem = problem_with(spoil(trained.compacts, fault), received, projections, settings)
    if problem is not None:
        rejections.note(number + 1, client, problem)
    return problem is None


def _add_group(
    clients: list[int],
    received: Weights,
    projections: dict[str, Projection],
    private: Weights,
    federation: Federation,
    totals: RoundTotals,
) -> None:
    """Train the clients of one size and add what they send."""
    settings, task = federation.settings, federation.task
    (name,), (own_name,) = task.tables, task.own
    projection = projections[name]
    assert isinstance(projection, Hashed)
    compact = received[name]
    table = projection.recover(compact).view(projection.shape)
    gram_matrix = table.T @ table
    unobserved, factors = settings.unobserved_weight, settings.factors
    outer, total_weight = torch.zeros(factors, factors, dtype=table.dtype), 0.0
    items, steps = [], []
    for client in clients:
        mine = task.data.train.of(client)
        rows = table[mine]
        user = solve_user(rows, gram_matrix, settings)
        private[own_name][client] = user
        weight = settings.weight(len(mine))
        outer.addr_(user, user, alpha=weight)
        items.append(mine)
        steps.append(weight * ((1 - unobserved) * (rows @ user) - 1)[:, None] * user)
        total_weight += weight
    if not total_weight:
        return
    gradient: Tensor = table @ (unobserved / total_weight * outer)
    gradient.index_add_(0, torch.cat(items), torch.cat(steps), alpha=1 / total_weight)
    change = projection.reduce(gradient.view(-1)).mul_(-settings.local_step)
    if settings.aggregation == "paper":
        change += compact
    totals.add(projections, {name: change}, total_weight)
