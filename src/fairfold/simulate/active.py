"""The slots that the clients of a program will touch, gathered side by side in one vector a table."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.federation.projection import Hashed
from fairfold.federation.task import Batch
from fairfold.kernels import ops


@dataclass(frozen=True)
class ActiveTable:
    """One table of several clients: what they touch of it, whatever their sizes.

    Attributes:
        values: The touched slots of client after client.
        ends: Where each client's part of ``values`` ends.
        slots: Which slot of its compact vector each value is.
        positions: int32 [rows of all clients, row length] into ``values``.
        signs: int8, aligned with ``positions``.
    """

    values: Tensor
    ends: list[int]
    slots: Tensor
    positions: Tensor
    signs: Tensor

    def rows(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The values of some rows, and where they stand: what is needed to take their gradient back."""
        positions, signs = self.positions.index_select(0, places), self.signs.index_select(0, places)
        return ops.recover_positions(self.values, positions, signs), positions, signs

    def of(self, place: int) -> slice:
        """The part of ``values`` that belongs to one client."""
        return slice(self.ends[place - 1] if place else 0, self.ends[place])


@dataclass(frozen=True)
class Rows:
    """Which items the clients touch: distinct ids of client after client, and every batch in terms of them."""

    ids: list[Tensor]
    local: list[list[Tensor]]


def distinct_rows(batches: list[list[Batch]]) -> Rows:
    """Number the items of each client's round; numbers run on from client to client."""
    ids, local, offset = [], [], 0
    for of_client in batches:
        everything = torch.cat([batch.items.reshape(-1) for batch in of_client])
        found, inverse = torch.unique(everything, return_inverse=True)
        parts, start = [], 0
        for batch in of_client:
            stop = start + batch.items.numel()
            parts.append((inverse[start:stop] + offset).view(batch.items.shape))
            start = stop
        ids.append(found)
        local.append(parts)
        offset += len(found)
    return Rows(ids, local)


def gather(projections: list[Hashed], received: list[Tensor], ids: list[Tensor]) -> ActiveTable:
    """The active slots of one table, for every client with its own projection and received vector."""
    values, slots, positions, signs, ends, offset = [], [], [], [], [], 0
    for projection, compact, rows in zip(projections, received, ids, strict=True):
        layout, row_size = projection.subspace.layout, projection.shape[-1]
        touched = ops.active_slots(layout, rows, row_size)
        where, sign = ops.positions(layout, rows, row_size, touched)
        values.append(compact[touched])
        slots.append(touched)
        positions.append(where + offset)
        signs.append(sign)
        offset += len(touched)
        ends.append(offset)
    return ActiveTable(torch.cat(values), ends, torch.cat(slots), torch.cat(positions), torch.cat(signs))
