"""A cohort of image classifiers trained as one program; on a GPU its steps are captured once and replayed.

The full weights of every client stand in one row of a matrix. A step is forward and backward of all networks at once
(:mod:`.image_layers`), then one pass over the slots (:func:`fairfold.kernels.ops.step_slots`): gradients are added up,
in a fixed order, the optimizer moves the slots, and the full weights are recovered. Methods differ by data alone: which
weights live in which slot, and which a client does not have. Clients are sorted by their number of steps, so those
still at work are the first ones; there is one recorded program for every number of them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.algorithms.gradient import GradientAlgorithm
from fairfold.backends.capture import NUM_MOMENTS, Prefetcher, capture, lr_schedule
from fairfold.backends.image_layers import LEFT, RIGHT, StackedLayout, StackedTensor, stacked_network
from fairfold.backends.images import trained_update
from fairfold.federation.clients import Clients, ImageClients
from fairfold.federation.round import Scheduled, Separate, Updates
from fairfold.federation.scheduling import ClientSampler
from fairfold.federation.training import as_input
from fairfold.federation.updates import ScheduledTask
from fairfold.kernels import ops
from fairfold.kernels.training import SlotTables
from fairfold.models import MLP

if TYPE_CHECKING:
    from fairfold.kernels.gpu.training import StackedLinear

CLIENTS_AT_ONCE = 32
STEPS_AT_ONCE = 8
"""Steps that one recorded program takes: the start of a program costs more than that of a kernel inside it."""
ROUNDS_AHEAD = 2


def linear_chain(names: Sequence[str], parts: Mapping[str, StackedTensor]) -> "list[StackedLinear]":
    """A network of linear layers for our own kernels; empty if a layer is the sum of a whole one and of factors."""
    from fairfold.kernels.gpu.training import StackedLinear

    chain = []
    for number, name in enumerate(names):
        weight, bias = f"{name}.weight", parts[f"{name}.bias"]
        factors = [] if weight + LEFT not in parts else [parts[weight + RIGHT], parts[weight + LEFT]]
        if factors and weight in parts:
            return []
        *before, end = factors or [parts[weight]]
        chain += [StackedLinear(part.values, part.gradient, None, None, rectify=False) for part in before]
        rectify = number < len(names) - 1
        chain.append(StackedLinear(end.values, end.gradient, bias.values, bias.gradient, rectify=rectify))
    return chain


class ImageGraphBackend:
    """The CUDA graph backend of image classifiers: holds the buffers and, on a GPU, the captured steps."""

    def __init__(self, sampler: ClientSampler, clients: ImageClients, device: torch.device) -> None:
        training, settings = clients.training, clients.training.steps
        self.sampler, self.clients, self.training = sampler, clients, training
        self.device, self.layout = device, StackedLayout(sampler.plan)
        self._positions: dict[int, Tensor] = {}
        self._tables: dict[int, SlotTables] = {}
        num_clients = min(sampler.plan.settings.fleet.clients_per_round or clients.num_clients, CLIENTS_AT_ONCE)
        max_samples = max(clients.num_samples(client) for client in sampler.participants.tolist())
        num_steps = -(-max_samples // settings.batch_size) * settings.local_epochs
        dtype = torch.get_default_dtype()

        def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        slots, coordinates, width = self.layout.slots, self.layout.coordinates, self.layout.width
        self._full, self._gradient = make(num_clients, coordinates), make(num_clients, coordinates)
        self._values = make(num_clients, slots)
        self._moments = [make(num_clients, slots) for _ in range(NUM_MOMENTS[settings.local_optimizer])]
        self._slot_tables = SlotTables.empty(num_clients, slots // width, coordinates, width, device)
        self._rows = make(num_steps, num_clients, settings.batch_size, kind=torch.int32)
        self._shares = make(num_steps, num_clients, settings.batch_size)
        self._step = make(1, kind=torch.int64)
        self._rates = lr_schedule(settings, num_steps).to(device, dtype)
        train = training.images.train
        self._pixels = as_input(train.images.to(device), training.seen).flatten(1)
        self._labels = train.labels.to(device)
        self._one_hot = torch.nn.functional.one_hot(train.labels, training.images.num_classes).to(device, dtype)
        self._networks: dict[int, torch.nn.Module] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._draws = Prefetcher(self._draw_batches, sampler.plan.settings.run.rounds, ROUNDS_AHEAD)

    def __call__(self, clients: Clients, scheduled: Scheduled, separate: Separate) -> Updates:  # noqa: ARG002
        """Compute client updates; see :data:`fairfold.federation.round.Backend`."""
        assert clients is self.clients
        if self.sampler.plan.method.rehashes:
            self._tables.clear()
        remaining = iter(scheduled)
        while batch := list(islice(remaining, len(self._full))):
            yield from self._train_cohort(batch, self._draws.get(batch[0].task.round_number))

    def _train_cohort(self, scheduled: list[ScheduledTask], batches: dict[int, Tensor]) -> Updates:
        ordered = sorted(scheduled, key=lambda each: -len(batches[each.client]))
        for row, each in enumerate(ordered):
            sent = torch.cat([each.task.vectors[name] for name in each.task.projections]).to(self.device)
            self._values[row].zero_().index_copy_(0, self._client_positions(each), sent)
            self._slot_tables.set_client(row, self._client_table(each))
        drawn = [batches[each.client] for each in ordered]
        self._fill_batches(drawn)
        for tensor in (*self._moments, self._step, self._gradient):
            tensor.zero_()
        self._update_slots(len(scheduled))  # with no gradient nothing moves: it only recovers the weights
        done = 0
        for working in range(len(scheduled), 0, -1):  # until the last of these has no more batches
            self._replay_steps(working, len(drawn[working - 1]) - done)
            done = len(drawn[working - 1])
        self._draws.prefetch_after(scheduled[0].task.round_number)
        row_of = {id(each): row for row, each in enumerate(ordered)}
        values = [self._values[row_of[id(each)]][self._client_positions(each)] for each in scheduled]
        trained = torch.split(torch.cat(values).cpu(), [len(vector) for vector in values])
        algorithm = self.sampler.plan.algorithm
        assert isinstance(algorithm, GradientAlgorithm)
        for each, vector in zip(scheduled, trained, strict=True):
            sizes = {name: projection.size for name, projection in each.task.projections.items()}
            vectors = dict(zip(sizes, torch.split(vector, [*sizes.values()]), strict=True))
            yield trained_update(algorithm, each, vectors, self.clients.num_samples(each.client))

    def _client_positions(self, scheduled_task: ScheduledTask) -> Tensor:
        """Positions of a client's vectors in its row of slots, found once per size."""
        task = scheduled_task.task
        if task.size not in self._positions:
            self._positions[task.size] = self.layout.positions(task.projections).to(self.device)
        return self._positions[task.size]

    def _client_table(self, scheduled_task: ScheduledTask) -> SlotTables:
        """The slot table of a client: one per size, or one per client whose hash is its own."""
        key = scheduled_task.client if self.sampler.plan.method.per_client else scheduled_task.task.size
        if key not in self._tables:
            self._tables[key] = self.layout.table(scheduled_task.task.projections, self.device)
        return self._tables[key]

    def _draw_batches(self, round_number: int) -> dict[int, Tensor]:
        """The batches of every client as the sequential backend draws them, int32 [steps, batch], padded by -1."""
        size = self.training.steps.batch_size
        batches = {}
        for client in self.sampler.ranks.owned(self.sampler.cohort(round_number).tolist()):
            orders = torch.stack(self.training.orders(client, self.clients.source(round_number, client)))
            padded = torch.nn.functional.pad(orders.to(torch.int32), (0, -orders.shape[1] % size), value=-1)
            batches[client] = padded.view(-1, size)
        return batches

    def _fill_batches(self, batches: list[Tensor]) -> None:
        """Set up the batches of a round; padding is an image whose share in the loss is 0."""
        steps, clients = len(batches[0]), len(batches)
        rows = torch.full((steps, clients, self.training.steps.batch_size), -1, dtype=torch.int32)
        for index, client_batches in enumerate(batches):
            rows[: len(client_batches), index] = client_batches
        rows = rows.to(self.device)
        real = rows >= 0
        self._rows[:steps, :clients] = rows.clamp_(min=0)
        self._shares[:steps, :clients] = real / real.sum(2, keepdim=True).clamp_(min=1)

    def _replay_steps(self, working: int, steps: int) -> None:
        if self.device.type != "cuda":
            self._take_steps(working, steps)
            return
        changed = [self._full, self._gradient, self._values, *self._moments, self._step]
        for count in [STEPS_AT_ONCE] * (steps // STEPS_AT_ONCE) + [1] * (steps % STEPS_AT_ONCE):
            if (working, count) not in self._graphs:
                take = partial(self._take_steps, working, count)
                self._graphs[working, count] = capture(take, changed, self._pool)
            self._graphs[working, count].replay()

    def _take_steps(self, working: int, steps: int) -> None:
        """Forward, backward and optimizer step of the first clients, all at once."""
        for _ in range(steps):
            if chain := self._linear_layers(working):
                from fairfold.kernels.gpu.training import Batches, chain_gradients  # imports Triton

                chain_gradients(chain, Batches(self._pixels, self._labels, self._rows, self._shares, self._step))
            else:
                self._autograd_gradients(working)
            self._update_slots(working)
            self._step += 1

    def _autograd_gradients(self, working: int) -> None:
        network = self._stacked_network(working)
        rows = self._rows[:, :working].index_select(0, self._step).view(-1)
        shares = self._shares[:, :working].index_select(0, self._step).view(-1, 1)
        with torch.enable_grad():
            logits = network(self._pixels.index_select(0, rows))
        # The gradient of the cross-entropy, its mean over a batch: (softmax - one_hot) / size.
        gradient = torch.softmax(logits.detach(), 1).sub_(self._one_hot.index_select(0, rows)).mul_(shares)
        with torch.autograd.set_multithreading_enabled(False):  # here, where the stream being captured is current
            torch.autograd.backward(logits, gradient)

    def _update_slots(self, working: int) -> None:
        slots = self._values, self._moments, self._slot_tables
        ops.step_slots(self._full[:working], self._gradient[:working], *slots, self._rates, self._step)

    def _linear_layers(self, working: int) -> "list[StackedLinear]":
        """The network as a chain of linear layers, for our own kernels (float32, on a GPU); empty if it is none."""
        network = self.training.architecture.network
        if not isinstance(network, MLP) or self.device.type != "cuda" or self._full.dtype != torch.float32:
            return []
        return linear_chain(network.chain, self._stacked_parts(working))

    def _stacked_parts(self, working: int) -> dict[str, StackedTensor]:
        parts = {}
        for name, (start, shape) in self.layout.parts.items():
            rows = [matrix[:working, start : start + prod(shape)] for matrix in (self._full, self._gradient)]
            parts[name] = StackedTensor(*(each.view(working, *shape) for each in rows))
        return parts

    def _stacked_network(self, working: int) -> torch.nn.Module:
        if working not in self._networks:
            network = self.training.architecture.empty_network()
            self._networks[working] = stacked_network(network, self._stacked_parts(working))
        return self._networks[working]
