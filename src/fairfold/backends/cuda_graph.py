"""A cohort trained as one program over one vector; on a GPU the step is captured once and replayed.

Shapes do not depend on the round: samples, rows and touched slots live in buffers of the largest size a round can
have, and a counter on the device says which step is next. So the step can be recorded as a CUDA graph, and a round is
one setting up, replays for as many steps as the busiest client has, and one scatter back.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.backends.graph_answers import Back
from fairfold.backends.groups import MOMENTS, Ahead, at_once
from fairfold.backends.layout import Draws, Lookups, Samples, draw, factors_of, find_lookups, lay_out, used_by_all
from fairfold.kernels import ops
from fairfold.kernels.form import Lines, Places
from fairfold.protocol.fleet import Fleet
from fairfold.protocol.people import People
from fairfold.protocol.steps import Steps
from fairfold.protocol.words import Sent, Visit, Word, put
from fairfold.protocol.work import Work

CLIENTS_AT_ONCE = 128
ROUNDS_AHEAD = 3


class Buffers:
    """What a step reads and writes, at fixed addresses."""

    def __init__(self, work: Work, clients: int, device: torch.device, dtype: torch.dtype) -> None:
        settings = work.steps
        counts = work.train.counts_by_user
        per_epoch = (counts + settings.batch_size - 1) // settings.batch_size
        most = counts.sort(descending=True).values[:clients]
        drawn = 0 if work.ratings else settings.negatives
        rows = int((most * (1 + drawn * settings.local_epochs)).clamp(max=work.num_items).sum())
        self.steps = int(per_epoch.max()) * settings.local_epochs
        width = sum(shape[1] for shape in work.tables.values())
        used, factored = used_by_all(work), len(factors_of(work))
        values = rows * width + clients * used

        def make(*shape: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        batch = settings.batch_size
        self.places = make(self.steps, clients, batch, 1 + drawn, kind=torch.int32)
        self.shares = make(self.steps, clients, batch, kind=dtype)
        self.targets = make(self.steps, clients, batch, kind=dtype) if work.has_targets else None
        self.rows, self.row_signs = make(rows, width, kind=torch.int32), make(rows, width, kind=torch.int8)
        self.fixed, self.fixed_signs = make(clients, used, kind=torch.int32), make(clients, used, kind=torch.int8)
        self.whole = make(clients, factored, kind=dtype)
        self.values, self.gradient = make(values, kind=dtype), make(values, kind=dtype)
        self.moments = [make(values, kind=dtype) for _ in range(MOMENTS[settings.local_optimiser])]
        self.moving = make(self.steps, kind=torch.int64)
        self.step = make(1, kind=torch.int64)
        self.rates = step_sizes(settings, self.steps).to(device, dtype)
        self.within = torch.arange(batch, device=device)
        self.lines = Lines(
            Places(self.rows, self.row_signs), Places(self.fixed, self.fixed_signs), self.places, self.shares, self.step
        )
        self.everybody = torch.arange(clients, device=device, dtype=torch.int32)

    def fill(self, samples: Samples, lookups: Lookups) -> None:
        """Set up for a round: batches filled up with copies of a sample whose share in the loss is 0."""
        steps, clients = samples.sizes.shape
        sizes = samples.sizes[:, :, None]
        chosen = samples.starts[:, :, None] + torch.minimum(self.within, (sizes - 1).clamp(min=0))
        for buffer in (self.places, self.shares):
            buffer[:steps, clients:] = 0
        self.places[:steps, :clients] = lookups.places[chosen]
        self.shares[:steps, :clients] = (self.within < sizes) / sizes.clamp(min=1)
        if self.targets is not None and samples.targets is not None:
            self.targets[:steps, :clients] = samples.targets[chosen]
        rows, row_signs = lookups.rows
        self.rows[: len(rows)], self.row_signs[: len(rows)] = rows, row_signs
        self.fixed[clients:] = 0
        self.fixed[:clients], self.fixed_signs[:clients] = lookups.fixed
        if self.whole.shape[1]:
            self.whole[:clients] = lookups.whole
        touched = len(lookups.keys)
        for vector in (self.gradient, *self.moments):
            vector[:touched].zero_()
        working = (samples.sizes > 0).sum(1)
        self.moving[:steps] = put(lookups.ends, working.device)[working - 1]
        self.step.zero_()


def step_sizes(settings: Steps, steps: int) -> Tensor:
    """What the optimiser's step needs to know of its number, a line a step: a rate, and the root of a correction."""
    number = torch.arange(1, steps + 1, dtype=torch.float64)
    rates = torch.full((steps, 2), settings.local_step, dtype=torch.float64)
    rates[:, 1] = 1
    if settings.local_optimiser == "adam":
        rates[:, 0] /= 1 - 0.9**number
        rates[:, 1] = (1 - 0.999**number).sqrt()
    return rates


