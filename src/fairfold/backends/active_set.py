"""What one client touches in a round, gathered in one vector, and its training: compiled, or under autograd.

*The active set is exact*: a local optimizer starts fresh each round, so a slot that no sample of the round touches does
not move. Tables, dense tensors and the user's own vectors are alike: rows of numbers, each with a position among the
client's values and a sign. Sizes and methods are data, not shapes.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.federation.clients import Clients
from fairfold.federation.training import LocalOptimizer, RankingTraining
from fairfold.federation.updates import ClientTask, ScheduledTask
from fairfold.kernels import ops
from fairfold.kernels.native import calls
from fairfold.kernels.native.loader import NotSupported
from fairfold.kernels.reference import row_coordinates
from fairfold.kernels.training import LocalSamples, Objective, SignedPositions
from fairfold.subspace.blocks import LowRank
from fairfold.subspace.projection import Coordinatewise


@dataclass
class ActiveSet:
    """All that one client trains in a round, and the samples it trains on."""

    client: int
    task: ClientTask
    values: Tensor  # the touched slots of every tensor, in order of their first touch, and the user's own vectors
    start: Tensor  # the values before training
    sections: dict[str, slice]  # which of the values belong to which tensor
    slots: dict[str, Tensor]  # the slot of its compact vector that each value of a tensor is; not for local state
    # Where rows stand among the values: [rows, row length] of item tables, [numbers] of others.
    positions: dict[str, SignedPositions]
    factors: dict[str, SignedPositions]  # of the small matrix that the rows of a low-rank table are multiplied by
    samples: LocalSamples  # rows of the item tables, step by step
    prox_weights: Tensor | None  # how strongly each value is pulled to where it started (FedProx)


def gather(clients: Clients, scheduled_task: ScheduledTask) -> ActiveSet:
    """Gather the active set of a client's task."""
    training, client, task = clients.training, scheduled_task.client, scheduled_task.task
    local = training.round_samples(client, clients.source(task.round_number, client))
    rows, items = ops.factorize(local.items)
    coordinates = {name: row_coordinates(items, shape[-1]) for name, shape in training.tables.items()}
    coordinates |= {name: torch.arange(prod(shape)) for name, shape in training.dense.items()}
    user = torch.tensor([client])
    coordinates |= {name: row_coordinates(user, shape[-1]).view(-1) for name, shape in training.user_tables.items()}
    values = list[Tensor]()
    prox_weights = list[Tensor]()
    start = 0
    sections, slots = dict[str, slice](), dict[str, Tensor]()
    positions, factors = dict[str, SignedPositions](), dict[str, SignedPositions]()
    for name, wanted in coordinates.items():
        projection = task.projections[name]
        if isinstance(projection, LowRank):
            left, right = projection.slots(items)
            slots[name] = torch.cat([left.view(-1), right.view(-1)])
            positions[name] = SignedPositions.contiguous_run(start, left.shape)
            factors[name] = SignedPositions.contiguous_run(start + left.numel(), right.shape)
        else:
            assert isinstance(projection, Coordinatewise)  # see supports_batched_training
            among_slots, slots[name] = _touched_positions(projection, wanted)
            positions[name] = among_slots.shifted(start)
        values.append(task.vectors[name].index_select(0, slots[name]))
        sections[name] = slice(start, start + len(slots[name]))
        if training.prox:
            assert isinstance(projection, Coordinatewise)  # see supports_batched_training
            prox_weights.append(training.prox * projection.counts(slots[name]))
        start = sections[name].stop
    for name, vectors in clients.local_state.items():
        positions[name] = SignedPositions.contiguous_run(start, vectors.shape[1:])
        values.append(vectors[client])
        sections[name] = slice(start, start + vectors.shape[1])
        start = sections[name].stop
        if training.prox:
            prox_weights.append(torch.zeros(vectors.shape[1]))
    joined = torch.cat(values)
    targets = None if local.targets is None else local.targets.to(joined.dtype)
    samples = LocalSamples(rows, targets, torch.tensor(local.ends, dtype=torch.int64))
    prox = torch.cat(prox_weights).to(joined.dtype) if prox_weights else None
    return ActiveSet(client, task, joined, joined.clone(), sections, slots, positions, factors, samples, prox)


def _touched_positions(projection: Coordinatewise, coordinates: Tensor) -> tuple[SignedPositions, Tensor]:
    """Positions of distinct coordinates among the touched slots, and which slots these are."""
    slots, signs = projection.places(coordinates)
    if slots is coordinates:  # the full space, where no slot is shared
        numbers = torch.arange(coordinates.numel(), dtype=torch.int32)
        return SignedPositions(numbers.view(coordinates.shape), signs), slots.reshape(-1)
    numbers, distinct = ops.factorize(slots)
    return SignedPositions(numbers, signs), distinct


def train_compiled(client: ActiveSet, training: RankingTraining) -> bool:
    """Train a client in one call of compiled code, in place; False where the model or the machine has none."""
    settings, form = training.steps, training.form
    loss = "ratings" if training.ratings else training.objective
    if form is None or client.factors or loss == "squared":
        return False
    objective = Objective(loss, 0.0 if training.ratings else settings.l2, settings.local_optimizer, settings.local_lr)
    tables, own, dense = (
        [client.positions[name] for name in names] for names in (training.tables, training.user_vectors, training.dense)
    )
    positions = tables, own, SignedPositions.joined(dense)
    try:
        calls.train_client(form, objective, client.values, client.prox_weights, *positions, client.samples)
    except NotSupported:
        return False
    return True


