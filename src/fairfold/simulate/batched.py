"""A round with many clients in one program: the numbers of ``loop``, fast.

Three facts make it so. *The active set is exact*: a local optimiser starts fresh each round, so a slot that no sample
of the round touches does not move; only touched slots are gathered, trained and sent back. *Sizes are data, not
shapes*: where a row's numbers stand is a table of positions, so devices of all sizes train in one program.
*Sums are linear*: what a size's devices changed is added up in their compact space, and recovered once.
"""

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
from fairfold.simulate import loop
from fairfold.simulate.active import ActiveTable, Lookup, distinct_rows, gather
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
    if not batches_well(settings):
        return loop.run_round(state, private, federation, rejections)
    assignments = federation.assignments(number)
    sent = send(state.full, assignments)
    taking_part = [held.projections is not None for held in assignments]
    drawn = sample_cohort(settings, task.num_clients, number).tolist()
    cohort = [client for client in drawn if taking_part[int(federation.group[client])]]
    changes = Changes(federation, assignments, sent, rejections, number)
    for start in range(0, len(cohort), CLIENTS_AT_ONCE):
        program = Program(cohort[start : start + CLIENTS_AT_ONCE], federation, assignments, sent, private, number)
        program.train()
        for place, client in enumerate(program.clients):
            changes.take(program, place)
            for name in private:
                private[name][client] = program.own[name][place]
    return aggregate(state, changes.totals(state), settings)


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
        trained = [*(table.values for table in self.tables.values()), *self.dense.values(), *self.own.values()]
        for tensor in trained:
            tensor.requires_grad_()
        optimiser = LocalSteps([tensor.detach() for tensor in trained], self.settings)
        lengths = [len(batches) for batches in self._batches]
        for step in range(max(lengths, default=0)):
            moving = sum(length > step for length in lengths)
            gradients = torch.autograd.grad(self._loss(step, moving), trained)
            ends = [table.ends[moving - 1] for table in self.tables.values()]
            others = [tensor[:moving].numel() for tensor in [*self.dense.values(), *self.own.values()]]
            optimiser.step(list(gradients), [*ends, *others])
        for tensor in trained:
            tensor.requires_grad_(False)

    def _loss(self, step: int, moving: int) -> Tensor:
        """The sum of the clients' losses of a step, each the mean over its own batch."""
        parts = [self._local[place][step] for place in range(moving)]
        longest = max(len(part) for part in parts)
        local = torch.stack([_padded(part, longest) for part in parts])
        rows = []
        for table in self.tables.values():
            places = local.view(-1)
            found = Lookup.apply(table.values, table.positions[places], table.signs[places])  # type: ignore[no-untyped-call]
            rows.append(found.view(*local.shape, -1))
        targets = None
        if self.task.ratings:
            given = [self._batches[place][step].targets for place in range(moving)]
            targets = torch.stack([_padded(target, longest) for target in given if target is not None])
        dense = {name: stacked[:moving] for name, stacked in self.dense.items()}
        own = [stacked[:moving] for stacked in self.own.values()]
        losses: Tensor = self._losses(dense, own, rows, targets)
        sizes = torch.tensor([len(part) for part in parts])
        real = torch.arange(longest) < sizes[:, None]
        return (torch.where(real, losses, 0).sum(1) / sizes).sum()


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
        tables = {
            name: (table.slots[table.of(place)], table.values[table.of(place)])
            for name, table in program.tables.items()
        }
        problem = self._problem(client, group, tables, {name: rows[place] for name, rows in program.dense.items()})
        if problem is not None:
            self._rejections.note(self._number + 1, client, problem)
            return
        weight = float(self._federation.task.samples(client)) if settings.weighting == "data" else 1.0
        if group not in self._sums:
            self._sums[group] = {name: torch.zeros_like(vector) for name, vector in sent.items()}
        sums = self._sums[group]
        for name, (slots, values) in tables.items():
            sums[name].index_add_(0, slots, values - sent[name][slots], alpha=weight)
        for name, stacked in program.dense.items():
            sums[name].add_(stacked[place] - sent[name], alpha=weight)
        self._weights[group] = self._weights.get(group, 0.0) + weight

    def _problem(self, client: int, group: int, tables: dict[str, tuple[Tensor, Tensor]], dense: Weights) -> str | None:
        """Why this client's reply cannot be used. What it did not touch it sends back as it came, so that is fine."""
        settings, sent, held = self._federation.settings, self._sent[group], self._assignments[group].projections
        assert sent is not None
        assert held is not None
        fault = fault_of(settings, generator(settings, Purpose.FAULTS, self._number, client))
        if fault is not None:
            reply = {name: sent[name].index_copy(0, slots, values) for name, (slots, values) in tables.items()} | dense
            return problem_with(spoil(reply, fault), sent, held, settings)
        pairs = [(values, sent[name][slots]) for name, (slots, values) in tables.items()]
        for values, before in [*pairs, *((vector, sent[name]) for name, vector in dense.items())]:
            if not bool(torch.isfinite(values).all()):
                return "NaN or infinity"
            if values.numel() and float((values - before).abs().max()) > settings.largest_change:
                return "values out of range"
        return None

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
