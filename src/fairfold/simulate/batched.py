"""A round with many clients in one program: the numbers of ``loop``, fast.

Three facts make it so. *The active set is exact*: a local optimiser starts fresh each round, so a slot that no sample
of the round touches does not move; only touched slots are gathered, trained and sent back. *Sizes are data, not
shapes*: where a row's numbers stand is a table of positions, so devices of all sizes train in one program.
*Sums are linear*: what a size's devices changed is added up in their compact space, and recovered once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.federation.aggregate import RoundTotals, ServerState, aggregate
from fairfold.federation.projection import Assignment, LowRank, Projection
from fairfold.federation.replies import Rejections, fault_of, problem_with, spoil
from fairfold.federation.sampling import Purpose, generator, sample_cohort
from fairfold.federation.send import send
from fairfold.federation.settings import Settings
from fairfold.federation.task import Weights
from fairfold.kernels import ops
from fairfold.simulate import closed_form, loop
from fairfold.simulate.active import ActiveTable, distinct_rows, gather
from fairfold.simulate.federation import Federation
from fairfold.simulate.steps import LocalSteps

CLIENTS_AT_ONCE = 16
"""Enough to hide the cost of a call, few enough that memory stays by what is trained and not by the cohort."""


def batches_well(settings: Settings) -> bool:
    """Whether a round of these settings can run here; the others run in ``loop``."""
    return settings.solver == "gradient" and settings.compress == "tables" and not settings.prox


def run_round(state: ServerState, private: Weights, federation: Federation, rejections: Rejections) -> ServerState:
    """One round; see :func:`fairfold.simulate.loop.run_round`."""
    settings, task, number = federation.settings, federation.task, state.round_number
    if settings.solver == "closed_form":
        return closed_form.run_round(state, private, federation, rejections)
    if not batches_well(settings):
        return loop.run_round(state, private, federation, rejections)
    assignments = federation.assignments(number)
    sent = send(state.full, assignments)
    taking_part = [held.projections is not None for held in assignments]
    drawn = sample_cohort(settings, task.num_clients, number).tolist()
    cohort = [client for client in drawn if taking_part[int(federation.group[client])]]
    changes = Changes(federation, state, rejections)
    for clients in _together(cohort):
        held = {client: _held(client, federation, state, assignments, sent) for client in clients}
        program = Program(held, federation, private, number)
        program.train()
        for place, client in enumerate(program.clients):
            changes.take(program, place)
            for name in private:
                private[name][client] = program.own[name][place]
    return aggregate(state, changes.totals(), settings)


@dataclass(frozen=True)
class Held:
    """What one client holds of every tensor, what it received, and the group with which it is summed (None: alone)."""

    projections: dict[str, Projection]
    received: Weights
    group: int | None


def _held(
    client: int, federation: Federation, state: ServerState, assignments: list[Assignment], sent: list[Weights | None]
) -> Held:
    """Most methods have one projection a group, and recovering is linear: such clients are summed in compact space.

    FedHM's products are not linear in what a client sends, and inconsistent subspaces are each client's own.
    """
    group = int(federation.group[client])
    projections, received = assignments[group].projections, sent[group]
    assert projections is not None
    assert received is not None
    if federation.settings.method == "inconsistent":
        own = federation.assignments(state.round_number, client)[group].projections
        assert own is not None
        return Held(own, {name: held.reduce(state.full[name]) for name, held in own.items()}, None)
    linear = not any(isinstance(projection, LowRank) for projection in projections.values())
    return Held(projections, received, group if linear else None)


def _together(cohort: list[int]) -> Iterator[list[int]]:
    """Clients to train together: nobody twice, since the second time starts from what the first one learned."""
    clients: list[int] = []
    for client in cohort:
        if client in clients or len(clients) == CLIENTS_AT_ONCE:
            yield clients
            clients = []
        clients.append(client)
    if clients:
        yield clients


class Program:
    """Several clients, trained together. They stand in order of falling numbers of steps."""

    def __init__(self, held: dict[int, Held], federation: Federation, private: Weights, number: int) -> None:
        self.settings, self.task = federation.settings, federation.task
        drawn = [
            (client, self.task.batches(client, generator(self.settings, Purpose.TRAINING, number, client)))
            for client in held
        ]
        drawn.sort(key=lambda pair: -len(pair[1]))  # those still at work are then always a prefix
        self.clients = [client for client, _ in drawn]
        self.held = [held[client] for client in self.clients]
        self._batches = [batches for _, batches in drawn]
        rows = distinct_rows(self._batches)
        self._local = rows.local
        self.tables: dict[str, ActiveTable] = {}
        for name in self.task.tables:
            projections = [one.projections[name] for one in self.held]
            self.tables[name] = gather(projections, [one.received[name] for one in self.held], rows.ids)
        self.dense = {name: torch.stack([one.received[name] for one in self.held]) for name in self.task.dense}
        self.own = {name: self._own(name, private) for name in self.task.own}
        self._losses = vmap(self.task.sample_losses, in_dims=(0, 0, 0, 0 if self.task.ratings else None))

    def _own(self, name: str, private: Weights) -> Tensor:
        """The users' vectors: from their devices, or from the table that was sent along."""
        if name in private:
            return private[name][self.clients]
        return torch.stack(
            [
                one.received[name][self.own_slots(name, client)]
                for one, client in zip(self.held, self.clients, strict=True)
            ]
        )

    def own_slots(self, name: str, client: int) -> Tensor:
        """Where a user's vector stands in the table that is sent."""
        length = self.task.own[name]
        return torch.arange(client * length, (client + 1) * length)

    def train(self) -> None:
        """All steps of all clients."""
        others = [*self.dense.values(), *self.own.values()]
        values = [table.values for table in self.tables.values()]
        gradients = [torch.zeros_like(vector) for vector in values]  # kept: filled and emptied at every step
        optimiser = LocalSteps([*values, *others], self.settings)
        lengths = [len(batches) for batches in self._batches]
        for step in range(max(lengths, default=0)):
            moving = sum(length > step for length in lengths)
            ends = [table.ends[moving - 1] for table in self.tables.values()]
            for_others = self._gradients(step, moving, gradients)
            optimiser.step([*gradients, *for_others], [*ends, *(tensor[:moving].numel() for tensor in others)])
            for gradient, end in zip(gradients, ends, strict=True):
                gradient[:end].zero_()

    def _gradients(self, step: int, moving: int, for_tables: list[Tensor]) -> list[Tensor]:
        """Gradients of the sum of the clients' losses of a step; those of the tables are added to ``for_tables``."""
        parts = [self._local[place][step] for place in range(moving)]
        longest = max(len(part) for part in parts)
        local = torch.stack([_padded(part, longest) for part in parts])
        looked_up = [table.rows(local.view(-1)) for table in self.tables.values()]
        rows = [found.view(*local.shape, -1).requires_grad_() for found, _, _ in looked_up]
        factors = [table.multipliers(moving) for table in self.tables.values()]
        multipliers = [None if found is None else found[0].requires_grad_() for found in factors]
        dense = {name: stacked[:moving].requires_grad_() for name, stacked in self.dense.items()}
        own = [stacked[:moving].requires_grad_() for stacked in self.own.values()]
        targets = None
        if self.task.ratings:
            given = [self._batches[place][step].targets for place in range(moving)]
            targets = torch.stack([_padded(target, longest) for target in given if target is not None])
        used = [_times(part, by) for part, by in zip(rows, multipliers, strict=True)]
        losses: Tensor = self._losses(dense, own, used, targets)
        sizes = torch.tensor([len(part) for part in parts])
        real = torch.arange(longest) < sizes[:, None]
        loss = (torch.where(real, losses, 0).sum(1) / sizes).sum()
        present = [by for by in multipliers if by is not None]
        found = list(torch.autograd.grad(loss, [*rows, *present, *dense.values(), *own]))
        for (flat, positions, signs), into in zip(looked_up, for_tables, strict=True):
            ops.accumulate_positions(found.pop(0).reshape(flat.shape), positions, signs, into)
        for factor, into in zip(factors, for_tables, strict=True):
            if factor is not None:
                ops.accumulate_positions(found.pop(0).reshape(factor[1].shape), factor[1], factor[2], into)
        return found


