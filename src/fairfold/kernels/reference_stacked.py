"""Steps of a cohort whose weights are realised side by side, in plain torch: the specification.

Here a step is told from the slots' point of view. Every slot knows the coordinates that live in it, so their gradients
are added up in a fixed order, and the coordinates are brought up to date in the same pass. Coordinates come in *pieces*
of a few neighbours that stay neighbours in the compact vector, such as the chunks of a hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.kernels.reference_active import direction


@dataclass(frozen=True)
class SlotTables:
    """Which pieces live in which slots, a line a client.

    Attributes:
        starts: int32 [clients, slots + 1]: where the list of each slot begins; ``slots`` counts pieces too.
        pieces: int32 [clients, pieces]: the pieces, slot after slot.
        signs: int8 [clients, coordinates]: 0 for what the client does not hold, which then is 0 and has no gradient.
        crowded: int32 [clients]: 1 where slots hold many pieces on average; a matter of speed.
    """

    starts: Tensor
    pieces: Tensor
    signs: Tensor
    crowded: Tensor

    @property
    def width(self) -> int:
        """Coordinates a piece."""
        return self.signs.shape[1] // self.pieces.shape[1]


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

    Args:
        full: [clients, coordinates], written; the first clients of ``values`` and ``tables`` may be enough.
        gradient: Like ``full``.
        values: [clients, slots · width], moved in place.
        moments: Like ``values``, from zeros.
        tables: Where coordinates live.
        rates: As in :func:`fairfold.kernels.reference_active.step_prefix`.
        number: Which step it is, from 0.
    """
    rate, root = rates[int(number)].tolist()
    width = tables.width
    for client in range(len(full)):
        counts = tables.starts[client].diff()
        slot = torch.repeat_interleave(torch.arange(len(counts), device=full.device), counts)
        order, signs = tables.pieces[client].long(), tables.signs[client].view(-1, width).to(full.dtype)
        slope = torch.zeros_like(values[client]).view(-1, width)
        slope.index_add_(0, slot, (gradient[client].view(-1, width) * signs)[order])
        kept = [moment[client] for moment in moments]
        values[client].sub_(direction(slope.view(-1), kept, root), alpha=rate)
        full[client].view(-1, width)[order] = values[client].view(-1, width)[slot] * signs[order]
