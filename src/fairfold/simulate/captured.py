"""A cohort trained as one program over one vector; on a GPU the step is captured once and replayed.

Shapes do not depend on the round: samples, rows and touched slots live in buffers of the largest size a round can
have, and a counter on the device says which step is next. So the step can be recorded as a CUDA graph, and a round is
one setting up, as many replays as the busiest client has steps, and one scatter back.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.federation.aggregate import RoundTotals, ServerState, aggregate
from fairfold.federation.replies import Rejections, fault_of, problem_with, spoil
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.setting_tables import FaultSettings
from fairfold.federation.settings import Settings
from fairfold.federation.task import Task, Weights
from fairfold.kernels import ops
from fairfold.kernels.form import Lines, Places
from fairfold.simulate.active import Held
from fairfold.simulate.batched import at_once, what_is_held
from fairfold.simulate.cohort import (
    Draws,
    Lookups,
    Samples,
    draw,
    factors_of,
    find_lookups,
    lay_out,
    put,
    used_by_all,
    whose,
)
from fairfold.simulate.federation import Federation

CLIENTS_AT_ONCE = 128
ROUNDS_AHEAD = 3
"""Samples are drawn by this many threads, as many rounds ahead: a GPU is faster than the drawing of one round."""


def serves(settings: Settings) -> bool:
    """Whether a round of these settings can run here."""
    built_in = not settings.reads_images and not settings.own_model
    return built_in and settings.method != "central" and settings.solver == "gradient" and not settings.prox


class Buffers:
    """What a step reads and writes, at fixed addresses."""

    def __init__(self, task: Task, clients: int, device: torch.device, dtype: torch.dtype) -> None:
        settings = task.settings
        counts = task.data.train.counts_by_user
        per_epoch = (counts + settings.batch_size - 1) // settings.batch_size
        most = counts.sort(descending=True).values[:clients]
        drawn = 0 if task.ratings else settings.negatives
        rows = int((most * (1 + drawn * settings.local_epochs)).clamp(max=task.data.num_items).sum())
        self.steps = int(per_epoch.max()) * settings.local_epochs
        width = sum(shape[1] for shape in task.tables.values())
        used, factored = used_by_all(task), len(factors_of(task))
        values = rows * width + clients * used

        def make(*shape: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        batch = settings.batch_size
        self.places = make(self.steps, clients, batch, 1 + drawn, kind=torch.int32)
        self.shares = make(self.steps, clients, batch, kind=dtype)
        self.targets = make(self.steps, clients, batch, kind=dtype) if task.has_targets else None
        self.rows, self.row_signs = make(rows, width, kind=torch.int32), make(rows, width, kind=torch.int8)
        self.fixed, self.fixed_signs = make(clients, used, kind=torch.int32), make(clients, used, kind=torch.int8)
        self.whole = make(clients, factored, kind=dtype)
        self.values, self.gradient = make(values, kind=dtype), make(values, kind=dtype)
        moments = {"sgd": 0, "adagrad": 1, "adam": 2}[settings.local_optimiser]
        self.moments = [make(values, kind=dtype) for _ in range(moments)]
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
        self.places[:steps, :clients] = lookups.places[chosen].to(torch.int32)
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
        self.moving[:steps] = lookups.ends[working - 1]
        self.step.zero_()


def step_sizes(settings: Settings, steps: int) -> Tensor:
    """What the optimiser's step needs to know of its number, a line a step: a rate, and the root of a correction."""
    number = torch.arange(1, steps + 1, dtype=torch.float64)
    rates = torch.full((steps, 2), settings.local_step, dtype=torch.float64)
    rates[:, 1] = 1
    if settings.local_optimiser == "adam":
        rates[:, 0] /= 1 - 0.9**number
        rates[:, 1] = (1 - 0.999**number).sqrt()
    return rates