class GraphBackend:
    """Runs the rounds of one fleet; holds the buffers and, on a GPU, the captured step."""

    def __init__(self, fleet: Fleet, people: People, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.fleet, self.people, self.work, self.steps = fleet, people, people.work, people.work.steps
        self.device = device
        wanted = fleet.plan.settings.fleet.clients_per_round or people.num_clients
        self.at_once = min(wanted, people.num_clients, CLIENTS_AT_ONCE)
        self.buffers = Buffers(self.work, self.at_once, device, dtype)
        self._losses = vmap(self.work.unpenalised_losses, in_dims=(0, 0, 0, 0 if self.work.has_targets else None))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._factors = [torch.eye(columns, device=device, dtype=dtype) for columns in factors_of(self.work)]
        self._draws = Ahead(self._draw, fleet.plan.settings.run.rounds, ROUNDS_AHEAD)

    def __call__(self, people: People, visits: Iterable[Visit], alone: Mapping[int, str]) -> Iterator[Word]:
        """See :data:`fairfold.protocol.round.Backend`."""
        assert people is self.people
        coming = iter(visits)
        first = next(coming, None)
        if first is None:
            return
        rest = chain([first], coming)
        for drawn in self._draws.of_round(first.sent.round_number):
            some = {visit.client: visit.sent for visit in islice(rest, len(drawn.clients))}
            yield from self._train(drawn.to(self.device).samples(), some, alone)

    def _draw(self, number: int) -> list[Draws]:
        cohort = self.fleet.ranks.mine(self.fleet.cohort(number).tolist())
        pinned = self.device.type == "cuda"
        return [draw(self.people, clients, number, pinned=pinned) for clients in at_once(cohort, self.at_once)]

    def _train(self, samples: Samples, sent: Mapping[int, Sent], alone: Mapping[int, str]) -> Iterator[Word]:
        each = [sent[client] for client in samples.clients]
        groups = [id(of) for of in each]  # those who hold the same
        held = dict(zip(groups, each, strict=True))
        received = {group: of.vectors for group, of in held.items()}
        sections = lay_out(self.work, samples.clients, groups, received, self.people.private, self.device)
        lookups = find_lookups(self.work, samples, groups, held, sections)
        buffers = self.buffers
        buffers.fill(samples, lookups)
        came_from = lookups.sources()
        buffers.values[: len(came_from)] = sections.source[came_from]
        self._run(len(samples.sizes))
        self._draws.after(each[0].round_number)
        trained = buffers.values[: len(came_from)]
        yield from Back(self.people, trained, samples.clients, groups, held, lookups, came_from).words(alone)

    def _run(self, steps: int) -> None:
        if self.device.type != "cuda":
            self._take(steps)
            return
        at_once = self.steps.local_epochs  # which divide the steps of every round
        if self._graph is None:
            held = self.buffers
            changed = [held.values, held.gradient, *held.moments, held.step]
            self._graph = capture(lambda: self._take(at_once), changed)
        for _ in range(steps // at_once):
            self._graph.replay()

    def _take(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        """The next step of every client that is still at work."""
        held, weight = self.buffers, self.steps.regulariser
        pairwise = not self.work.ratings and self.work.objective == "bpr"
        form = self.work.form if pairwise and not self._factors else None
        if form is None or not ops.add_slopes(form, weight, held.values, held.gradient, held.lines):
            self.add_slopes()
        ops.step_prefix(held.values, held.gradient, held.moments, held.rates, held.moving, held.step)
        held.step += 1

    def add_slopes(self) -> None:
        """Add the gradient of the next step, under autograd: the specification of :func:`ops.add_slopes`."""
        work, held = self.work, self.buffers
        places = held.places.index_select(0, held.step)[0]  # [clients, samples, width]
        shares = held.shares.index_select(0, held.step)[0]
        targets = None if held.targets is None else held.targets.index_select(0, held.step)[0]
        read = ops.recover_lines(held.values, held.rows, held.row_signs, places)
        always = ops.recover_lines(held.values, held.fixed, held.fixed_signs, held.everybody)
        own_sizes, dense_sizes = [*work.own.values()], [prod(shape) for shape in work.dense.values()]
        used = sum(own_sizes) + sum(dense_sizes)
        factors = self._second_factors(always[:, used:])
        rows, always = _products(read, factors).requires_grad_(), always.requires_grad_()
        split = torch.split(rows, [shape[1] for shape in work.tables.values()], dim=-1)
        parts = torch.split(always[:, :used], [*own_sizes, *dense_sizes], dim=-1)
        dense = dict(zip(work.dense, parts[len(own_sizes) :], strict=True))
        losses: Tensor = self._losses(dense, parts[: len(own_sizes)], split, targets)
        for_rows, for_always = torch.autograd.grad(losses, [rows, always], shares)
        if not work.ratings and self.steps.regulariser:
            weight, own = self.steps.regulariser, sum(own_sizes)
            for_rows = for_rows.addcmul(rows.detach(), shares[..., None, None], value=weight)
            users = always.detach()[:, :own]
            for_always[:, :own].addcmul_(users, shares.sum(1, keepdim=True), value=weight)
        if factors:
            for_rows = _through_products(for_rows, read, factors, for_always[:, used:])
        ops.accumulate_lines(for_rows, held.rows, held.row_signs, places, held.gradient)
        ops.accumulate_lines(for_always, held.fixed, held.fixed_signs, held.everybody, held.gradient)

    def _second_factors(self, numbers: Tensor) -> list[Tensor]:
        """By which the rows of each table are multiplied, [clients, columns, columns]; nothing if none is a product."""
        parts = torch.split(numbers, [unit.numel() for unit in self._factors], dim=-1) if self._factors else ()
        whole = self.buffers.whole[:, :, None, None].unbind(1)
        return [
            part.view(-1, *unit.shape) + of * unit for part, unit, of in zip(parts, self._factors, whole, strict=True)
        ]


def _products(rows: Tensor, factors: list[Tensor]) -> Tensor:
    """Rows of the tables, [clients, samples, width, columns of all], from rows of their first factors."""
    if not factors:
        return rows
    parts = torch.split(rows.flatten(1, 2), [len(factor[0]) for factor in factors], dim=-1)
    products = [part @ factor for part, factor in zip(parts, factors, strict=True)]
    return torch.cat(products, dim=-1).view(rows.shape)


def _through_products(slopes: Tensor, rows: Tensor, factors: list[Tensor], into: Tensor) -> Tensor:
    """The slopes of rows of the first factors, from those of the products; those of the second go ``into`` a line."""
    sizes = [len(factor[0]) for factor in factors]
    split = [torch.split(of.flatten(1, 2), sizes, dim=-1) for of in (slopes, rows)]
    for_rows, for_factors = [], []
    for slope, row, factor in zip(*split, factors, strict=True):
        for_rows.append(slope @ factor.mT)
        for_factors.append((row.mT @ slope).flatten(1))
    into.copy_(torch.cat(for_factors, dim=1))
    return torch.cat(for_rows, dim=-1).view(rows.shape)


def capture(step: Callable[[], None], changed: list[Tensor], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Record a step. It is run a few times first, as torch asks, and what it changed is put back.

    Recordings that never run at once may share the memory of a ``pool``.
    """
    kept = [tensor.clone() for tensor in changed]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            for tensor, before in zip(changed, kept, strict=True):
                tensor.copy_(before)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Others may be pinning memory meanwhile.
    with uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    for tensor, before in zip(changed, kept, strict=True):
        tensor.copy_(before)
    return graph


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: to free a former run's recording while another is made breaks both."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
