"""A round with many clients in one program: the numbers of ``loop``, fast.

Three facts make it so. *The active set is exact*: a local optimiser starts fresh each round, so a slot that no sample
of the round touches does not move; only touched slots are gathered, trained and sent back. *Sizes are data, not
shapes*: where a row's numbers stand is a table of positions, so devices of all sizes train in one program.
*Sums are linear*: what a size's devices changed is added up in their compact space, and recovered once.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.federation.aggregate import RoundTotals, ServerState, aggregate
from fairfold.federation.projection import Assignment, Hashed
from fairfold.federation.replies import Rejections, fault_of, problem_with, spoil
from fairfold.federation.sampling import Purpose, generator, sample_cohort
from fairfold.federation.send import send
from fairfold.federation.settings import Settings
from fairfold.federation.task import Weights
from fairfold.kernels import ops
from fairfold.simulate import closed_form, images, loop
from fairfold.simulate.active import ActiveTable, distinct_rows, gather
from fairfold.simulate.federation import Federation
from fairfold.simulate.steps import LocalSteps

CLIENTS_AT_ONCE = 16
"""Enough to hide the cost of a call, few enough that memory stays by what is trained and not by the cohort."""


def batches_well(settings: Settings) -> bool:
    """Whether a round of these settings can run here; the others run in ``loop``."""
    hashed = settings.method in ("fair", "fair_hom", "full_trn", "fedavg")
    private = settings.user_vectors == "private"
    return hashed and private and settings.solver == "gradient" and settings.compress == "tables" and not settings.prox


def run_round(state: ServerState, private: Weights, federation: Federation, rejections: Rejections) -> ServerState:
    """One round; see :func:`fairfold.simulate.loop.run_round`."""
    settings, task, number = federation.settings, federation.task, state.round_number
    if settings.reads_images:
        return loop.run_round(state, private, federation, rejections, images.solve)
    if settings.solver == "closed_form":
        return closed_form.run_round(state, private, federation, rejections)
    if not batches_well(settings):
        return loop.run_round(state, private, federation, rejections)
    assignments = federation.assignments(number)
    sent = send(state.full, assignments)
    taking_part = [held.projections is not None for held in assignments]
    drawn = sample_cohort(settings, task.num_clients, number).tolist()
    cohort = [client for client in drawn if taking_part[int(federation.group[client])]]
    changes = Changes(federation, assignments, sent, rejections, number)
    for clients in _together(cohort):
        program = Program(clients, federation, assignments, sent, private, number)
        program.train()
        for place, client in enumerate(program.clients):
            changes.take(program, place)
            for name in private:
                private[name][client] = program.own[name][place]
    return aggregate(state, changes.totals(state), settings)


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

    def __init__(
        self,
        clients: list[int],
        federation: Federation,
        assignments: list[Assignment],
        sent: list[Weights | None],
        private: Weights,
        number: int,
    ) -> None:
        self.settings, self.task = federation.settings, federation.task
        drawn = [
            (client, self.task.batches(client, generator(self.settings, Purpose.TRAINING, number, client)))
            for client in clients
        ]
        drawn.sort(key=lambda pair: -len(pair[1]))  # those still at work are then always a prefix
        self.clients = [client for client, _ in drawn]
        self._batches = [batches for _, batches in drawn]
        self.groups = [int(federation.group[client]) for client in self.clients]
        received = [weights for weights in (sent[group] for group in self.groups) if weights is not None]
        rows = distinct_rows(self._batches)
        self._local = rows.local
        self.tables: dict[str, ActiveTable] = {}
        for name in self.task.tables:
            projections = [_hashed(assignments[group], name) for group in self.groups]
            self.tables[name] = gather(projections, [weights[name] for weights in received], rows.ids)
        self.dense = {name: torch.stack([weights[name] for weights in received]) for name in self.task.dense}
        self.own = {name: private[name][self.clients] for name in self.task.own}
        self._losses = vmap(self.task.sample_losses, in_dims=(0, 0, 0, 0 if self.task.ratings else None))

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
        dense = {name: stacked[:moving].requires_grad_() for name, stacked in self.dense.items()}
        own = [stacked[:moving].requires_grad_() for stacked in self.own.values()]
        targets = None
        if self.task.ratings:
            given = [self._batches[place][step].targets for place in range(moving)]
            targets = torch.stack([_padded(target, longest) for target in given if target is not None])
        losses: Tensor = self._losses(dense, own, rows, targets)
        sizes = torch.tensor([len(part) for part in parts])
        real = torch.arange(longest) < sizes[:, None]
        loss = (torch.where(real, losses, 0).sum(1) / sizes).sum()
        found = torch.autograd.grad(loss, [*rows, *dense.values(), *own])
        for gradient, (flat, positions, signs), into in zip(found, looked_up, for_tables, strict=False):
            ops.accumulate_positions(gradient.reshape(flat.shape), positions, signs, into)
        return list(found[len(rows) :])


def _hashed(assignment: Assignment, name: str) -> Hashed:
    assert assignment.projections is not None
    projection = assignment.projections[name]
    assert isinstance(projection, Hashed)
    return projection


def _padded(part: Tensor, length: int) -> Tensor:
    """Lengthened by copies of the first sample, which are left out of the loss."""
    return part if len(part) == length else torch.cat([part, part[:1].expand(length - len(part), *part.shape[1:])])


class Changes:
    """What the clients of a round changed, added up in the compact space of each size."""

    def __init__(
        self,
        federation: Federation,
        assignments: list[Assignment],
        sent: list[Weights | None],
        rejections: Rejections,
        number: int,
    ) -> None:
        self._federation, self._assignments, self._sent = federation, assignments, sent
        self._rejections, self._number = rejections, number
        self._sums: dict[int, Weights] = {}
        self._weights: dict[int, float] = {}

    def take(self, program: Program, place: int) -> None:
        """Add one trained client, unless its reply has to be refused."""
        client, group = program.clients[place], program.groups[place]
        settings, sent = self._federation.settings, self._sent[group]
        assert sent is not None
        slots, changed = {}, {}
        for name, table in program.tables.items():
            mine = table.of(place)
            slots[name] = table.slots[mine]
            changed[name] = table.values[mine] - sent[name].index_select(0, slots[name])
        for name, stacked in program.dense.items():
            changed[name] = stacked[place] - sent[name]
        problem = self._problem(client, group, slots, changed)
        if problem is not None:
            self._rejections.note(self._number + 1, client, problem)
            return
        weight = float(self._federation.task.samples(client)) if settings.weighting == "data" else 1.0
        if group not in self._sums:
            self._sums[group] = {name: torch.zeros_like(vector) for name, vector in sent.items()}
        for name, change in changed.items():
            total = self._sums[group][name]
            if name in slots:
                total.index_add_(0, slots[name], change, alpha=weight)
            else:
                total.add_(change, alpha=weight)
        self._weights[group] = self._weights.get(group, 0.0) + weight

    def _problem(self, client: int, group: int, slots: Weights, changed: Weights) -> str | None:
        """Why this client's reply cannot be used. What it did not touch it sends back as it came, so that is fine."""
        settings, sent, held = self._federation.settings, self._sent[group], self._assignments[group].projections
        assert sent is not None
        assert held is not None
        fault = fault_of(settings, generator(settings, Purpose.FAULTS, self._number, client))
        if fault is not None:  # rare: what arrives is made in full, and checked as a server would
            reply = {
                name: sent[name].index_add(0, slots[name], change) if name in slots else sent[name] + change
                for name, change in changed.items()
            }
            return problem_with(spoil(reply, fault), sent, held, settings)
        for change in changed.values():
            largest = float(change.abs().max()) if change.numel() else 0.0  # NaN if there is one
            if not math.isfinite(largest):
                return "NaN or infinity"
            if largest > settings.largest_change:
                return "values out of range"
        return None

    def means(self, group: int) -> Weights:
        """The weighted mean change of a group's clients, in the compact space."""
        if not self._weights.get(group):
            sent = self._sent[group]
            assert sent is not None
            return {name: torch.zeros_like(vector) for name, vector in sent.items()}
        return {name: total / self._weights[group] for name, total in self._sums[group].items()}

    def totals(self, state: ServerState) -> RoundTotals:
        """The round's totals, as the rule of the settings wants them."""
        totals = RoundTotals(state.full)
        for group, sums in self._sums.items():
            held, sent, weight = self._assignments[group].projections, self._sent[group], self._weights[group]
            assert held is not None
            assert sent is not None
            if self._federation.settings.aggregation == "paper":
                for name, total in sums.items():
                    total.add_(sent[name], alpha=weight)
            if weight:
                totals.add(held, {name: total / weight for name, total in sums.items()}, weight)
        return totals
