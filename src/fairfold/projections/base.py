"""How a tensor of the server becomes what a device holds, and comes back: FAIR and its rivals behind one interface.

A projection is the only thing that knows how a device of one size sees a tensor; a federation's round, its messages,
its exports and its checks ask the projection and never its class. New ones are registered by their ``kind``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from fairfold.kernels.reference import row_coordinates
from fairfold.values import BYTES


class Projection(ABC):
    """What one size of device holds of one tensor.

    Attributes:
        kind: Its name in files and messages.
        shape: Of the tensor; vectors here are flat.
        size: Numbers the device holds.
        linear: Whether a sum of what devices hold stands for the sum of their tensors.
        coded: Whether it is stored and sent in fewer bytes than its numbers have (:meth:`packed`).
    """

    kind: ClassVar[str]
    linear: ClassVar[bool] = True
    coded: ClassVar[bool] = False
    shape: tuple[int, ...]
    size: int

    @property
    def bytes(self) -> int:
        """What it takes to store them."""
        return self.size * BYTES

    @abstractmethod
    def reduce(self, full: Tensor) -> Tensor:
        """Server to device."""

    @abstractmethod
    def recover(self, compact: Tensor) -> Tensor:
        """Device to server."""

    @abstractmethod
    def rows(self, compact: Tensor, ids: Tensor) -> Tensor:
        """Chosen rows of the tensor, [*ids.shape, row length]; gradients flow back to ``compact``."""

    def whole(self, compact: Tensor) -> Tensor:
        """All of the tensor, flat; gradients flow back to ``compact``."""
        return self.recover(compact)

    def packed(self, compact: Tensor) -> Tensor:
        """What a device holds, as it is stored: in :attr:`bytes`."""
        return compact

    def unpacked(self, content: Tensor) -> Tensor:
        """The numbers of what was stored."""
        return content

    def summand(self, compact: Tensor, weight: float) -> Tensor:
        """What adds up over devices of this size: what they hold, or what that stands for where sums mean nothing.

        Args:
            compact: What a device holds, times its weight.
            weight: Of the device. What its numbers stand for is only known of the numbers themselves.
        """
        if self.linear:
            return compact
        return self.recover(compact / weight) * weight if weight else self.recover(compact)

    @classmethod
    def reduce_each(cls, full: Tensor, projections: Sequence[Any]) -> list[Tensor]:
        """What devices of several sizes receive of one tensor; in one pass over it where that can be had."""
        return [projection.reduce(full) for projection in projections]

    @classmethod
    @abstractmethod
    def mean(cls, full: Tensor, parts: Sequence["Part"], *, changes: bool) -> Tensor:
        """The weighted mean of what devices of different sizes sent, in the server's space.

        Args:
            full: What the server has of the tensor.
            parts: Sums per size.
            changes: Whether changes were added, and not values: what nobody sent is then 0, else as it was.
        """

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What defines it beside kind and shape, as plain values."""

    @classmethod
    @abstractmethod
    def of_facts(cls, shape: tuple[int, ...], facts: dict[str, Any]) -> Self:
        """The projection that plain values define; an error for values that define none."""


@dataclass(frozen=True)
class Part:
    """The weighted sum of what the devices of one size sent of one tensor (:meth:`Projection.summand`)."""

    projection: Any
    total: Tensor
    weight: float


class Coordinatewise(Projection):
    """A projection in which every number of the tensor is one number of the device, its negative, or 0."""

    @abstractmethod
    def places(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Slot (int64) and sign (int8) of coordinates of the tensor; the sign is 0 where the device has none of it."""

    def row_places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same of all numbers of some rows, [rows, row length]."""
        return self.places(row_coordinates(rows, self.shape[-1]))

    @abstractmethod
    def counts(self, slots: Tensor) -> Tensor:
        """How many coordinates live in some slots."""


@dataclass(frozen=True)
class Assignment:
    """What the devices of one capacity hold; None for devices that the method leaves out."""

    projections: dict[str, Projection] | None

    def size(self) -> int:
        """Numbers a device holds and sends."""
        return sum(projection.size for projection in (self.projections or {}).values())

    def bytes(self) -> int:
        """What these take."""
        return sum(projection.bytes for projection in (self.projections or {}).values())
