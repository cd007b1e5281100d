"""The slots that the clients of a program will touch, gathered side by side in one vector a table."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.federation.projection import Hashed, LeadingColumns, LowRank, Projection
from fairfold.federation.task import Batch
from fairfold.kernels import ops


@dataclass(frozen=True)
class Factors:
    """What rows are multiplied by where a table is held as a product: d × d a client, padded with zeros.

    Attributes:
        positions: int32 [clients, d, d] into the table's values.
        signs: int8: 0 where there is nothing to look up.
        fixed: Added: the unit matrix for a client that holds the table itself.
    """

    positions: Tensor
    signs: Tensor
    fixed: Tensor


@dataclass(frozen=True)
class ActiveTable:
    """One table of several clients: what they touch of it, whatever their sizes.

    Attributes:
        values: The touched slots of client after client.
        ends: Where each client's part of ``values`` ends.
        slots: Which slot of its compact vector each value is.
        positions: int32 [rows of all clients, row length] into ``values``.
        signs: int8, aligned with ``positions``; 0 for a number that the device does not hold.
        factors: Where tables are held as products.
    """

    values: Tensor
    ends: list[int]
    slots: Tensor
    positions: Tensor
    signs: Tensor
    factors: Factors | None = None

    def rows(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The values of some rows, and where they stand: what is needed to take their gradient back."""
        positions, signs = self.positions.index_select(0, places), self.signs.index_select(0, places)
        return ops.recover_positions(self.values, positions, signs), positions, signs

    def multipliers(self, clients: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """What the rows of the first clients are multiplied by, [clients, d, d], and where it stands in the values."""
        if self.factors is None:
            return None
        width = self.factors.positions.shape[-1]
        positions = self.factors.positions[:clients].reshape(-1, width)
        signs = self.factors.signs[:clients].reshape(-1, width)
        found = ops.recover_positions(self.values, positions, signs).view(clients, width, width)
        return found + self.factors.fixed[:clients], positions, signs

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


def gather(projections: list[Projection], received: list[Tensor], ids: list[Tensor]) -> ActiveTable:
    """The active slots of one table, for every client with its own projection and received vector."""
    values, slots, positions, signs, ends, offset = [], [], [], [], [], 0
    multiplied = [_multiplied(projection, len(rows)) for projection, rows in zip(projections, ids, strict=True)]
    places = []
    for number, (projection, compact, rows) in enumerate(zip(projections, received, ids, strict=True)):
        touched, where, sign = _touched(projection, rows)
        values.append(compact[touched])
        slots.append(touched)
        positions.append(where + offset)
        signs.append(sign)
        places.append(multiplied[number].positions + offset)
        offset += len(touched)
        ends.append(offset)
    factors = None
    if any(isinstance(projection, LowRank) for projection in projections):
        fixed = torch.stack([part.fixed for part in multiplied]).to(values[0].dtype)
        factors = Factors(torch.stack(places), torch.stack([part.signs for part in multiplied]), fixed)
    return ActiveTable(torch.cat(values), ends, torch.cat(slots), torch.cat(positions), torch.cat(signs), factors)


def _touched(projection: Projection, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which slots of a compact vector some rows touch; where among them every number of a row stands; its sign."""
    width = projection.shape[-1]
    if isinstance(projection, Hashed):
        layout = projection.subspace.layout
        touched = ops.active_slots(layout, rows, width)
        where, sign = ops.positions(layout, rows, width, touched)
        return touched, where, sign
    if isinstance(projection, LeadingColumns):
        touched, where, sign = _leading(projection.kept, width, rows)
        return touched, where, sign
    assert isinstance(projection, LowRank)
    touched, where, sign = _leading(projection.rank, width, rows)
    start = projection.shape[0] * projection.rank  # the small factor lies behind the tall one, and is used by every row
    return torch.cat([touched, torch.arange(start, start + projection.rank * width)]), where, sign


def _leading(kept: int, width: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a table of ``kept`` columns, padded with zeros to ``width``."""
    touched = (rows[:, None] * kept + torch.arange(kept)).view(-1)
    column = torch.arange(width)
    where = torch.arange(len(rows))[:, None] * kept + column.clamp(max=kept - 1)
    return touched, where.to(torch.int32), (column < kept).to(torch.int8).expand(len(rows), width).contiguous()


def _multiplied(projection: Projection, rows: int) -> Factors:
    """One client's part of :class:`Factors`, positions counted from the start of its values."""
    width = projection.shape[-1]
    none = torch.zeros(width, width, dtype=torch.int32)
    if not isinstance(projection, LowRank):
        return Factors(none, none.to(torch.int8), torch.eye(width))
    where = torch.arange(projection.rank * width, dtype=torch.int32).view(projection.rank, width)
    positions, signs = none.clone(), none.to(torch.int8)
    positions[: projection.rank] = where + rows * projection.rank
    signs[: projection.rank] = 1
    return Factors(positions, signs, torch.zeros(width, width))
