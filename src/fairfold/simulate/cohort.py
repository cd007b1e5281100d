"""Everything that the clients of a cohort train, side by side in one vector: client after client, tensor after tensor.

A client trains parts of tensors: the touched slots of its item tables, its user's vectors, the dense tensors. Here each
of these is a *section* of one flat vector that holds touched slots only, and everything a client looks up is a position
in that vector with a sign. Sizes, methods and kinds of tensors are data, not code: one lookup, one loss, one optimiser
step serve them all, and what came of it goes back by one scatter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fairfold.federation.projection import Assignment, Coordinatewise, Projection
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.task import Batch, Task, Weights
from fairfold.kernels.reference import row_coordinates

FLAGS_A_KEY = 64
"""A flag for every possible key is cheaper than sorting the keys unless there are many times more flags."""


@dataclass(frozen=True)
class Samples:
    """All samples of a cohort's round, client after client, those with most steps first.

    Attributes:
        clients: Who they are, by place.
        items: int64 [samples, width].
        targets: float [samples], or None.
        starts: int64 [steps, clients]: where the batch of a step starts; 0 once a client has finished.
        sizes: int64 [steps, clients]: its samples; 0 once a client has finished.
    """

    clients: list[int]
    items: Tensor
    targets: Tensor | None
    starts: Tensor
    sizes: Tensor

    def to(self, device: torch.device) -> "Samples":
        """The same on another device."""
        if device.type == "cpu":
            return self
        moved = [
            None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)
            for tensor in (self.items, self.targets, self.starts, self.sizes)
        ]
        return Samples(self.clients, moved[0], moved[1], moved[2], moved[3])  # type: ignore[arg-type]


def draw_samples(task: Task, clients: list[int], round_number: int) -> Samples:
    """The batches that every client draws in a round, as the readable loop draws them."""
    drawn: list[tuple[int, list[Batch]]] = [
        (client, task.batches(client, generator(task.settings, Purpose.TRAINING, round_number, client)))
        for client in clients
    ]
    drawn.sort(key=lambda pair: -len(pair[1]))  # those still at work are then always a prefix
    batches = [batch for _, of_client in drawn for batch in of_client]
    steps = max((len(of_client) for _, of_client in drawn), default=0)
    starts = torch.zeros(steps, len(clients), dtype=torch.int64)
    sizes = torch.zeros_like(starts)
    begin = 0
    for place, (_, of_client) in enumerate(drawn):
        lengths = torch.tensor([len(batch) for batch in of_client], dtype=torch.int64)
        ends = lengths.cumsum(0)
        starts[: len(of_client), place] = begin + ends - lengths
        sizes[: len(of_client), place] = lengths
        begin += int(ends[-1]) if len(of_client) else 0
    width = batches[0].items.shape[1] if batches else 1
    items = torch.cat([batch.items for batch in batches]) if batches else torch.empty(0, width, dtype=torch.int64)
    targets = None
    if task.ratings:
        targets = torch.cat([batch.targets for batch in batches if batch.targets is not None])
    return Samples([client for client, _ in drawn], items, targets, starts, sizes)


def distinct(keys: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Distinct keys in increasing order, and where each given key stands among them; all keys are below ``bound``."""
    if bound > FLAGS_A_KEY * keys.numel():
        found, inverse = torch.unique(keys, return_inverse=True)
        return found, inverse
    flags = torch.zeros(bound, dtype=torch.int8, device=keys.device)
    flags[keys.view(-1)] = 1
    position = flags.cumsum(0, dtype=torch.int32)
    return flags.nonzero().view(-1), (position[keys] - 1).long()


@dataclass(frozen=True)
class Sections:
    """Where the parts of tensors stand in two vectors: all of them (virtual), and in what the server sent.

    Attributes:
        names: Tensors of a client, in order: item tables, the user's vectors, dense tensors.
        bounds: int64 [clients · tensors + 1]: where each section of the virtual vector starts.
        sent_at: int64 [clients · tensors]: where the section's vector starts in ``source``.
        source: What was sent to each group, tensor after tensor, and behind it the clients' own vectors.
        groups: The start of every group's tensors in ``source``.
    """

    names: list[str]
    bounds: Tensor
    sent_at: Tensor
    source: Tensor
    groups: dict[int, dict[str, int]]


def lay_out(
    task: Task, clients: list[int], groups: list[int], sent: dict[int, Weights], private: Weights, device: torch.device
) -> Sections:
    """Decide where everything stands. ``groups`` names, for every client, whose vectors it holds."""
    names = [*task.tables, *task.own, *task.dense]
    starts: dict[int, dict[str, int]] = {}
    pieces, at = [], 0
    for group in dict.fromkeys(groups):
        starts[group] = {}
        for name in names:
            if name not in private:
                starts[group][name] = at
                at += sent[group][name].numel()
                pieces.append(sent[group][name])
    own_at, chosen = {}, torch.tensor(clients, device=device)
    for name, vectors in private.items():
        own_at[name] = at
        at += len(clients) * task.own[name]
        pieces.append(vectors[chosen].view(-1))
    sizes, sent_at = [], []
    for place, group in enumerate(groups):
        for name in names:
            sizes.append(task.own[name] if name in private else sent[group][name].numel())
            sent_at.append(own_at[name] + place * task.own[name] if name in private else starts[group][name])
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    return Sections(names, bounds.to(device), torch.tensor(sent_at, device=device), torch.cat(pieces), starts)


