"""Everything that the clients of a cohort train, side by side in one vector: client after client, tensor after tensor.

A client trains parts of tensors: the touched slots of its item tables, its user's vectors, the dense tensors. Here each
of these is a *section* of one flat vector that holds touched slots only, and everything a client looks up is a position
in that vector with a sign. Sizes, methods and kinds of tensors are data, not code: one lookup, one loss, one optimiser
step serve them all, and what came of it goes back by one scatter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from fairfold.data import Interactions
from fairfold.data.negatives import chosen, non_items_below
from fairfold.projections import Coordinatewise, LowRank, Projection
from fairfold.protocol.people import People
from fairfold.protocol.words import Sent, moved, put
from fairfold.protocol.work import Work
from fairfold.values import Weights

FLAGS_A_KEY = 64
"""A flag for every possible key is cheaper than sorting the keys unless there are many times more flags."""


def whose(ends: Tensor, count: int) -> Tensor:
    """The place of each of ``count`` things that stand one place after another, each ending where ``ends`` says."""
    return torch.searchsorted(ends, torch.arange(count, device=ends.device), right=True)


@dataclass(frozen=True)
class Samples:
    """All samples of a cohort's round, client after client, those with most steps first."""

    clients: list[int]  # who they are, by place
    items: Tensor  # int64 [samples, width]
    targets: Tensor | None  # float [samples]
    place: Tensor  # int64 [samples]: whose each is
    starts: Tensor  # int64 [steps, clients]: where the batch of a step starts; 0 once a client has finished
    sizes: Tensor  # int64 [steps, clients]: its samples; 0 once a client has finished


