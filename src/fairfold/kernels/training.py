"""Data structures of compiled training, and optimizer steps of a stacked cohort in plain torch, as a specification."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fairfold.kernels.reference import direction


@dataclass(frozen=True)
class ModelForm:
    """The computation of an item's score: the sum of two branches, weighted by the output layer where there is one.

    The *product* branch multiplies vectors of user and item elementwise. The *network* puts other columns of both
    through layers, each followed by a rectifier. Dense tensors are weight [units, inputs] and bias of every layer, then
    those of the output.
    """

    product: int = 0  # columns of the product branch, 0 without one
    user: int = 0  # columns of the user that enter the network, ahead of the item's
    item: int = 0  # columns of the item that enter the network
    layers: tuple[int, ...] = ()  # units of each of the network's layers
    output: bool = False  # whether there is an output layer


@dataclass(frozen=True)
class SignedPositions:
    """Positions of numbers among a client's values, each with a sign."""

    positions: Tensor  # int32
    signs: Tensor  # int8, aligned; 0 for a number that the client does not have, which reads as 0

    def shifted(self, offset: int) -> "SignedPositions":
        """Positions of the same numbers in a vector that has ``offset`` more in front."""
        return SignedPositions(self.positions + offset, self.signs)

    def select(self, rows: Tensor | slice) -> "SignedPositions":
        """The positions and signs of chosen rows alone."""
        return SignedPositions(self.positions[rows], self.signs[rows])

    @staticmethod
    def joined(
        parts: "Sequence[SignedPositions]", join: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> "SignedPositions":
        """Positions of several parts, concatenated or joined by ``join``; empty without parts."""
        if not parts:
            return SignedPositions.contiguous_run(0, (0,))
        return SignedPositions(join([part.positions for part in parts]), join([part.signs for part in parts]))

    @staticmethod
    def contiguous_run(start: int, shape: Sequence[int]) -> "SignedPositions":
        """Positions from ``start`` on, in a shape, all with sign 1."""
        signs = torch.ones(*shape, dtype=torch.int8)
        positions = torch.arange(start, start + signs.numel(), dtype=torch.int32)
        return SignedPositions(positions.view(signs.shape), signs)


@dataclass(frozen=True)
class Objective:
    """The loss of compiled training, and its optimizer."""

    loss: Literal["bpr", "ratings", "softmax"]  # "ratings": the squared error of ratings
    l2: float  # of the losses of rankings
    optimizer: Literal["sgd", "adagrad", "adam"]  # as torch has it
    lr: float


@dataclass(frozen=True)
class LocalSamples:
    """The samples of a client's round."""

    rows: Tensor  # int32 [samples, width]
    targets: Tensor | None  # [samples]
    ends: Tensor  # where the samples of each step end


@dataclass(frozen=True)
class LookupBuffers:
    """Positions that the steps of a cohort look up, at fixed addresses."""

    rows: SignedPositions  # [rows, numbers an item has in all tables] of all clients
    fixed: SignedPositions  # [clients, numbers]: what every sample uses, the user's vectors and the dense tensors
    sample_rows: Tensor  # int32 [steps, clients, samples, width]: the row of each item of each sample
    shares: Tensor  # [steps, clients, samples]: the weight of each sample in the loss; 0 for padding
    step: Tensor  # int64 [1]: the number of the next step


# -- steps on slots: every slot knows the coordinates that live in it, so their gradients are summed in a fixed order,
# and the coordinates are updated in the same pass. Coordinates come in *pieces* of a few neighbors that stay
# neighbors in the compact vector, such as the chunks of a hash.

CROWDED = 12  # pieces per slot from which on slots count as holding many

Moments = Sequence[Tensor]


@dataclass(frozen=True)
class SlotTables:
    """The pieces that live in each slot, one row per client. Slots are counted in pieces, too."""

    slots: Tensor  # int32 [clients, slots]: those that hold pieces, the fullest first
    starts: Tensor  # int32 [clients, slots + 1]: where the list of each of these begins
    pieces: Tensor  # int32 [clients, pieces]: their pieces, list after list
    slot_of: Tensor  # int32 [clients, pieces]: the slot of every piece
    signs: Tensor  # int8 [clients, coordinates]: 0 for what a client does not hold, which is 0 and has no gradient
    used: Tensor  # int32 [clients, 2]: how many slots hold pieces; whether they hold many, which is a matter of speed

    @property
    def width(self) -> int:
        """Coordinates per piece."""
        return self.signs.shape[1] // self.pieces.shape[1]

    @staticmethod
    def empty(clients: int, slots: int, coordinates: int, width: int, device: torch.device) -> "SlotTables":
        """Empty tables for some clients, of at most ``slots`` slots of ``width`` numbers."""
        pieces = coordinates // width

        def make(size: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(clients, size, dtype=kind, device=device)

        signs = make(coordinates, torch.int8)
        return SlotTables(make(slots), make(slots + 1), make(pieces), make(pieces), signs, make(2))

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
        used_and_crowded = torch.stack([used, (len(slot_of) >= CROWDED * used).to(used.dtype)])
        lists = [each.to(torch.int32)[None] for each in (fullest, starts, pieces, slot_of)]
        return SlotTables(lists[0], lists[1], lists[2], lists[3], signs[None], used_and_crowded.to(torch.int32)[None])

    def set_client(self, index: int, table: "SlotTables") -> None:
        """Copy the table of one client into row ``index``."""
        for target, source in zip(vars(self).values(), vars(table).values(), strict=True):
            target[index] = source[0]


def step_slots(
    full: Tensor, gradient: Tensor, values: Tensor, moments: Moments, tables: SlotTables, rates: Tensor, number: Tensor
) -> None:
    """One step of SGD, Adagrad or Adam (0, 1 or 2 moments) on compact vectors, and their recovery into ``full``.

    ``full`` and ``gradient`` are [clients, coordinates], ``values`` and ``moments`` [clients, slots · width], of which
    the first clients may be enough. ``rates`` and ``number`` are those of :func:`.reference.step_prefix`.
    """
    rate, root = rates[int(number)].tolist()
    width = tables.width
    for client in range(len(full)):
        slot = tables.slot_of[client].long()
        signs = tables.signs[client].view(-1, width).to(full.dtype)
        sums = torch.zeros_like(values[client]).view(-1, width)
        sums.index_add_(0, slot, gradient[client].view(-1, width) * signs)
        values[client].sub_(direction(sums.view(-1), [moment[client] for moment in moments], root), alpha=rate)
        full[client] = (values[client].view(-1, width)[slot] * signs).view(-1)
