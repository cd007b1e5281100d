"""A round of federated least squares, all clients of a size at once: the numbers of ``loop`` up to rounding.

All users of a size share one d × d system, so their vectors are one solve; what they send is one scatter of vectors
into rows. A round costs what the cohort's histories have, plus one pass over the model.
"""

import torch
from torch import Tensor

from fairfold.federation.aggregate import ServerState
from fairfold.federation.least_squares import (
    SizeTotals,
    history_weight,
    owned_rows,
    row_counts,
    rows_of,
    solve_users,
    subspace_of,
)
from fairfold.federation.projection import Projection
from fairfold.federation.rating_squares import (
    Ratings,
    RatingTotals,
    Window,
    caught,
    centred,
    codes,
    known_rows,
    passing_rows,
    speak,
)
from fairfold.federation.replies import Rejections, fault_of, problem_with, spoil
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.send import send
from fairfold.federation.task import CAUGHT, CENTRE, GRAM, SAID, Weights
from fairfold.federation.train import Device
from fairfold.simulate.federation import Federation
from fairfold.simulate.loop import largest_of, solver_of


def run_round(state: ServerState, private: Weights, federation: Federation, rejections: Rejections) -> ServerState:
    """One round; see :func:`fairfold.simulate.loop.run_round`."""
    settings, task, number = federation.settings, federation.task, state.round_number
    assignments = federation.assignments(number)
    cohort = federation.cohort(number)
    totals = RatingTotals(assignments, task) if task.ratings else SizeTotals(assignments, task)
    train = _train_ratings if task.ratings else _train
    for group, received in enumerate(send(state.full, assignments)):
        projections = assignments[group].projections
        clients = cohort[federation.group[cohort] == group].tolist()
        if projections is None or received is None:
            continue
        passing = passing_rows(state.full, projections, number, task)
        answering = [
            client
            for client in clients
            if _answers(client, received, projections, private, federation, number, passing, rejections)
        ]
        if answering:  # one who is drawn twice has nothing new to say the second time
            answered = list(dict.fromkeys(answering))
            changes = train(answered, received, projections, private, federation, number, passing)
            totals.add(projections, changes, 1.0)
    return totals.applied(state, settings)


def _answers(
    client: int,
    received: Weights,
    projections: dict[str, Projection],
    private: Weights,
    federation: Federation,
    number: int,
    passing: Tensor | None,
    rejections: Rejections,
) -> bool:
    """Whether this client's reply arrives and can be used; one that fails is made in full and checked."""
    settings = federation.settings
    fault = fault_of(settings, generator(settings, Purpose.FAULTS, number, client))
    if fault is None:
        return True
    own = {name: rows[federation.task.rows_of(name, client)] for name, rows in private.items()}
    source = generator(settings, Purpose.TRAINING, number, client)
    largest = largest_of(federation.assignments(number))
    device = Device(client, federation.task, projections, own, source, number, largest, passing)
    trained = solver_of(settings)(received, device, settings)
    problem = problem_with(spoil(trained.compacts, fault), received, projections, settings)
    if problem is not None:
        rejections.note(number + 1, client, problem)
    return problem is None


def _train(
    clients: list[int],
    received: Weights,
    projections: dict[str, Projection],
    private: Weights,
    federation: Federation,
    number: int,  # noqa: ARG001
    passing: Tensor | None,  # noqa: ARG001
) -> Weights:
    """What these clients change together."""
    settings, task = federation.settings, federation.task
    (name,), (own_name,), factors = task.tables, task.own, settings.factors
    subspace = subspace_of(projections[name])
    table = received[name].view(-1, factors)
    histories = [task.data.train.of(client) for client in clients]
    items = torch.cat(histories)
    client_of = torch.repeat_interleave(torch.arange(len(clients)), torch.tensor([len(mine) for mine in histories]))
    row = rows_of(subspace, items, factors)
    counted = items < owned_rows(subspace, factors)
    sums = torch.zeros(len(clients), factors, dtype=table.dtype)
    sums.index_add_(0, client_of[counted], table[row[counted]])
    users = solve_users(sums, received[GRAM].view(factors, factors), settings)
    owned = torch.bincount(client_of[counted], minlength=len(clients)).tolist()
    weights = torch.tensor([history_weight(count, settings) for count in owned], dtype=table.dtype)
    before = private[own_name][clients].to(table.dtype)
    total = torch.zeros_like(table).index_add_(0, row, (weights[:, None] * (users - before))[client_of])
    total /= row_counts(subspace, factors).clamp(min=1)[:, None]
    outer = users.T @ (weights[:, None] * users) - before.T @ (weights[:, None] * before)
    private[own_name][clients] = users.to(private[own_name].dtype)
    return {name: total.view(-1), GRAM: outer.view(-1)}


def _train_ratings(
    clients: list[int],
    received: Weights,
    projections: dict[str, Projection],
    private: Weights,
    federation: Federation,
    number: int,
    passing: Tensor | None,
) -> Weights:
    """What these clients change together in what they say of their items."""
    settings, task = federation.settings, federation.task
    (name,), (own_name,), factors, train = task.tables, task.own, settings.factors, task.data.train
    table = received[name].view(-1, factors)
    sizes = torch.tensor([task.samples(client) for client in clients])
    client_of = torch.repeat_interleave(torch.arange(len(clients)), sizes)
    chosen = torch.cat([torch.arange(start, start + size) for start, size in zip(
        train.offsets[clients].tolist(), sizes.tolist(), strict=True)])  # fmt: skip
    assert train.ratings is not None
    subspace, largest = subspace_of(projections[name]), largest_of(federation.assignments(number))
    assert largest is not None
    window = Window(subspace_of(largest[name]), subspace, number, settings)
    items, dtype = train.items[chosen], table.dtype
    rows, place = table[rows_of(subspace, items, factors)], window.places(items)
    if passing is not None:
        private[CAUGHT][chosen] = kept = caught(private[CAUGHT][chosen].to(dtype), place, passing)
        rows = known_rows(kept, rows)
    given = Ratings(rows, centred(train.ratings[chosen].to(dtype), received[CENTRE]), client_of, len(clients))
    spoken = speak(given, private[SAID][chosen].to(dtype), window, place, received[GRAM], settings)
    before = private[own_name][clients].to(dtype)
    outer = codes(spoken.users, sizes.tolist()) - codes(before, sizes.tolist())
    private[own_name][clients] = spoken.users.to(private[own_name].dtype)
    private[SAID][chosen] = spoken.said.to(private[SAID].dtype)
    return {name: spoken.change, CENTRE: spoken.counted, GRAM: outer}
