"""Steps of a cohort whose weights are realised side by side, in plain torch: the specification.

Here a step is told from the slots' point of view. Every slot knows the coordinates that live in it, so their gradients
are added up in a fixed order, and the coordinates are brought up to date in the same pass. Coordinates come in *pieces*
of a few neighbours that stay neighbours in the compact vector, such as the chunks of a hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.kernels.reference import direction

CROWDED = 12
"""Pieces a slot from which on slots count as holding many."""


@dataclass(frozen=True)
class SlotTables:
    """Which pieces live in which slots, a line a client. Slots are counted in pieces, too."""

    slots: Tensor  # int32 [clients, slots]: those that hold pieces, the fullest first
    starts: Tensor  # int32 [clients, slots + 1]: where the list of each of these begins
    pieces: Tensor  # int32 [clients, pieces]: their pieces, list after list
    slot_of: Tensor  # int32 [clients, pieces]: the slot of every piece
    signs: Tensor  # int8 [clients, coordinates]: 0 for what a client does not hold, which is 0 and has no gradient
    used: Tensor  # int32 [clients, 2]: how many slots hold pieces; whether they hold many, which is a matter of speed

    @property
    def width(self) -> int:
        """Coordinates a piece."""
        return self.signs.shape[1] // self.pieces.shape[1]

    @staticmethod
    def empty(clients: int, slots: int, coordinates: int, width: int, device: torch.device) -> "SlotTables":
        """Memory for the tables of some clients, of at most so many slots (of ``width`` numbers)."""
        pieces = coordinates // width

        def make(size: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(clients, size, dtype=kind, device=device)

        return SlotTables(
            make(slots), make(slots + 1), make(pieces), make(pieces), make(coordinates, torch.int8), make(2)
        )

    @staticmethod
    def of_client(slot_of: Tensor, signs: Tensor, slots: int) -> "SlotTables":
        """The table of one client from the slot of each of its pieces, and the sign of each coordinate."""
        counts = torch.bincount(slot_of, minlength=slots)
        fullest = torch.sort(counts, descending=True, stable=True).indices
        starts = torch.cat([counts.new_zeros(1), counts[fullest].cumsum(0)])
        rank = torch.empty_like(fullest)
        rank[fullest] = torch.arange(slots, device=rank.device)
        pieces = torch.sort(rank[slot_of], stable=True).indices
        used = (counts > 0).sum()
        about = torch.stack([used, (len(slot_of) >= CROWDED * used).to(used.dtype)])
        lists = [each.to(torch.int32)[None] for each in (fullest, starts, pieces, slot_of)]
        return SlotTables(lists[0], lists[1], lists[2], lists[3], signs[None], about.to(torch.int32)[None])

    def put(self, place: int, table: "SlotTables") -> None:
        """Make a client's table that of a line."""
        for into, of in zip(vars(self).values(), vars(table).values(), strict=True):
            into[place] = of[0]


def step_slots(
    full: Tensor,
    gradient: Tensor,
    values: Tensor,
    moments: Sequence[Tensor],
    tables: SlotTables,
    rates: Tensor,
    number: Tensor,
) -> None:
    """One step of SGD, Adagrad or Adam (0, 1 or 2 moments) on compact vectors, and their recovery into ``full``.

    ``full`` (written) and ``gradient`` are [clients, coordinates], ``values`` (moved) and ``moments`` (from zeros)
    [clients, slots · width]; the first clients of ``values`` and ``tables`` may be enough. ``rates`` and ``number`` are
    those of :func:`.reference.step_prefix`. On a GPU nothing waits for the device, and sums have a fixed order.
    """
    rate, root = rates[int(number)].tolist()
    width = tables.width
    for client in range(len(full)):
        slot, signs = tables.slot_of[client].long(), tables.signs[client].view(-1, width).to(full.dtype)
        slope = torch.zeros_like(values[client]).view(-1, width)
        slope.index_add_(0, slot, gradient[client].view(-1, width) * signs)
        kept = [moment[client] for moment in moments]
        values[client].sub_(direction(slope.view(-1), kept, root), alpha=rate)
        full[client] = (values[client].view(-1, width)[slot] * signs).view(-1)