class Cohorts:
    """Runs the rounds of one federation; holds the buffers and, on a GPU, the captured step."""

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.federation, self.task, self.settings = federation, federation.task, federation.settings
        self.device = device
        wanted = self.settings.clients_per_round or self.task.num_clients
        self.at_once = min(wanted, self.task.num_clients, CLIENTS_AT_ONCE)
        self.buffers = Buffers(self.task, self.at_once, device, dtype)
        self._losses = vmap(self.task.unpenalised_losses, in_dims=(0, 0, 0, 0 if self.task.has_targets else None))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._factors = [torch.eye(columns, device=device, dtype=dtype) for columns in factors_of(self.task)]
        self._feeder = ThreadPoolExecutor(ROUNDS_AHEAD, thread_name_prefix="fairfold-samples")
        self._ahead: dict[int, Future[list[Draws]]] = {}

    def run_round(self, state: ServerState, private: Weights, rejections: Rejections) -> ServerState:
        """One round; see :func:`fairfold.simulate.loop.run_round`."""
        number = state.round_number
        holding = what_is_held(state, self.federation)
        totals = RoundTotals(state.full)
        for drawn in self._drawn(number):
            self._train(drawn.to(self.device).samples(), holding, private, number, rejections, totals)
        return aggregate(state, totals, self.settings)

    def _drawn(self, number: int) -> list[Draws]:
        """A round's draws; those of the next rounds are made while this one runs."""
        coming = range(number, min(number + ROUNDS_AHEAD, self.settings.rounds - 1) + 1)
        self._ahead = {
            each: self._ahead.get(each) or self._feeder.submit(self._draw, each) for each in {number, *coming}
        }
        return self._ahead[number].result()

    def _draw(self, number: int) -> list[Draws]:
        cohort = self.federation.cohort(number).tolist()
        pinned = self.device.type == "cuda"
        return [draw(self.task, clients, number, pinned=pinned) for clients in at_once(cohort, self.at_once)]

    def _train(
        self,
        samples: Samples,
        holding: Callable[[int], Held],
        private: Weights,
        number: int,
        rejections: Rejections,
        totals: RoundTotals,
    ) -> None:
        each = [holding(client) for client in samples.clients]
        groups = [id(held) for held in each]  # those who hold the same
        held = dict(zip(groups, each, strict=True))
        received = {group: of.received for group, of in held.items()}
        sections = lay_out(self.task, samples.clients, groups, received, private, self.device)
        lookups = find_lookups(self.task, samples, groups, held, sections)
        buffers = self.buffers
        buffers.fill(samples, lookups)
        came_from = sources(lookups)
        buffers.values[: len(came_from)] = sections.source[came_from]
        self._run(len(samples.sizes))
        back = Back(self, samples, groups, held, lookups, came_from)
        back.give(private, number, rejections, totals)

    def _run(self, steps: int) -> None:
        if self.device.type != "cuda":
            for _ in range(steps):
                self._step()
            return
        if self._graph is None:
            self._graph = capture(self._step, self._state())
        for _ in range(steps):
            self._graph.replay()

    def _state(self) -> list[Tensor]:
        """What a step changes."""
        return [self.buffers.values, self.buffers.gradient, *self.buffers.moments, self.buffers.step]

    def _step(self) -> None:
        """The next step of every client that is still at work."""
        held, weight = self.buffers, self.settings.regulariser
        pairwise = not self.task.ratings and self.settings.objective == "bpr"
        form = self.task.form if pairwise and not self._factors else None
        if form is None or not ops.add_slopes(form, weight, held.values, held.gradient, held.lines):
            self.add_slopes()
        ops.step_prefix(held.values, held.gradient, held.moments, held.rates, held.moving, held.step)
        held.step += 1

    def add_slopes(self) -> None:
        """Add the gradient of the next step, under autograd: the specification of :func:`ops.add_slopes`."""
        task, held = self.task, self.buffers
        places = held.places.index_select(0, held.step)[0]  # [clients, samples, width]
        shares = held.shares.index_select(0, held.step)[0]
        targets = None if held.targets is None else held.targets.index_select(0, held.step)[0]
        read = ops.recover_lines(held.values, held.rows, held.row_signs, places)
        always = ops.recover_lines(held.values, held.fixed, held.fixed_signs, held.everybody)
        own_sizes, dense_sizes = [*task.own.values()], [prod(shape) for shape in task.dense.values()]
        used = sum(own_sizes) + sum(dense_sizes)
        factors = self._second_factors(always[:, used:])
        rows, always = _products(read, factors).requires_grad_(), always.requires_grad_()
        split = torch.split(rows, [shape[1] for shape in task.tables.values()], dim=-1)
        parts = torch.split(always[:, :used], [*own_sizes, *dense_sizes], dim=-1)
        dense = dict(zip(task.dense, parts[len(own_sizes) :], strict=True))
        losses: Tensor = self._losses(dense, parts[: len(own_sizes)], split, targets)
        for_rows, for_always = torch.autograd.grad(losses, [rows, always], shares)
        if not task.ratings and self.settings.regulariser:
            weight, own = self.settings.regulariser, sum(own_sizes)
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
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    for tensor, before in zip(changed, kept, strict=True):
        tensor.copy_(before)
    return graph


