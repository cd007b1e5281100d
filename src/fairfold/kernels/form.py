"""The form of the models that a client can be trained on in one native call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """How an item's score comes from the user's and the item's numbers.

    The *product* branch multiplies them one by one. The *network* puts other numbers of both through layers, each
    followed by a rectifier. The score is the sum of what the branches give, each number weighted by the output layer
    where there is one. Dense tensors stand in this order: weight [units, inputs] and bias of every layer, then those of
    the output.
    """

    product: int = 0  # columns of the product branch, 0 without one
    user: int = 0  # columns of the user that enter the network, ahead of the item's
    item: int = 0  # columns of the item that enter the network
    layers: tuple[int, ...] = ()  # units of each of the network's layers
    output: bool = False  # whether there is an output layer


@dataclass(frozen=True)
class Places:
    """Where the numbers of some rows stand among a client's values."""

    positions: Tensor  # int32
    signs: Tensor  # int8, aligned; 0 for a number that the client does not have, which reads as 0

    def shifted(self, offset: int) -> "Places":
        """The same rows in a longer vector."""
        return Places(self.positions + offset, self.signs)

    def viewed(self, shape: tuple[int, ...]) -> "Places":
        """The same numbers in another shape."""
        return Places(self.positions.view(shape), self.signs.view(shape))

    def at(self, lines: Tensor | slice) -> "Places":
        """Those of chosen lines."""
        return Places(self.positions[lines], self.signs[lines])

    @staticmethod
    def joined(parts: "Sequence[Places]", join: Callable[[list[Tensor]], Tensor] = torch.cat) -> "Places":
        """Those of several parts, one after another or as ``join`` does; none of no parts."""
        if not parts:
            return Places.of_run(0, 0)
        return Places(join([part.positions for part in parts]), join([part.signs for part in parts]))

    @staticmethod
    def of_run(start: int, length: int) -> "Places":
        """Numbers that stand side by side."""
        return Places(torch.arange(start, start + length, dtype=torch.int32), torch.ones(length, dtype=torch.int8))


@dataclass(frozen=True)
class Objective:
    """What is minimised, and how."""

    rating: bool  # squared error of ratings; else the pairwise loss of a sample's first item and its others
    regulariser: float  # of the pairwise loss
    optimiser: Literal["sgd", "adagrad", "adam"]  # as torch has it
    rate: float  # its step size


@dataclass(frozen=True)
class Samples:
    """A client's round."""

    rows: Tensor  # int32 [samples, width]
    targets: Tensor | None  # [samples]
    ends: Tensor  # where the samples of each step end


@dataclass(frozen=True)
class Lines:
    """What the steps of a cohort look up, at fixed addresses."""

    rows: Places  # [rows, numbers an item has in all tables] of all clients
    fixed: Places  # [clients, numbers]: what every sample of a client uses, the user's vectors and the dense tensors
    places: Tensor  # int32 [steps, clients, samples, width]: the row of each item of each sample
    shares: Tensor  # [steps, clients, samples]: what each sample counts in the loss; 0 for padding
    step: Tensor  # int64 [1]: which one is next
