"""What one client touches in a round, gathered in one vector: all that its training has to look at.

*The active set is exact*: a local optimiser starts fresh each round, so what no sample of the round touches does not
move. Tables, dense tensors and the user's own vectors are all the same here: rows of numbers, each of which stands
somewhere among the client's values, with a sign. Sizes and methods are data, not shapes.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fairfold.kernels import ops
from fairfold.kernels.form import Places, Samples
from fairfold.kernels.reference import row_coordinates
from fairfold.projections import Coordinatewise, LowRank
from fairfold.protocol.people import People
from fairfold.protocol.words import Sent, Visit


@dataclass
class Active:
    """One client's round."""

    client: int
    sent: Sent  # what it received
    values: Tensor  # the touched slots of every tensor, in order of their first touch, and the user's own vectors
    start: Tensor  # the values before training
    parts: dict[str, slice]  # which of the values belong to which tensor
    slots: dict[str, Tensor]  # which slot of its compact vector each value of a tensor is; none for the user's own
    places: dict[str, Places]  # where rows stand among the values: item tables [rows, row length], others [numbers]
    factors: dict[str, Places]  # by which small matrix the rows of a table are multiplied to be read (FedHM)
    samples: Samples  # rows of the item tables, step by step
    pull: Tensor | None  # a weight a value that draws it to where it started (FedProx)


def gather(people: People, visit: Visit) -> Active:
    """All that a client touches in a round."""
    work, client, sent, private = people.work, visit.client, visit.sent, people.private
    prox = work.prox
    local = work.local(client, people.source(sent.round_number, client))
    rows, items = ops.number(local.items)
    coordinates = {name: row_coordinates(items, shape[-1]) for name, shape in work.tables.items()}
    coordinates |= {name: torch.arange(prod(shape)) for name, shape in work.dense.items()}
    me = torch.tensor([client])
    coordinates |= {name: row_coordinates(me, shape[-1]).view(-1) for name, shape in work.user_tables.items()}
    values, pulls, parts, start = [], [], {}, 0
    slots: dict[str, Tensor] = {}
    places: dict[str, Places] = {}
    factors: dict[str, Places] = {}
    for name, wanted in coordinates.items():
        projection = sent.projections[name]
        if isinstance(projection, LowRank):
            left, right = projection.slots(items)
            slots[name] = torch.cat([left.view(-1), right.view(-1)])
            places[name] = Places.of_run(start, left.numel()).viewed(left.shape)
            factors[name] = Places.of_run(start + left.numel(), right.numel()).viewed(right.shape)
        else:
            assert isinstance(projection, Coordinatewise)
            found, slots[name] = _numbered(projection, wanted)
            places[name] = found.shifted(start)
        values.append(sent.vectors[name].index_select(0, slots[name]))
        parts[name] = slice(start, start + len(slots[name]))
        if prox:
            assert isinstance(projection, Coordinatewise)  # see takes_steps
            pulls.append(prox * projection.counts(slots[name]))
        start = parts[name].stop
    for name, vectors in private.items():
        places[name] = Places.of_run(start, vectors.shape[1])
        values.append(vectors[client])
        parts[name] = slice(start, start + vectors.shape[1])
        start = parts[name].stop
        if prox:
            pulls.append(torch.zeros(vectors.shape[1]))
    joined = torch.cat(values)
    targets = None if local.targets is None else local.targets.to(joined.dtype)
    samples = Samples(rows, targets, torch.tensor(local.ends, dtype=torch.int64))
    pull = torch.cat(pulls).to(joined.dtype) if pulls else None
    return Active(client, sent, joined, joined.clone(), parts, slots, places, factors, samples, pull)


def _numbered(projection: Coordinatewise, coordinates: Tensor) -> tuple[Places, Tensor]:
    """Where distinct coordinates stand among the touched slots, and which slots these are."""
    slots, signs = projection.places(coordinates)
    if slots is coordinates:  # the full space: nobody shares a slot
        count = coordinates.numel()
        return Places(torch.arange(count, dtype=torch.int32).view(coordinates.shape), signs), slots.reshape(-1)
    numbers, distinct = ops.number(slots)
    return Places(numbers, signs), distinct