def _times(rows: Tensor, multipliers: Tensor | None) -> Tensor:
    """Rows [clients, samples, width, d], those of each client multiplied by its own matrix."""
    if multipliers is None:
        return rows
    return (rows.flatten(1, 2) @ multipliers).view(rows.shape)


def _padded(part: Tensor, length: int) -> Tensor:
    """Lengthened by copies of the first sample, which are left out of the loss."""
    return part if len(part) == length else torch.cat([part, part[:1].expand(length - len(part), *part.shape[1:])])


class Changes:
    """What the clients of a round changed, added up: in the compact space of each group where recovering is linear."""

    def __init__(self, federation: Federation, state: ServerState, rejections: Rejections) -> None:
        self._federation, self._rejections, self._number = federation, rejections, state.round_number
        self._totals = RoundTotals(state.full)
        self._groups: dict[int, Held] = {}
        self._sums: dict[int, Weights] = {}
        self._weights: dict[int, float] = {}

    def take(self, program: Program, place: int) -> None:
        """Add one trained client, unless its reply has to be refused."""
        client, held = program.clients[place], program.held[place]
        settings, sent = self._federation.settings, held.received
        slots, changed = {}, {}
        for name, table in program.tables.items():
            mine = table.of(place)
            slots[name] = table.slots[mine]
            changed[name] = table.values[mine] - sent[name].index_select(0, slots[name])
        for name in self._federation.task.user_tables:
            slots[name] = program.own_slots(name, client)
            changed[name] = program.own[name][place] - sent[name][slots[name]]
        for name, stacked in program.dense.items():
            changed[name] = stacked[place] - sent[name]
        problem = self._problem(client, held, slots, changed)
        if problem is not None:
            self._rejections.note(self._number + 1, client, problem)
            return
        weight = float(self._federation.task.samples(client)) if settings.weighting == "data" else 1.0
        if held.group is None:
            start = sent if settings.aggregation == "paper" else {n: torch.zeros_like(v) for n, v in sent.items()}
            self._totals.add(held.projections, _laid_out(changed, slots, start), weight)
            return
        if held.group not in self._sums:
            self._groups[held.group] = held
            self._sums[held.group] = {name: torch.zeros_like(vector) for name, vector in sent.items()}
        for name, change in changed.items():
            total = self._sums[held.group][name]
            if name in slots:
                total.index_add_(0, slots[name], change, alpha=weight)
            else:
                total.add_(change, alpha=weight)
        self._weights[held.group] = self._weights.get(held.group, 0.0) + weight

    def _problem(self, client: int, held: Held, slots: Weights, changed: Weights) -> str | None:
        """Why this client's reply cannot be used. What it did not touch it sends back as it came, so that is fine."""
        settings = self._federation.settings
        fault = fault_of(settings, generator(settings, Purpose.FAULTS, self._number, client))
        if fault is not None:  # rare: what arrives is made in full, and checked as a server would
            reply = _laid_out(changed, slots, held.received)
            return problem_with(spoil(reply, fault), held.received, held.projections, settings)
        for change in changed.values():
            largest = float(change.abs().max()) if change.numel() else 0.0  # NaN if there is one
            if not math.isfinite(largest):
                return "NaN or infinity"
            if largest > settings.largest_change:
                return "values out of range"
        return None

    def totals(self) -> RoundTotals:
        """The round's totals, as the rule of the settings wants them."""
        for group, sums in self._sums.items():
            held, weight = self._groups[group], self._weights[group]
            if self._federation.settings.aggregation == "paper":
                for name, total in sums.items():
                    total.add_(held.received[name], alpha=weight)
            if weight:
                self._totals.add(held.projections, {name: total / weight for name, total in sums.items()}, weight)
        return self._totals


def _laid_out(changed: Weights, slots: Weights, start: Weights) -> Weights:
    """Whole vectors from what was changed of them."""
    return {
        name: start[name].index_add(0, slots[name], change) if name in slots else start[name] + change
        for name, change in changed.items()
    }