def sources(lookups: Lookups) -> Tensor:
    """Where each touched slot stands in the source."""
    sections = lookups.sections
    section = torch.searchsorted(sections.bounds, lookups.keys, right=True) - 1
    return sections.sent_at[section] + lookups.keys - sections.bounds[section]


class Back:
    """What a trained cohort gives back: to the server sums by group, to every client its own vectors."""

    def __init__(
        self,
        cohorts: Cohorts,
        samples: Samples,
        groups: list[int],
        held: dict[int, Held],
        lookups: Lookups,
        came_from: Tensor,
    ) -> None:
        self._task, self._settings = cohorts.task, cohorts.settings
        self._clients, self._groups, self._held = samples.clients, groups, held
        self._lookups, self._came_from = lookups, came_from
        self._values = cohorts.buffers.values[: len(came_from)]
        self._change = self._values - lookups.sections.source[came_from]

    def give(self, private: Weights, number: int, rejections: Rejections, totals: RoundTotals) -> None:
        """Check every reply, add up the good ones, and leave own vectors where they belong."""
        sections, source = self._lookups.sections, self._lookups.sections.source
        shared = max((at + self._held[group].received[name].numel() for group, of in sections.groups.items()
                      for name, at in of.items()), default=0)  # fmt: skip
        self._keep_own(private)
        of_server = self._came_from < shared
        place = whose(self._lookups.ends, len(self._change))
        problems = self._problems(place, of_server, number)
        weights = []
        for client, problem in zip(self._clients, problems, strict=True):
            if problem is not None:
                rejections.note(number + 1, client, problem)
            weight = self._settings.weight(self._task.samples(client))
            weights.append(0.0 if problem is not None else weight)
        factor = put(weights, source.device, source.dtype)[place]
        # Zero times NaN is NaN: what is refused is left out, not weighted down.
        counted = torch.where(factor > 0, self._change * factor, 0)
        sums = torch.zeros_like(source).index_add_(0, self._came_from, counted)
        for group, starts in sections.groups.items():
            weight = sum(of for of, mine in zip(weights, self._groups, strict=True) if mine == group)
            if not weight:
                continue
            held, sent = self._held[group].projections, self._held[group].received
            if not all(projection.linear for projection in held.values()):  # each recovered alone
                for index, (of, mine) in enumerate(zip(weights, self._groups, strict=True)):
                    if of and mine == group:
                        totals.add(held, self._reply(index, place, of_server), of)
                continue
            # Vectors of their own: not every slice begins where a kernel can read fast.
            parts = {name: sums[at : at + sent[name].numel()].clone() for name, at in starts.items()}
            if self._settings.aggregation == "paper":
                for name, part in parts.items():
                    part.add_(sent[name], alpha=weight)
            totals.add_sums(held, parts, weight)

    def _keep_own(self, private: Weights) -> None:
        who, start = put(self._clients, self._change.device), 0
        for name, size in self._task.own.items():
            if name in private:
                private[name][who] = self._values[self._lookups.fixed[0][:, start : start + size].long()]
            start += size

    def _problems(self, place: Tensor, of_server: Tensor, number: int) -> list[str | None]:
        """Why each client's reply cannot be used. What it did not touch it sends back as it came, so that is fine."""
        size = self._change.abs().nan_to_num_(nan=math.inf).mul_(of_server)
        ends = [0, *self._lookups.ends.tolist()]
        largest = torch.stack([size[start:end].amax() for start, end in pairwise(ends)]).tolist()
        found: list[str | None] = []
        for index, most in enumerate(largest):
            fault = None
            if self._settings.faults != FaultSettings():
                source = generator(self._settings, Purpose.FAULTS, number, self._clients[index])
                fault = fault_of(self._settings, source)
            if fault is not None:
                found.append(self._fault(index, place, of_server, fault))
            elif not math.isfinite(most):
                found.append("NaN or infinity")
            else:
                found.append("values out of range" if most > self._settings.largest_change else None)
        return found

    def _fault(self, index: int, place: Tensor, of_server: Tensor, fault: str) -> str | None:
        """Rare: what arrives is made in full, and checked as a server would."""
        held = self._held[self._groups[index]]
        reply = spoil(self._reply(index, place, of_server), fault)
        return problem_with(reply, held.received, held.projections, self._settings)

    def _reply(self, index: int, place: Tensor, of_server: Tensor) -> Weights:
        """All that a client sends, what it did not touch as it came."""
        group, mine = self._groups[index], (place == index) & of_server
        sections, sent = self._lookups.sections, self._held[self._groups[index]].received
        after = sections.source.index_add(0, self._came_from[mine], self._change[mine])
        return {name: after[at : at + sent[name].numel()] for name, at in sections.groups[group].items()}
