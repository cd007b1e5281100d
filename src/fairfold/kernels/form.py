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

    Attributes:
        product: Columns of the product branch, 0 without one.
        user: Columns of the user that enter the network, ahead of the item's.
        item: Columns of the item that enter the network.
        layers: Units of each of the network's layers.
        output: Whether there is an output layer.
    """

    product: int = 0
    user: int = 0
    item: int = 0
    layers: tuple[int, ...] = ()
    output: bool = False


@dataclass(frozen=True)
class Places:
    """Where the numbers of some rows stand among a client's values.

    Attributes:
        positions: int32.
        signs: int8, aligned; 0 for a number that the client does not have, which reads as 0.
    """

    positions: Tensor
    signs: Tensor

    def shifted(self, offset: int) -> "Places":
        """The same rows in a longer vector."""
        return Places(self.positions + offset, self.signs)

    def viewed(self, shape: tuple[int, ...]) -> "Places":
        """The same numbers in another shape."""
        return Places(self.positions.view(shape), self.signs.view(shape))

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
    """What is minimised, and how.

    Attributes:
        rating: Squared error of ratings; else the pairwise loss of a sample's first item and its others.
        regulariser: Of the pairwise loss.
        optimiser: As torch has it.
        rate: Its step size.
    """

    rating: bool
    regulariser: float
    optimiser: Literal["sgd", "adagrad", "adam"]
    rate: float


@dataclass(frozen=True)
class Samples:
    """A client's round.

    Attributes:
        rows: int32 [samples, width].
        targets: [samples] or None.
        ends: Where the samples of each step end.
    """

    rows: Tensor
    targets: Tensor | None
    ends: Tensor


@dataclass(frozen=True)
class Lines:
    """What the steps of a cohort look up, at fixed addresses.

    Attributes:
        rows: [rows, numbers an item has in all tables] of all clients.
        fixed: [clients, numbers]: what every sample of a client uses, the user's vectors and the dense tensors.
        places: int32 [steps, clients, samples, width]: the row of each item of each sample.
        shares: [steps, clients, samples]: what each sample counts in the loss; 0 for padding.
        step: int64 [1]: which one is next.
    """

    rows: Places
    fixed: Places
    places: Tensor
    shares: Tensor
    step: Tensor
