"""Everything that the clients of a cohort train, side by side in one vector: client after client, tensor after tensor.

A client trains parts of tensors: the touched slots of its item tables, its user's vectors, the dense tensors. Here each
of these is a *section* of one flat vector that holds touched slots only, and everything a client looks up is a position
in that vector with a sign. Sizes, methods and kinds of tensors are data, not code: one lookup, one loss, one optimizer
step serve them all, and the results go back by one scatter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from fairfold.data import Interactions
from fairfold.data.sampling import negatives_at, non_items_below
from fairfold.federation.clients import Clients
from fairfold.federation.training import RankingTraining
from fairfold.federation.updates import ClientTask, copy_async
from fairfold.subspace.blocks import LowRank
from fairfold.subspace.projection import Coordinatewise, Projection
from fairfold.typing import Weights

FLAGS_PER_KEY = 64
"""A flag for every possible key is cheaper than sorting the keys unless there are many times more flags."""


def owner_index(ends: Tensor, count: int) -> Tensor:
    """The owner of each of ``count`` elements, where those of each owner end at ``ends``."""
    return torch.searchsorted(ends, torch.arange(count, device=ends.device), right=True)


def group_tasks(tasks: Sequence[ClientTask]) -> dict[int, ClientTask]:
    """The distinct tasks of a cohort by identity, in the order of their first client."""
    return {id(task): task for task in tasks}


@dataclass(frozen=True)
class CohortSamples:
    """All samples of a cohort's round, client after client, those with most steps first."""

    client_ids: list[int]
    items: Tensor  # int64 [samples, width]
    targets: Tensor | None  # float [samples]
    owner: Tensor  # int64 [samples]: the index of its client
    starts: Tensor  # int64 [steps, clients]: where the batch of a step starts; 0 once a client has finished
    sizes: Tensor  # int64 [steps, clients]: its samples; 0 once a client has finished


