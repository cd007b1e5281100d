"""A cohort trained as one program over one vector; on a GPU the step is captured once and replayed.

Shapes do not depend on the round: samples, rows and touched slots live in buffers of the largest size a round can have,
and a counter on the device says which step is next. So the step can be recorded as a CUDA graph. A round then is one
setup, as many replays as the client with most steps needs, and one scatter back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice, pairwise

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.algorithms.gradient import GradientAlgorithm
from fairfold.backends import cohort_layout
from fairfold.backends.batched import distinct_batches
from fairfold.backends.capture import NUM_MOMENTS, Prefetcher, capture, lr_schedule
from fairfold.backends.cohort_layout import CohortDraws, CohortSamples, Lookups
from fairfold.federation.clients import Clients
from fairfold.federation.round import Scheduled, Separate, Updates
from fairfold.federation.scheduling import ClientSampler
from fairfold.federation.training import RankingTraining
from fairfold.federation.updates import ClientTask, ClientUpdate, Update, copy_async
from fairfold.kernels import ops
from fairfold.kernels.training import LookupBuffers, SignedPositions
from fairfold.typing import Weights

CLIENTS_AT_ONCE = 128
ROUNDS_AHEAD = 3


class Buffers:
    """Tensors that a step reads and writes, at fixed addresses."""

    def __init__(self, training: RankingTraining, clients: int, device: torch.device, dtype: torch.dtype) -> None:
        settings, counts = training.steps, training.train.counts_by_user
        batch, negatives = settings.batch_size, 0 if training.ratings else settings.num_negatives
        largest = counts.sort(descending=True).values[:clients]
        rows = int((largest * (1 + negatives * settings.local_epochs)).clamp(max=training.num_items).sum())
        self.steps = int(((counts + batch - 1) // batch).max()) * settings.local_epochs
        width = sum(shape[1] for shape in training.tables.values())
        fixed = cohort_layout.num_fixed(training)
        values = rows * width + clients * fixed

        def make(*shape: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.sample_rows = make(self.steps, clients, batch, 1 + negatives, kind=torch.int32)
        self.shares = make(self.steps, clients, batch, kind=dtype)
        self.targets = make(self.steps, clients, batch, kind=dtype) if training.has_targets else None
        self.rows = SignedPositions(make(rows, width, kind=torch.int32), make(rows, width, kind=torch.int8))
        self.fixed = SignedPositions(make(clients, fixed, kind=torch.int32), make(clients, fixed, kind=torch.int8))
        self.whole = make(clients, len(cohort_layout.factor_columns(training)), kind=dtype)
        self.values, self.gradient = make(values, kind=dtype), make(values, kind=dtype)
        self.moments = [make(values, kind=dtype) for _ in range(NUM_MOMENTS[settings.local_optimizer])]
        self.moving, self.step = make(self.steps, kind=torch.int64), make(1, kind=torch.int64)
        self.rates = lr_schedule(settings, self.steps).to(device, dtype)
        self.within_batch = torch.arange(batch, device=device)
        self.lookups = LookupBuffers(self.rows, self.fixed, self.sample_rows, self.shares, self.step)
        self.all_clients = torch.arange(clients, device=device, dtype=torch.int32)

    def fill(self, samples: CohortSamples, lookups: Lookups) -> None:
        """Set up a round; batches are padded with copies of a sample whose share in the loss is 0."""
        steps, clients = samples.sizes.shape
        sizes = samples.sizes[:, :, None]
        chosen = samples.starts[:, :, None] + torch.minimum(self.within_batch, (sizes - 1).clamp(min=0))
        for buffer in (self.sample_rows, self.shares):
            buffer[:steps, clients:] = 0
        self.sample_rows[:steps, :clients] = lookups.sample_rows[chosen]
        self.shares[:steps, :clients] = (self.within_batch < sizes) / sizes.clamp(min=1)
        if self.targets is not None and samples.targets is not None:
            self.targets[:steps, :clients] = samples.targets[chosen]
        num_rows = len(lookups.rows[0])
        self.rows.positions[:num_rows], self.rows.signs[:num_rows] = lookups.rows
        self.fixed.positions[clients:] = 0
        self.fixed.positions[:clients], self.fixed.signs[:clients] = lookups.fixed
        if self.whole.shape[1]:
            self.whole[:clients] = lookups.whole
        for vector in (self.gradient, *self.moments):
            vector[: len(lookups.keys)].zero_()
        working = (samples.sizes > 0).sum(1)
        self.moving[:steps] = copy_async(lookups.ends, working.device)[working - 1]
        self.step.zero_()


class GraphBackend:
    """The CUDA graph backend of recommenders: holds the buffers and, on a GPU, the captured step."""

    def __init__(
        self, sampler: ClientSampler, clients: Clients, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.sampler, self.clients, self.device = sampler, clients, device
        self.training, self.steps = clients.training, clients.training.steps
        cohort_size = sampler.plan.settings.fleet.clients_per_round or clients.num_clients
        self.clients_at_once = min(cohort_size, clients.num_clients, CLIENTS_AT_ONCE)
        self.buffers = Buffers(self.training, self.clients_at_once, device, dtype)
        in_dims = (0, 0, 0, 0 if self.training.has_targets else None)
        self._losses = vmap(self.training.unregularized_losses, in_dims=in_dims)
        self._graph: torch.cuda.CUDAGraph | None = None
        factors = cohort_layout.factor_columns(self.training)
        self._units = [torch.eye(columns, device=device, dtype=dtype) for columns in factors]
        self._draws = Prefetcher(self._draw_round, sampler.plan.settings.run.rounds, ROUNDS_AHEAD)

    def __call__(self, clients: Clients, scheduled: Scheduled, separate: Separate) -> Updates:
        """Compute client updates; see :data:`fairfold.federation.round.Backend`."""
        assert clients is self.clients
        remaining = iter(scheduled)
        first = next(remaining, None)
        if first is None:
            return
        remaining = chain([first], remaining)
        for drawn in self._draws.get(first.task.round_number):
            tasks = {each.client: each.task for each in islice(remaining, len(drawn.client_ids))}
            yield from self._train_cohort(drawn.to(self.device).samples(), tasks, separate)

    def _draw_round(self, round_number: int) -> list[CohortDraws]:
        cohort = self.sampler.ranks.owned(self.sampler.cohort(round_number).tolist())
        batches, pinned = distinct_batches(cohort, self.clients_at_once), self.device.type == "cuda"
        return [cohort_layout.draw(self.clients, client_ids, round_number, pinned=pinned) for client_ids in batches]

    def _train_cohort(self, samples: CohortSamples, task_of: Mapping[int, ClientTask], separate: Separate) -> Updates:
        tasks = [task_of[client] for client in samples.client_ids]
        local_state = self.clients.local_state
        sections = cohort_layout.make_sections(self.training, samples.client_ids, tasks, local_state, self.device)
        lookups = cohort_layout.find_lookups(self.training, samples, tasks, sections)
        self.buffers.fill(samples, lookups)
        sources = lookups.sources()
        values = self.buffers.values[: len(sources)]
        values.copy_(sections.source[sources])
        self._replay_steps(len(samples.sizes))
        self._draws.prefetch_after(tasks[0].round_number)
        updates = CohortUpdates(self.clients, values, samples.client_ids, tasks, lookups, sources)
        yield from updates.client_updates(separate)

    def _replay_steps(self, steps: int) -> None:
        if self.device.type != "cuda":
            self._take_steps(steps)
            return
        steps_per_replay = self.steps.local_epochs  # which divide the steps of every round
        if self._graph is None:
            buffers = self.buffers
            changed = [buffers.values, buffers.gradient, *buffers.moments, buffers.step]
            self._graph = capture(lambda: self._take_steps(steps_per_replay), changed)
        for _ in range(steps // steps_per_replay):
            self._graph.replay()

    def _take_steps(self, steps: int) -> None:
        for _ in range(steps):
            self._take_step()

    def _take_step(self) -> None:
        buffers = self.buffers
        pairwise_loss = not self.training.ratings and self.training.objective == "bpr"
        form = self.training.form if pairwise_loss and not self._units else None
        values, gradient = buffers.values, buffers.gradient
        if form is None or not ops.add_gradients(form, self.steps.l2, values, gradient, buffers.lookups):
            self.add_gradients()
        ops.step_prefix(values, gradient, buffers.moments, buffers.rates, buffers.moving, buffers.step)
        buffers.step += 1

    def add_gradients(self) -> None:
        """Add the gradient of the next step, under autograd: the specification of :func:`ops.add_gradients`."""
        training, buffers = self.training, self.buffers
        sample_rows = buffers.sample_rows.index_select(0, buffers.step)[0]  # [clients, samples, width]
        shares = buffers.shares.index_select(0, buffers.step)[0]
        targets = None if buffers.targets is None else buffers.targets.index_select(0, buffers.step)[0]
        row_lines = buffers.rows.positions, buffers.rows.signs, sample_rows
        fixed_lines = buffers.fixed.positions, buffers.fixed.signs, buffers.all_clients
        stored_rows = ops.recover_lines(buffers.values, *row_lines)
        fixed = ops.recover_lines(buffers.values, *fixed_lines)
        user_sizes = [*training.user_vectors.values()]
        dense_sizes = [math.prod(shape) for shape in training.dense.values()]
        num_users, used = sum(user_sizes), sum(user_sizes) + sum(dense_sizes)
        factors = self._second_factors(fixed[:, used:])
        rows, fixed = _products(stored_rows, factors).requires_grad_(), fixed.requires_grad_()
        table_rows = torch.split(rows, [shape[1] for shape in training.tables.values()], dim=-1)
        parts = torch.split(fixed[:, :used], [*user_sizes, *dense_sizes], dim=-1)
        dense = dict(zip(training.dense, parts[len(user_sizes) :], strict=True))
        losses: Tensor = self._losses(dense, parts[: len(user_sizes)], table_rows, targets)
        row_gradients, fixed_gradients = torch.autograd.grad(losses, [rows, fixed], shares)
        if (l2 := self.steps.l2) and not training.ratings:
            row_gradients = row_gradients.addcmul(rows.detach(), shares[..., None, None], value=l2)
            users = fixed.detach()[:, :num_users]
            fixed_gradients[:, :num_users].addcmul_(users, shares.sum(1, keepdim=True), value=l2)
        if factors:
            row_gradients = _product_gradients(row_gradients, stored_rows, factors, fixed_gradients[:, used:])
        ops.accumulate_lines(row_gradients, *row_lines, buffers.gradient)
        ops.accumulate_lines(fixed_gradients, *fixed_lines, buffers.gradient)

    def _second_factors(self, numbers: Tensor) -> list[Tensor]:
        """Matrices that the rows of each table are multiplied by, [clients, columns, columns], if any is a product."""
        parts = torch.split(numbers, [unit.numel() for unit in self._units], dim=-1) if self._units else ()
        tables = zip(parts, self._units, self.buffers.whole[:, :, None, None].unbind(1), strict=True)
        return [part.view(-1, *unit.shape) + is_whole * unit for part, unit, is_whole in tables]


def _products(rows: Tensor, factors: list[Tensor]) -> Tensor:
    """Rows of the tables, [clients, samples, width, columns of all], from rows of their first factors."""
    if not factors:
        return rows
    parts = torch.split(rows.flatten(1, 2), [len(factor[0]) for factor in factors], dim=-1)
    products = [part @ factor for part, factor in zip(parts, factors, strict=True)]
    return torch.cat(products, dim=-1).view(rows.shape)


def _product_gradients(gradients: Tensor, rows: Tensor, factors: list[Tensor], into: Tensor) -> Tensor:
    """Gradients of rows of the first factors, from those of the products; those of the second are written ``into``."""
    sizes = [len(factor[0]) for factor in factors]
    split = [torch.split(tensor.flatten(1, 2), sizes, dim=-1) for tensor in (gradients, rows)]
    row_gradients, factor_gradients = [], []
    for gradient, row, factor in zip(*split, factors, strict=True):
        row_gradients.append(gradient @ factor.mT)
        factor_gradients.append((row.mT @ gradient).flatten(1))
    into.copy_(torch.cat(factor_gradients, dim=1))
    return torch.cat(row_gradients, dim=-1).view(rows.shape)


@dataclass
class CohortUpdates:
    """The updates of a trained cohort: sums by size for the server, and the local state of every client."""

    clients: Clients
    values: Tensor
    client_ids: list[int]
    tasks: list[ClientTask]
    lookups: Lookups
    sources: Tensor

    def __post_init__(self) -> None:
        """Compute all clients' changes, and which client owns each of their numbers."""
        algorithm, sections = self.clients.plan.algorithm, self.lookups.sections
        assert isinstance(algorithm, GradientAlgorithm)
        self._algorithm = algorithm
        self._change = self.values - sections.source[self.sources]
        tasks = cohort_layout.group_tasks(self.tasks)
        starts = [(tasks[group], *start) for group, starts in sections.groups.items() for start in starts.items()]
        self._is_sent = self.sources < max((at + task.vectors[name].numel() for task, name, at in starts), default=0)
        self._owner = cohort_layout.owner_index(copy_async(self.lookups.ends, self.values.device), len(self._change))

    def client_updates(self, separate: Separate) -> Updates:
        """One update per size of the clients whose updates are valid; those of others one by one."""
        source = self.lookups.sections.source
        local_state = self._local_state()
        weights = [self._algorithm.weight(self.clients.num_samples(client)) for client in self.client_ids]
        is_separate = [client in separate for client in self.client_ids]
        summed = [0.0 if alone else weight for alone, weight in zip(is_separate, weights, strict=True)]
        valid = self._max_changes() <= self._algorithm.max_change
        factor = (copy_async(summed, source.device, source.dtype) * valid)[self._owner]
        # Zero times NaN is NaN: what is not counted is left out, not weighted down.
        weighted = (self._change * factor).masked_fill_(factor == 0, 0)
        sums = torch.zeros_like(source).index_add_(0, self.sources, weighted)
        # All is queued by now: only here a GPU is waited for.
        in_sum = [good and not alone for good, alone in zip(valid.tolist(), is_separate, strict=True)]
        for group, starts in self.lookups.sections.groups.items():
            members = [index for index, task in enumerate(self.tasks) if id(task) == group]
            task = self.tasks[members[0]]
            additive = all(projection.linear for projection in task.projections.values())
            together = [index for index in members if in_sum[index] and additive]
            weight = sum(weights[index] for index in together)
            if together:
                vectors = {name: sums[at : at + task.vectors[name].numel()] for name, at in starts.items()}
                # Copies: not every slice begins where a kernel can read fast.
                if self._algorithm.sends_weights:
                    vectors = {name: of.add(task.vectors[name], alpha=weight) for name, of in vectors.items()}
                else:
                    vectors = {name: of.clone() for name, of in vectors.items()}
                yield self._client_update(task, together, Update(vectors, weight), local_state)
            for index in members:
                if index not in together:
                    yield self._client_update(task, [index], self._single_update(index, weights[index]), local_state)

    def _client_update(self, task: ClientTask, indices: list[int], update: Update, state: Weights) -> ClientUpdate:
        chosen = copy_async(indices, self.values.device) if len(indices) > 1 else indices[0]
        rows = {name: vectors[chosen] for name, vectors in state.items()}
        return ClientUpdate(task, [self.client_ids[index] for index in indices], update, rows)

    def _local_state(self) -> Weights:
        """The trained local state of all clients, [clients, length] of each tensor."""
        local_state, start = {}, 0
        for name, size in self.clients.training.user_vectors.items():
            if name in self.clients.local_state:
                local_state[name] = self.values[self.lookups.fixed[0][:, start : start + size].long()]
            start += size
        return local_state

    def _max_changes(self) -> Tensor:
        """The largest change of each client's update; infinity where it has a NaN."""
        size = self._change.abs().nan_to_num_(nan=math.inf).mul_(self._is_sent)
        return torch.stack([size[start:end].amax() for start, end in pairwise([0, *self.lookups.ends])])

    def _single_update(self, index: int, weight: float) -> Update:
        """The whole update of one client, untouched slots included."""
        task, sections = self.tasks[index], self.lookups.sections
        mine = (self._owner == index) & self._is_sent
        start = sections.source if self._algorithm.sends_weights else torch.zeros_like(sections.source)
        after = start.index_add(0, self.sources[mine], self._change[mine])
        starts = sections.groups[id(task)].items()
        return Update({name: after[at : at + task.vectors[name].numel()] * weight for name, at in starts}, weight)