@dataclass(frozen=True)
class Lookups:
    """Positions of everything that is looked up, in the vector of touched slots.

    Attributes:
        sections: Where things come from.
        keys: int64 [values]: place of every touched slot in the virtual vector, ascending.
        ends: int64 [clients]: where each client's part of the touched slots ends.
        rows: int32 [distinct rows of all clients, numbers a row in all tables], and their signs, int8.
        places: int64 [samples, width]: the row of each item of each sample.
        fixed: int32 [clients, numbers], positions of what every sample uses (users' vectors, dense tensors); signs.
    """

    sections: Sections
    keys: Tensor
    ends: Tensor
    rows: tuple[Tensor, Tensor]
    places: Tensor
    fixed: tuple[Tensor, Tensor]


def find_lookups(
    task: Task, samples: Samples, groups: list[int], held: dict[int, Assignment], sections: Sections
) -> Lookups:
    """Hash everything the cohort will look up, once."""
    device, num_items = samples.items.device, task.data.num_items
    count, tensors = len(samples.clients), len(sections.names)
    per_client = (samples.sizes.sum(0)).to(device)
    place_of_sample = torch.repeat_interleave(torch.arange(count, device=device), per_client)
    row_keys, places = distinct(samples.items + place_of_sample[:, None] * num_items, count * num_items)
    row_place, row_item = row_keys // num_items, row_keys % num_items
    group_of, clients = torch.tensor(groups, device=device), torch.tensor(samples.clients, device=device)
    width = sum(shape[1] for shape in task.tables.values())
    used = sum(task.own.values()) + sum(prod(shape) for shape in task.dense.values())
    virtual = torch.empty(len(row_keys) * width + count * used, dtype=torch.int64, device=device)
    signs = torch.empty(virtual.numel(), dtype=torch.int8, device=device)
    cut = len(row_keys) * width
    rows, row_signs = virtual[:cut].view(-1, width), signs[:cut].view(-1, width)
    fixed, fixed_signs = virtual[cut:].view(count, used), signs[cut:].view(count, used)
    for group in dict.fromkeys(groups):
        projections = held[group].projections or {}
        members = (group_of == group).nonzero().view(-1)
        mine = (group_of[row_place] == group).nonzero().view(-1)
        column = 0
        for number, (name, (_, size)) in enumerate(task.tables.items()):
            found = _places(projections[name], row_coordinates(row_item[mine], size))
            _put(rows, row_signs, mine, column, found, sections.bounds[row_place[mine] * tensors + number])
            column += size
        column = 0
        for number, name in enumerate(sections.names[len(task.tables) :], len(task.tables)):
            found = _used_by_all(task, name, projections, clients[members])
            _put(fixed, fixed_signs, members, column, found, sections.bounds[members * tensors + number])
            column += found[0].shape[-1]
    keys, found_at = distinct(virtual, int(sections.bounds[-1]))
    found_at = found_at.to(torch.int32)
    ends = torch.searchsorted(keys, sections.bounds[tensors::tensors].contiguous())
    return Lookups(
        sections,
        keys,
        ends,
        (found_at[:cut].view(rows.shape), row_signs),
        places,
        (found_at[cut:].view(fixed.shape), fixed_signs),
    )


def _used_by_all(
    task: Task, name: str, projections: Mapping[str, Projection], clients: Tensor
) -> tuple[Tensor, Tensor]:
    """Slots and signs of what every sample of these clients uses of a tensor, a line a client (or one for all)."""
    if name in task.user_tables:
        return _places(projections[name], row_coordinates(clients, task.own[name]))
    size = task.own[name] if name in task.own else prod(task.dense[name])
    everything = torch.arange(size, device=clients.device)[None]
    if name in task.own:
        return everything, torch.ones_like(everything, dtype=torch.int8)
    return _places(projections[name], everything)


def _places(projection: Projection, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(projection, Coordinatewise)  # see serves
    return projection.places(coordinates)


def _put(
    into: Tensor, signs_into: Tensor, lines: Tensor, column: int, found: tuple[Tensor, Tensor], starts: Tensor
) -> None:
    """Write slots, moved to where their section starts, and signs into some lines from a column on."""
    slots, signs = found
    part = slice(column, column + slots.shape[-1])
    into[lines, part] = slots + starts[:, None]
    signs_into[lines, part] = signs.expand(len(lines), -1)
