"""A round at the cost of what its clients touch, plus one pass over the model: the numbers of ``loop``, fast.

Three facts make it so. *The active set is exact* (``active``): only what a client touches is gathered, trained and sent
back. *Sizes are data, not shapes*: devices of all sizes and methods go through one program, be it compiled
(``alone``, a client a thread) or under autograd (``together``, all clients in step). *Sums are linear*: what a size's
devices changed is added up in their compact space, and recovered once.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from fairfold.federation.aggregate import RoundTotals, ServerState, aggregate
from fairfold.federation.replies import Rejections, fault_of, problem_with, spoil
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.send import send
from fairfold.federation.settings import Settings
from fairfold.federation.task import Task, Weights
from fairfold.kernels.native import loader
from fairfold.simulate import alone, closed_form, images, least_squares, loop, together
from fairfold.simulate.active import Active, Held, gather
from fairfold.simulate.federation import Federation

CLIENTS_AT_ONCE = 16
"""Enough to hide the cost of a call, few enough that memory stays by what is trained and not by the cohort."""


def batches_well(settings: Settings) -> bool:
    """Whether a round of these settings can run here; the others run in ``loop``.

    What stays behind are models of images, models of one's own, which need not bear being trained in step, and FedProx
    with FedHM: the norm of a product is no sum over its factors.
    """
    recommender = settings.model in ("mf", "neumf", "neumf-mlp")
    return recommender and settings.solver == "gradient" and not (settings.method == "fedhm" and settings.prox)


def run_round(state: ServerState, private: Weights, federation: Federation, rejections: Rejections) -> ServerState:
    """One round; see :func:`fairfold.simulate.loop.run_round`."""
    settings, task, number = federation.settings, federation.task, state.round_number
    if settings.reads_images:
        return loop.run_round(state, private, federation, rejections, loop.in_turn(images.solve, settings))
    if settings.solver == "closed_form":
        return closed_form.run_round(state, private, federation, rejections)
    if settings.solver == "least_squares":
        return least_squares.run_round(state, private, federation, rejections)
    if not batches_well(settings):
        return loop.run_round(state, private, federation, rejections)
    cohort = federation.cohort(number).tolist()
    holding = what_is_held(state, federation)
    changes = Changes(state, federation, rejections)

    def gathered(client: int) -> Active:
        return gather(client, task, holding(client), private, number)

    with ThreadPoolExecutor(loader.workers(), initializer=loader.work_alone) as workers:
        for clients in at_once(cohort, CLIENTS_AT_ONCE):
            for trained in train_at_once(clients, gathered, task, workers):
                changes.take(trained)
                for name in private:
                    private[name][trained.client] = trained.values[trained.parts[name]]
    return aggregate(state, changes.totals(), settings)


def what_is_held(state: ServerState, federation: Federation) -> Callable[[int], Held]:
    """What each client that takes part receives this round; the same object for all clients of a size."""
    if federation.settings.method == "inconsistent":

        def alone(client: int) -> Held:  # a hash a client, so a reduction a client
            own = federation.assignments(state.round_number, client)[int(federation.group[client])].projections
            assert own is not None
            return Held(own, {name: held.reduce(state.full[name]) for name, held in own.items()})

        return alone
    assignments = federation.assignments(state.round_number)
    by_group = [
        Held(assignment.projections or {}, received or {})
        for assignment, received in zip(assignments, send(state.full, assignments), strict=True)
    ]
    return lambda client: by_group[int(federation.group[client])]


def at_once(cohort: list[int], most: int) -> Iterator[list[int]]:
    """Clients to train at once, nobody twice: a second time starts from what the first one learned."""
    clients: list[int] = []
    for client in cohort:
        if client in clients or len(clients) == most:
            yield clients
            clients = []
        clients.append(client)
    if clients:
        yield clients


def train_at_once(
    clients: list[int], gathered: Callable[[int], Active], task: Task, workers: ThreadPoolExecutor
) -> Iterator[Active]:
    """The clients after their steps, in their order: compiled and a client a thread, or all in step."""

    def learn(client: int) -> tuple[Active, bool]:
        active = gathered(client)
        return active, alone.train(active, task)

    found = list(workers.map(learn, clients))
    together.train([active for active, done in found if not done], task)
    return (active for active, _ in found)


class Changes:
    """What the clients of a round changed, added up in the compact space of each size."""

    def __init__(self, state: ServerState, federation: Federation, rejections: Rejections) -> None:
        self._federation, self._rejections, self._number = federation, rejections, state.round_number
        self._totals = RoundTotals(state.full)
        self._sums: dict[int, tuple[Held, Weights]] = {}
        self._weights: dict[int, float] = {}

    def take(self, trained: Active) -> None:
        """Add one trained client, unless its reply has to be refused."""
        settings, held = self._federation.settings, trained.held
        change = trained.values - trained.start
        changed = {name: change[trained.parts[name]] for name in trained.slots}
        problem = self._problem(trained, changed)
        if problem is not None:
            self._rejections.note(self._number + 1, trained.client, problem)
            return
        weight = settings.weight(self._federation.task.samples(trained.client))
        if not all(projection.linear for projection in held.projections.values()):
            self._totals.add(held.projections, self._reply(trained, changed), weight)  # each recovered alone
            return
        if id(held) not in self._sums:
            self._sums[id(held)] = (held, {name: torch.zeros_like(vector) for name, vector in held.received.items()})
        _, sums = self._sums[id(held)]
        for name, change in changed.items():
            sums[name].index_add_(0, trained.slots[name], change, alpha=weight)
        self._weights[id(held)] = self._weights.get(id(held), 0.0) + weight

    def _problem(self, trained: Active, changed: Weights) -> str | None:
        """Why this client's reply cannot be used. What it did not touch it sends back as it came, so that is fine."""
        settings, held = self._federation.settings, trained.held
        fault = fault_of(settings, generator(settings, Purpose.FAULTS, self._number, trained.client))
        if fault is not None:  # rare: what arrives is made in full, and checked as a server would
            reply = spoil(self._reply(trained, changed), fault)
            return problem_with(reply, held.received, held.projections, settings)
        for change in changed.values():
            if not change.numel():
                continue
            low, high = (float(end) for end in torch.aminmax(change))  # NaN, if there is one, is both
            if not math.isfinite(low) or not math.isfinite(high):
                return "NaN or infinity"
            if max(high, -low) > settings.largest_change:
                return "values out of range"
        return None

    @staticmethod
    def _reply(trained: Active, changed: Weights) -> Weights:
        """All that a client sends, what it did not touch as it came."""
        received = trained.held.received
        return {name: received[name].index_add(0, trained.slots[name], change) for name, change in changed.items()}

    def means(self, held: Held) -> Weights:
        """The weighted mean change of those who hold this, in the compact space."""
        weight = self._weights.get(id(held))
        if not weight:
            return {name: torch.zeros_like(vector) for name, vector in held.received.items()}
        return {name: total / weight for name, total in self._sums[id(held)][1].items()}

    def totals(self) -> RoundTotals:
        """The round's totals, as the rule of the settings wants them."""
        for key, (held, sums) in self._sums.items():
            weight = self._weights[key]
            if self._federation.settings.aggregation == "paper":
                for name, total in sums.items():
                    total.add_(held.received[name], alpha=weight)
            if weight:
                self._totals.add_sums(held.projections, sums, weight)
        return self._totals