def train_lockstep(clients: list[ActiveSet], training: RankingTraining) -> None:
    """Train clients under autograd, all in one program, in place."""
    by_ranks: dict[tuple[torch.Size, ...], list[ActiveSet]] = {}
    for client in clients:
        if client.samples.ends.numel():
            ranks = tuple(factor.positions.shape for factor in client.factors.values())
            by_ranks.setdefault(ranks, []).append(client)
    for group in by_ranks.values():
        _Lockstep(group, training).train()


class _Lockstep:
    """Clients that take their steps together, those with most steps first: those still at work are always a prefix."""

    def __init__(self, clients: list[ActiveSet], training: RankingTraining) -> None:
        self._training = training
        self._clients = sorted(clients, key=lambda client: -client.samples.ends.numel())
        self._values = torch.cat([client.values for client in self._clients])
        self._lengths = [client.samples.ends.numel() for client in self._clients]
        sizes = torch.tensor([client.values.numel() for client in self._clients])
        self._ends = sizes.cumsum(0).tolist()
        offsets = [end - int(size) for end, size in zip(self._ends, sizes, strict=True)]
        self._factors = list(self._clients[0].factors)
        shifted = [
            {name: positions.shifted(offset) for name, positions in client.positions.items()}
            | {_factor_name(name): positions.shifted(offset) for name, positions in client.factors.items()}
            for client, offset in zip(self._clients, offsets, strict=True)
        ]
        self._tables = {name: SignedPositions.joined([each[name] for each in shifted]) for name in training.tables}
        others = (*training.dense, *training.user_vectors, *(_factor_name(name) for name in self._factors))
        self._others = {name: SignedPositions.joined([each[name] for each in shifted], torch.stack) for name in others}
        weights = [client.prox_weights for client in self._clients if client.prox_weights is not None]
        self._prox_weights = torch.cat(weights) if training.prox else None
        self._start = torch.cat([client.start for client in self._clients]) if training.prox else self._values
        self._rows, self._shares, self._targets = self._padded()
        self._losses = vmap(training.sample_losses, in_dims=(0, 0, 0, 0 if training.has_targets else None))

    def _padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows [steps, clients, samples, width], shares of each sample in its step's loss, and targets, padded."""
        samples = [client.samples for client in self._clients]
        sizes = [torch.diff(each.ends, prepend=torch.tensor([0])) for each in samples]
        steps, longest = max(self._lengths), max(int(size.max()) for size in sizes)
        rows = torch.zeros(steps, len(samples), longest, samples[0].rows.shape[1], dtype=torch.int32)
        shares = torch.zeros(steps, len(samples), longest, dtype=self._values.dtype)
        targets = torch.zeros_like(shares) if self._training.has_targets else None
        offset = 0
        for index, (each, size, client) in enumerate(zip(samples, sizes, self._clients, strict=True)):
            real = torch.arange(longest) < size[:, None]
            rows[:, index] = offset  # padding reads a row of its own client, left out of the loss by its share of 0
            rows[: len(size), index][real] = each.rows + offset
            shares[: len(size), index] = torch.where(real, 1 / size[:, None], 0)
            if targets is not None and each.targets is not None:
                targets[: len(size), index][real] = each.targets
            offset += len(client.positions[next(iter(self._training.tables))].positions)
        return rows, shares, targets

    def train(self) -> None:
        """Take all steps, and write each client's values back."""
        gradient = torch.zeros_like(self._values)  # filled and emptied at every step
        optimizer = LocalOptimizer(self._values, self._training.steps)
        for step in range(self._lengths[0]):
            working = sum(length > step for length in self._lengths)
            end = self._ends[working - 1]
            self._add_gradients(step, working, gradient)
            if self._prox_weights is not None:
                gradient[:end] += self._prox_weights[:end] * (self._values[:end] - self._start[:end])
            optimizer.step(gradient, end)
            gradient[:end].zero_()
        for client, end in zip(self._clients, self._ends, strict=True):
            client.values.copy_(self._values[end - client.values.numel() : end])

    def _add_gradients(self, step: int, working: int, into: Tensor) -> None:
        training = self._training
        local = self._rows[step, :working]
        read = {name: positions.select(local.reshape(-1)) for name, positions in self._tables.items()}
        read |= {name: positions.select(slice(working)) for name, positions in self._others.items()}
        values = {name: ops.recover_positions(self._values, each.positions, each.signs) for name, each in read.items()}
        flat = {name: tensor.requires_grad_() for name, tensor in values.items()}
        losses: Tensor = self._losses(
            {name: flat[name] for name in training.dense},
            [flat[name] for name in training.user_vectors],
            [self._item_rows(name, local.shape, flat) for name in training.tables],
            None if self._targets is None else self._targets[step, :working],
        )
        shares = self._shares[step, :working]
        loss = torch.where(shares > 0, losses * shares, 0).sum()
        gradients = torch.autograd.grad(loss, list(flat.values()))
        for (name, each), gradient in zip(read.items(), gradients, strict=True):
            ops.accumulate_positions(gradient.reshape(flat[name].shape), each.positions, each.signs, into)

    def _item_rows(self, name: str, shape: torch.Size, flat: dict[str, Tensor]) -> Tensor:
        """Rows of a table for every sample, [clients, samples, width, columns]."""
        rows = flat[name].view(*shape, -1)
        return rows @ flat[_factor_name(name)][:, None] if name in self._factors else rows


def _factor_name(name: str) -> str:
    return f"second factor of {name}"
