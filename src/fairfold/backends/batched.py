"""Answers at the cost of what clients touch, plus one pass over the model: those of ``in_turn``, fast.

Three facts make it so. *The active set is exact* (``gather``): only what a client touches is gathered, trained and sent
back. *Sizes are data, not shapes*: devices of all sizes and methods go through one program, be it compiled (``native``,
a client per thread) or under autograd (``stepped``, all clients in step). *Sums are linear*: what a size's devices
changed is added up in their compact space, and recovered once.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from fairfold.backends import image_native, native, stepped
from fairfold.backends.gather import Active, gather
from fairfold.backends.groups import at_once
from fairfold.kernels.native import loader
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.round import in_turn
from fairfold.protocol.words import Answer, Sent, Visit, Word

CLIENTS_AT_ONCE = 16
"""Enough to hide the cost of a call, few enough that memory stays by what is trained and not by the cohort."""


def batched(people: People, visits: Iterable[Visit], alone: Mapping[int, str]) -> Iterator[Word]:
    """See :data:`fairfold.protocol.round.Backend`: a program for steps, an algorithm's own way for many, or in turn."""
    plan = people.plan
    if takes_steps(plan):
        program = image_native.answers if plan.algorithm.images else _stepped
        return program(people, visits, alone)
    return _together(people, visits, alone)


def takes_steps(plan: Plan) -> bool:
    """Whether devices do nothing but gradient steps that the programs here know how to take.

    What stays behind are models of one's own, which need not bear being trained in step, and FedProx where tables are
    products: the norm of a product is no sum over its factors.
    """
    algorithm = plan.algorithm
    if not getattr(algorithm, "steps", False):
        return False
    prox = bool(getattr(algorithm, "prox", 0.0))
    if algorithm.images:
        return not prox
    held = [one.projections for one in plan.assignments(0) if one.projections is not None]
    known = all(hasattr(one, "row_places") for of in held for one in of.values())
    products = any(not one.linear for of in held for one in of.values())
    return not plan.settings.model.own and known and not (products and prox)


def _together(people: People, visits: Iterable[Visit], alone: Mapping[int, str]) -> Iterator[Word]:
    """By the algorithm's own way for many at once; those who are to be heard alone, or all without one, in turn."""
    plan, everybody = people.plan, list(visits)
    several = [visit for visit in everybody if visit.client not in alone]
    single = [visit for visit in everybody if visit.client in alone]
    if several:
        found = plan.algorithm.answers(plan, people, several)
        yield from in_turn(people, several, alone) if found is None else found
    yield from in_turn(people, single, alone)


def _stepped(people: People, visits: Iterable[Visit], alone: Mapping[int, str]) -> Iterator[Word]:
    """Gradient steps on what is touched: sixteen clients at a time, their good answers summed by size as they come."""
    sums = _Sums(people)
    with ThreadPoolExecutor(loader.workers(), initializer=loader.work_alone) as workers:
        for some in at_once(visits, CLIENTS_AT_ONCE):
            for trained in _train(people, some, workers):
                if trained.client in alone or not sums.take(trained):
                    yield _word(people, trained)
                    continue
                for name in people.private:  # kept at once: who is drawn again goes on from here
                    people.private[name][trained.client] = trained.values[trained.parts[name]]
    yield from sums.words()


def _train(people: People, visits: list[Visit], workers: ThreadPoolExecutor) -> Iterator[Active]:
    """The clients after their steps, in their order: compiled and a client per thread, or all in step."""

    def learn(visit: Visit) -> tuple[Active, bool]:
        active = gather(people, visit)
        return active, native.train(active, people.work)

    found = list(workers.map(learn, visits))
    stepped.train([active for active, done in found if not done], people.work)
    return (active for active, _ in found)


def _word(people: People, trained: Active) -> Word:
    """All that a client sends, what it did not touch as it came."""
    algorithm, sent = people.plan.algorithm, trained.sent
    weight = algorithm.weight(people.samples(trained.client))  # type: ignore[attr-defined]
    change, sums = trained.values - trained.start, {}
    for name, vector in sent.vectors.items():
        start = vector if algorithm.values else torch.zeros_like(vector)
        sums[name] = start.index_add(0, trained.slots[name], change[trained.parts[name]]) * weight
    own = {name: trained.values[trained.parts[name]] for name in people.private}
    return Word(sent, [trained.client], Answer(sums, weight), own)


class _Sums:
    """What the clients of a round changed, added up in the compact space of each size."""

    def __init__(self, people: People) -> None:
        self._people, self._algorithm = people, people.plan.algorithm
        self._sums: dict[int, tuple[Sent, Answer, list[int]]] = {}

    def take(self, trained: Active) -> bool:
        """Add one trained client; False if its answer may not pass, or is no summand of its size."""
        sent = trained.sent
        if not all(projection.linear for projection in sent.projections.values()):
            return False
        change = trained.values - trained.start
        changed = {name: change[trained.parts[name]] for name in trained.slots}
        for part in changed.values():
            if part.numel():
                low, high = (float(end) for end in torch.aminmax(part))  # NaN, if there is one, is both
                if not (math.isfinite(low) and max(high, -low) <= self._algorithm.largest_change):
                    return False
        weight = self._algorithm.weight(self._people.samples(trained.client))  # type: ignore[attr-defined]
        if id(sent) not in self._sums:
            empty = {name: torch.zeros_like(vector) for name, vector in sent.vectors.items()}
            self._sums[id(sent)] = (sent, Answer(empty, 0.0), [])
        _, answer, clients = self._sums[id(sent)]
        for name, part in changed.items():
            answer.sums[name].index_add_(0, trained.slots[name], part, alpha=weight)
        clients.append(trained.client)
        self._sums[id(sent)] = (sent, Answer(answer.sums, answer.weight + weight), clients)
        return True

    def words(self) -> Iterator[Word]:
        """One per size; what its clients keep for themselves they have kept already."""
        for sent, answer, clients in self._sums.values():
            if self._algorithm.values:
                for name, total in answer.sums.items():
                    total.add_(sent.vectors[name], alpha=answer.weight)
            yield Word(sent, clients, answer, {})