@dataclass(frozen=True)
class CohortDraws:
    """The random draws of a cohort's round, made on the host, and the interactions of its clients."""

    client_ids: list[int]  # those with most steps first
    train: Interactions  # theirs; users are numbered by their index in the cohort
    order: Tensor  # int64 [samples]: which of its client's interactions each sample is
    chance: Tensor | None  # float64 [samples, negatives]: which negatives go with it; None for ratings
    weights: Tensor | None  # float [clients]: of each negative, for the squared error of rankings
    epochs: int  # each has all interactions of a client
    batch: int  # samples in a step, at most
    steps: int  # of the client with most

    def to(self, device: torch.device) -> "CohortDraws":
        """The draws on a device, copied asynchronously."""

        def on_device(record: "CohortDraws | Interactions") -> dict[str, Any]:
            values = {field.name: getattr(record, field.name) for field in fields(record)}
            return {name: copy_async(value, device) for name, value in values.items() if isinstance(value, Tensor)}

        return replace(self, train=replace(self.train, **on_device(self.train)), **on_device(self))

    def samples(self) -> CohortSamples:
        """The samples that the sequential backend trains on, on the device where the draws are."""
        train, counts = self.train, self.train.counts_by_user
        owner = owner_index(train.offsets[1:] * self.epochs, len(self.order))
        interaction = train.offsets[owner] + self.order
        items = train.items[interaction, None]
        if self.chance is not None:
            owners = owner[:, None].expand(self.chance.shape)
            items = torch.cat([items, negatives_at(train, non_items_below(train), owners, self.chance)], dim=1)
        steps_per_epoch = ((counts + self.batch - 1) // self.batch).clamp(min=1)
        step = torch.arange(self.steps, device=counts.device)[:, None]
        before = step % steps_per_epoch * self.batch
        sizes = (counts - before).clamp(max=self.batch) * (step < steps_per_epoch * self.epochs)
        starts = train.offsets[:-1] * self.epochs + step // steps_per_epoch * counts + before
        targets = None if train.ratings is None else train.ratings[interaction]
        if self.weights is not None:
            targets = self.weights[owner]
        return CohortSamples(self.client_ids, items, targets, owner, starts * (sizes > 0), sizes)


def draw(clients: Clients, client_ids: list[int], round_number: int, *, pinned: bool = False) -> CohortDraws:
    """Draw for every client what the sequential backend draws; in pinned memory, which a GPU reads fast, if asked."""
    training, settings, train = clients.training, clients.training.steps, clients.training.train
    counts = {client: clients.num_samples(client) for client in client_ids}
    steps = {client: -(-count // settings.batch_size) * settings.local_epochs for client, count in counts.items()}
    ordered = sorted(client_ids, key=lambda client: -steps[client])  # those still at work are then always a prefix
    offsets = [0, *accumulate(counts[client] for client in ordered)]

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=pinned)

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, out=make(offsets[-1], dtype=parts[0].dtype))

    order = make(offsets[-1] * settings.local_epochs, dtype=torch.int64)
    chance = None if training.ratings else make(len(order), settings.num_negatives, dtype=torch.float64)
    for client, (start, stop) in zip(ordered, pairwise(offsets), strict=True):
        section = slice(start * settings.local_epochs, stop * settings.local_epochs)
        source = clients.source(round_number, client)
        training.draw(source, order[section], None if chance is None else chance[section])
    items = joined([train.of(client) for client in ordered])
    ratings = joined([train.ratings_of(client) for client in ordered]) if training.ratings else None
    interactions = Interactions(len(ordered), train.num_items, torch.tensor(offsets), items, ratings)
    weighted = training.has_targets and not training.ratings
    weights = training.negative_weights(interactions.counts_by_user) if weighted else None
    sizes = settings.local_epochs, settings.batch_size, max(steps.values())
    return CohortDraws(ordered, interactions, order, chance, weights, *sizes)


def distinct(keys: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Distinct keys in increasing order, the position of each given key among them, and the number below each bound.

    Bounds rise, and all keys are below the last one. A GPU is waited for once.
    """
    if bounds[-1] > FLAGS_PER_KEY * keys.numel():
        sorted_keys, inverse = torch.unique(keys, return_inverse=True)
        ends = torch.searchsorted(sorted_keys, copy_async(bounds, keys.device)).tolist()
        return sorted_keys, inverse.to(torch.int32), ends
    flags = torch.zeros(bounds[-1], dtype=torch.int8, device=keys.device).index_fill_(0, keys.view(-1), 1)
    position = flags.cumsum(0, dtype=torch.int32)
    ends = position[copy_async([bound - 1 for bound in bounds], keys.device)].tolist()
    inverse = position[keys] - 1
    return keys.new_empty(ends[-1]).scatter_(0, inverse.view(-1).long(), keys.view(-1)), inverse, ends


@dataclass(frozen=True)
class Sections:
    """Starts of all clients' sections: in the virtual vector of all slots, and in the vectors that the server sent."""

    names: list[str]  # tensors of a client, in order: item tables, the user's vectors, dense tensors
    bounds: Tensor  # int64 [clients · tensors + 1]: where each section of the virtual vector starts
    starts: list[int]  # the same on the host
    sent_at: Tensor  # int64 [clients · tensors]: where the section's vector starts in the source
    source: Tensor  # the vectors of each task, tensor after tensor, and behind them the clients' local state
    groups: dict[int, dict[str, int]]  # the start of every task's tensors in the source, by the task's identity


def make_sections(
    training: RankingTraining,
    client_ids: list[int],
    tasks: list[ClientTask],
    local_state: Weights,
    device: torch.device,
) -> Sections:
    """Lay out the vectors of a cohort's clients, given the task of each."""
    names = [*training.tables, *training.user_vectors, *training.dense]
    starts: dict[int, dict[str, int]] = {group: {} for group in group_tasks(tasks)}
    vectors, end = [], 0
    for group, task in group_tasks(tasks).items():
        for name in names:
            if name not in local_state:
                starts[group][name] = end
                end += task.vectors[name].numel()
                vectors.append(task.vectors[name])
    local_starts, chosen_clients = {}, copy_async(client_ids, device)
    for name, rows in local_state.items():
        local_starts[name] = end
        end += len(client_ids) * training.user_vectors[name]
        vectors.append(rows[chosen_clients].view(-1))
    sizes, sent_at = [], []
    for index, task in enumerate(tasks):
        for name in names:
            is_local = name in local_state
            sizes.append(training.user_vectors[name] if is_local else task.vectors[name].numel())
            sent_at.append(local_starts[name] + index * sizes[-1] if is_local else starts[id(task)][name])
    bounds = [0, *accumulate(sizes)]
    return Sections(names, copy_async(bounds, device), bounds, copy_async(sent_at, device), torch.cat(vectors), starts)


@dataclass(frozen=True)
class Lookups:
    """Positions of everything that is looked up, in the vector of touched slots."""

    sections: Sections
    keys: Tensor  # int64 [values]: position of every touched slot in the virtual vector, ascending
    ends: list[int]  # where each client's part of the touched slots ends
    rows: tuple[Tensor, Tensor]  # int32 [distinct rows of all clients, numbers a row in all tables]; signs, int8
    sample_rows: Tensor  # int32 [samples, width]: the row of each item of each sample
    fixed: tuple[Tensor, Tensor]  # int32 [clients, numbers]: what every sample uses (see num_fixed); signs
    whole: Tensor  # bool [clients, tables]: where the table is no product: its second factor is the unit matrix

    def sources(self) -> Tensor:
        """The position of each touched slot in the source."""
        sections = self.sections
        section = torch.searchsorted(sections.bounds, self.keys, right=True) - 1
        return sections.sent_at[section] + self.keys - sections.bounds[section]


def factor_columns(training: RankingTraining) -> list[int]:
    """Columns of the tables that some clients hold as products, each with a second factor of columns × columns."""
    return [shape[1] for shape in training.tables.values()] if training.products else []


def num_fixed(training: RankingTraining) -> int:
    """The count of numbers that every sample of a client uses: users' vectors, dense tensors, second factors."""
    dense = sum(prod(shape) for shape in training.dense.values())
    return sum(training.user_vectors.values()) + dense + sum(columns**2 for columns in factor_columns(training))


def find_lookups(
    training: RankingTraining, samples: CohortSamples, tasks: list[ClientTask], sections: Sections
) -> Lookups:
    """Hash everything the cohort will look up, once."""
    device = samples.items.device
    num_items = training.num_items
    num_tensors = len(sections.names)
    # Before a GPU is waited for, so that it works meanwhile.
    on_host = _fixed_positions(training, samples.client_ids, tasks, sections)
    fixed, fixed_signs = (copy_async(tensor, device) for tensor in on_host)
    catalogues = [(index + 1) * num_items for index in range(len(tasks))]
    row_keys, sample_rows, row_ends = distinct(samples.items + samples.owner[:, None] * num_items, catalogues)
    row_owner, row_item = row_keys // num_items, row_keys % num_items
    client_rows = [torch.arange(start, stop, device=device) for start, stop in pairwise([0, *row_ends])]
    width = sum(shape[1] for shape in training.tables.values())
    cut = len(row_keys) * width
    virtual = torch.empty(cut + fixed.numel(), dtype=torch.int64, device=device)
    signs = torch.empty(virtual.numel(), dtype=torch.int8, device=device)
    virtual[cut:], signs[cut:] = fixed.view(-1), fixed_signs.view(-1)
    rows, row_signs = virtual[:cut].view(-1, width), signs[:cut].view(-1, width)
    for task in group_tasks(tasks).values():
        chosen_rows = torch.cat([each for each, other in zip(client_rows, tasks, strict=True) if other is task])
        column = 0
        for number, (name, (_, size)) in enumerate(training.tables.items()):
            projection = task.projections[name]
            assert isinstance(projection, Coordinatewise | LowRank)  # see supports_batched_training
            slots, slot_signs = projection.row_slots(row_item[chosen_rows])
            starts = sections.bounds[row_owner[chosen_rows] * num_tensors + number]
            columns = slice(column, column + slots.shape[-1])
            rows[chosen_rows, columns] = slots + starts[:, None]
            row_signs[chosen_rows, columns] = slot_signs.expand(len(chosen_rows), -1)
            column += size
    keys, positions, ends = distinct(virtual, sections.starts[num_tensors::num_tensors])
    whole = [[not isinstance(task.projections[name], LowRank) for name in training.tables] for task in tasks]
    of_rows = positions[:cut].view(rows.shape), row_signs
    of_fixed = positions[cut:].view(fixed.shape), fixed_signs
    return Lookups(sections, keys, ends, of_rows, sample_rows, of_fixed, copy_async(whole, device))


def _fixed_positions(
    training: RankingTraining, client_ids: list[int], tasks: list[ClientTask], sections: Sections
) -> tuple[Tensor, Tensor]:
    """Positions and signs of what every sample of a client uses, one row per client: few, so found on the host."""
    num_tables, factors = len(training.tables), factor_columns(training)
    starts = torch.tensor(sections.starts[:-1]).view(len(client_ids), -1)
    starts = torch.cat([starts[:, num_tables:], starts[:, : len(factors)]], dim=1)
    positions = torch.empty(len(client_ids), num_fixed(training), dtype=torch.int64)
    signs = torch.empty_like(positions, dtype=torch.int8)
    for task in group_tasks(tasks).values():
        members = [index for index, other in enumerate(tasks) if other is task]
        member_ids = torch.tensor([client_ids[index] for index in members])
        names, tables = sections.names[num_tables:], zip(training.tables, factors, strict=False)
        parts = [_fixed_slots(training, name, task.projections, member_ids) for name in names]
        parts += [_factor_slots(task.projections[name], columns) for name, columns in tables]
        begins = starts[members].unbind(1)
        shifted = [slots + begin[:, None] for (slots, _), begin in zip(parts, begins, strict=True)]
        positions[members] = torch.cat(shifted, dim=1)
        signs[members] = torch.cat([slot_signs.expand(len(members), -1) for _, slot_signs in parts], dim=1)
    return positions, signs


def _fixed_slots(
    training: RankingTraining, name: str, projections: Mapping[str, Projection], client_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Slots and signs of what these clients use of a tensor at every sample, a row per client (or one for all)."""
    if name in training.user_vectors and name not in training.user_tables:
        slots = torch.arange(training.user_vectors[name])[None]
        return slots, torch.ones_like(slots, dtype=torch.int8)
    projection = projections[name]
    assert isinstance(projection, Coordinatewise)  # see supports_batched_training
    if name in training.user_vectors:
        return projection.row_slots(client_ids)
    return projection.places(torch.arange(prod(training.dense[name]))[None])


def _factor_slots(projection: Projection, columns: int) -> tuple[Tensor, Tensor]:
    """Slots and signs of a table's second factor, one row; signs of 0 for a table that is no product."""
    if isinstance(projection, LowRank):
        slots, signs = projection.factor_places()
        return slots[None], signs[None]
    slots = torch.zeros(1, columns**2, dtype=torch.int64)
    return slots, torch.zeros_like(slots, dtype=torch.int8)