@dataclass(frozen=True)
class Draws:
    """What chance decides of a cohort's round, and the interactions it is about.

    Random numbers come from the host, one client after another; all that follows from them is worked out where the
    cohort is trained, for all clients at once.
    """

    clients: list[int]  # those with most steps first; their index is their place
    train: Interactions  # theirs; users are numbered by place
    order: Tensor  # int64 [samples]: which of its client's interactions each sample is
    chance: Tensor | None  # float64 [samples, negatives]: which negatives go with it; None for ratings
    weights: Tensor | None  # float [clients]: what each of these counts, for the squared error of rankings
    epochs: int  # each has all interactions of a client
    batch: int  # samples in a step, at most
    steps: int  # of the busiest client

    def to(self, device: torch.device) -> "Draws":
        """The same on a device, which the host does not wait for."""

        def on_device(one: "Draws | Interactions") -> dict[str, Any]:
            held = {field.name: getattr(one, field.name) for field in fields(one)}
            return {name: moved(of, device) for name, of in held.items() if isinstance(of, Tensor)}

        return replace(self, train=replace(self.train, **on_device(self.train)), **on_device(self))

    def samples(self) -> Samples:
        """What the readable loop trains on, on the device where the draws are."""
        train, counts = self.train, self.train.counts_by_user
        place = whose(train.offsets[1:] * self.epochs, len(self.order))
        mine = train.offsets[place] + self.order
        items = train.items[mine, None]
        if self.chance is not None:
            owners = place[:, None].expand(self.chance.shape)
            items = torch.cat([items, chosen(train, non_items_below(train), owners, self.chance)], dim=1)
        in_epoch = ((counts + self.batch - 1) // self.batch).clamp(min=1)
        step = torch.arange(self.steps, device=counts.device)[:, None]
        before = step % in_epoch * self.batch
        sizes = (counts - before).clamp(max=self.batch) * (step < in_epoch * self.epochs)
        starts = train.offsets[:-1] * self.epochs + step // in_epoch * counts + before
        targets = None if train.ratings is None else train.ratings[mine]
        if self.weights is not None:
            targets = self.weights[place]
        return Samples(self.clients, items, targets, place, starts * (sizes > 0), sizes)


def draw(people: People, clients: list[int], round_number: int, *, pinned: bool = False) -> Draws:
    """Draw for every client what the readable loop draws; into pinned memory if asked, from where a GPU reads fast."""
    work = people.work
    steps_of, train = work.steps, work.train
    counts = {client: people.samples(client) for client in clients}
    steps = {client: -(-count // steps_of.batch_size) * steps_of.local_epochs for client, count in counts.items()}
    ordered = sorted(clients, key=lambda client: -steps[client])  # those still at work are then always a prefix
    offsets = [0, *accumulate(counts[client] for client in ordered)]

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=pinned)

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, out=make(offsets[-1], dtype=parts[0].dtype))

    order = make(offsets[-1] * steps_of.local_epochs, dtype=torch.int64)
    chance = None if work.ratings else make(len(order), steps_of.negatives, dtype=torch.float64)
    for client, (start, stop) in zip(ordered, pairwise(offsets), strict=True):
        part = slice(start * steps_of.local_epochs, stop * steps_of.local_epochs)
        source = people.source(round_number, client)
        work.draw(source, order[part], None if chance is None else chance[part])
    interactions = Interactions(
        len(ordered),
        train.num_items,
        torch.tensor(offsets),
        joined([train.of(client) for client in ordered]),
        joined([train.ratings_of(client) for client in ordered]) if work.ratings else None,
    )
    weights = None if work.ratings or not work.has_targets else work.negative_weights(interactions.counts_by_user)
    return Draws(
        ordered, interactions, order, chance, weights, steps_of.local_epochs, steps_of.batch_size, max(steps.values())
    )


def distinct(keys: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Distinct keys in increasing order, where each given key stands among them, and how many are below each bound.

    Bounds rise, and all keys are below the last one. A GPU is waited for once.
    """
    if bounds[-1] > FLAGS_A_KEY * keys.numel():
        found, inverse = torch.unique(keys, return_inverse=True)
        return found, inverse.to(torch.int32), torch.searchsorted(found, put(bounds, keys.device)).tolist()
    flags = torch.zeros(bounds[-1], dtype=torch.int8, device=keys.device).index_fill_(0, keys.view(-1), 1)
    position = flags.cumsum(0, dtype=torch.int32)
    ends = position[put([bound - 1 for bound in bounds], keys.device)].tolist()
    inverse = position[keys] - 1
    return keys.new_empty(ends[-1]).scatter_(0, inverse.view(-1).long(), keys.view(-1)), inverse, ends


@dataclass(frozen=True)
class Sections:
    """Where the parts of tensors stand in two vectors: all of them (virtual), and in what the server sent."""

    names: list[str]  # tensors of a client, in order: item tables, the user's vectors, dense tensors
    bounds: Tensor  # int64 [clients · tensors + 1]: where each section of the virtual vector starts
    starts: list[int]  # the same on the host
    sent_at: Tensor  # int64 [clients · tensors]: where the section's vector starts in the source
    source: Tensor  # what was sent to each group, tensor after tensor, and behind it the clients' own vectors
    groups: dict[int, dict[str, int]]  # the start of every group's tensors in the source


def lay_out(
    work: Work, clients: list[int], groups: list[int], sent: dict[int, Weights], private: Weights, device: torch.device
) -> Sections:
    """Decide where everything stands. ``groups`` names, for every client, whose vectors it holds."""
    names = [*work.tables, *work.own, *work.dense]
    starts: dict[int, dict[str, int]] = {}
    pieces, at = [], 0
    for group in dict.fromkeys(groups):
        starts[group] = {}
        for name in names:
            if name not in private:
                starts[group][name] = at
                at += sent[group][name].numel()
                pieces.append(sent[group][name])
    own_at, who = {}, put(clients, device)
    for name, vectors in private.items():
        own_at[name] = at
        at += len(clients) * work.own[name]
        pieces.append(vectors[who].view(-1))
    sizes, sent_at = [], []
    for place, group in enumerate(groups):
        for name in names:
            sizes.append(work.own[name] if name in private else sent[group][name].numel())
            sent_at.append(own_at[name] + place * work.own[name] if name in private else starts[group][name])
    bounds = [0, *accumulate(sizes)]
    return Sections(names, put(bounds, device), bounds, put(sent_at, device), torch.cat(pieces), starts)


@dataclass(frozen=True)
class Lookups:
    """Positions of everything that is looked up, in the vector of touched slots."""

    sections: Sections  # where things come from
    keys: Tensor  # int64 [values]: place of every touched slot in the virtual vector, ascending
    ends: list[int]  # where each client's part of the touched slots ends
    rows: tuple[Tensor, Tensor]  # int32 [distinct rows of all clients, numbers a row in all tables]; signs, int8
    places: Tensor  # int32 [samples, width]: the row of each item of each sample
    fixed: tuple[Tensor, Tensor]  # int32 [clients, numbers]: what every sample uses (see used_by_all); signs
    whole: Tensor  # bool [clients, tables]: where the table is no product: its second factor is the unit matrix

    def sources(self) -> Tensor:
        """Where each touched slot stands in the source."""
        sections = self.sections
        section = torch.searchsorted(sections.bounds, self.keys, right=True) - 1
        return sections.sent_at[section] + self.keys - sections.bounds[section]


def factors_of(work: Work) -> list[int]:
    """Columns of the tables that some devices hold as products, each with a second factor of columns × columns."""
    return [shape[1] for shape in work.tables.values()] if work.products else []


def used_by_all(work: Work) -> int:
    """How many numbers every sample of a client uses: users' vectors, dense tensors, second factors of products."""
    dense = sum(prod(shape) for shape in work.dense.values())
    return sum(work.own.values()) + dense + sum(columns**2 for columns in factors_of(work))


def find_lookups(work: Work, samples: Samples, groups: list[int], held: dict[int, Sent], sections: Sections) -> Lookups:
    """Hash everything the cohort will look up, once."""
    device, num_items = samples.items.device, work.num_items
    count, tensors = len(samples.clients), len(sections.names)
    # Before a GPU is waited for, so that it works meanwhile.
    fixed, fixed_signs = (moved(found, device) for found in _used_by_all(work, samples.clients, groups, held, sections))
    catalogues = [(place + 1) * num_items for place in range(count)]
    row_keys, places, row_ends = distinct(samples.items + samples.place[:, None] * num_items, catalogues)
    row_place, row_item = row_keys // num_items, row_keys % num_items
    rows_of = [torch.arange(start, stop, device=device) for start, stop in pairwise([0, *row_ends])]
    width, used = sum(shape[1] for shape in work.tables.values()), used_by_all(work)
    virtual = torch.empty(len(row_keys) * width + count * used, dtype=torch.int64, device=device)
    signs = torch.empty(virtual.numel(), dtype=torch.int8, device=device)
    cut = len(row_keys) * width
    rows, row_signs = virtual[:cut].view(-1, width), signs[:cut].view(-1, width)
    virtual[cut:], signs[cut:] = fixed.view(-1), fixed_signs.view(-1)
    for group in dict.fromkeys(groups):
        projections = held[group].projections
        mine = torch.cat([rows for rows, of in zip(rows_of, groups, strict=True) if of == group])
        column = 0
        for number, (name, (_, size)) in enumerate(work.tables.items()):
            held_as = projections[name]
            assert isinstance(held_as, Coordinatewise | LowRank)  # see takes_steps
            found = held_as.row_places(row_item[mine])
            _put(rows, row_signs, mine, column, found, sections.bounds[row_place[mine] * tensors + number])
            column += size
    keys, found_at, ends = distinct(virtual, sections.starts[tensors::tensors])
    whole = [[not isinstance(held[group].projections[name], LowRank) for name in work.tables] for group in groups]
    found_rows, found_fixed = found_at[:cut].view(rows.shape), found_at[cut:].view(fixed.shape)
    return Lookups(
        sections, keys, ends, (found_rows, row_signs), places, (found_fixed, fixed_signs), put(whole, device)
    )


def _used_by_all(
    work: Work, clients: list[int], groups: list[int], held: dict[int, Sent], sections: Sections
) -> tuple[Tensor, Tensor]:
    """Positions and signs of what every sample of a client uses, a line a client: few, so found on the host."""
    tables, names = len(work.tables), sections.names[len(work.tables) :]
    starts = torch.tensor(sections.starts[:-1]).view(len(clients), -1)
    starts = torch.cat([starts[:, tables:], starts[:, : len(factors_of(work))]], dim=1)
    used = used_by_all(work)
    positions = torch.empty(len(clients), used, dtype=torch.int64)
    signs = torch.empty(len(clients), used, dtype=torch.int8)
    for group in dict.fromkeys(groups):
        members = [place for place, mine in enumerate(groups) if mine == group]
        who = torch.tensor([clients[place] for place in members])
        projections = held[group].projections
        found = [_numbers(work, name, projections, who) for name in names]
        found += [_factor(projections[name], size) for name, size in zip(work.tables, factors_of(work), strict=False)]
        begin = starts[members].unbind(1)
        positions[members] = torch.cat([of + at[:, None] for (of, _), at in zip(found, begin, strict=True)], dim=1)
        signs[members] = torch.cat([of.expand(len(members), -1) for _, of in found], dim=1)
    return positions, signs


def _numbers(work: Work, name: str, projections: Mapping[str, Projection], clients: Tensor) -> tuple[Tensor, Tensor]:
    """Slots and signs of what these clients use of a tensor at every sample, a line a client (or one for all)."""
    if name in work.own and name not in work.user_tables:
        everything = torch.arange(work.own[name])[None]
        return everything, torch.ones_like(everything, dtype=torch.int8)
    held = projections[name]
    assert isinstance(held, Coordinatewise)  # see takes_steps
    return held.row_places(clients) if name in work.own else held.places(torch.arange(prod(work.dense[name]))[None])


def _factor(projection: Projection, size: int) -> tuple[Tensor, Tensor]:
    """Of the second factor, a line; a table that is no product has none, which signs of 0 say."""
    if isinstance(projection, LowRank):
        slots, signs = projection.factor_places()
    else:
        slots, signs = torch.zeros(size**2, dtype=torch.int64), torch.zeros(size**2, dtype=torch.int8)
    return slots[None], signs[None]


def _put(
    into: Tensor, signs_into: Tensor, lines: Tensor, column: int, found: tuple[Tensor, Tensor], starts: Tensor
) -> None:
    """Write slots, moved to where their section starts, and signs into some lines from a column on."""
    slots, signs = found
    part = slice(column, column + slots.shape[-1])
    into[lines, part] = slots + starts[:, None]
    signs_into[lines, part] = signs.expand(len(lines), -1)
