"""What every task has in common on a device: its parts, the users' histories, and what an algorithm makes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fairfold.device.facts import UNITS, amount_of
from fairfold.device.records import Records
from fairfold.device.store import DeviceState, Tables
from fairfold.errors import InvalidCapacity
from fairfold.flower.local_data import Rated
from fairfold.privacy.ledger import LEVELS

PRIVATE = LEVELS[-1]


class NeedsWorker(Exception):
    """A message that this device leaves to the worker: another algorithm, or a form of one that it does not know."""


@dataclass(frozen=True)
class TaskInput:
    """A task as it came, and what the device has for it."""

    facts: dict[str, Any]
    records: Records
    settings: dict[str, Any]
    capacity: str
    state: DeviceState
    histories: Callable[[int, bool], tuple[Rated, Rated]]  # by the size of the catalogue, and whether ratings count
    tick: Callable[[], None] = lambda: None  # called between users
    evaluate: bool = False


class Work(Protocol):
    """A task that was read and checked, with the users' histories: one body for each algorithm."""

    state: DeviceState  # to store, with the users and histories of the update
    remembers: bool  # whether an update builds on the one that the server has acknowledged
    steps: ClassVar[Mapping[str, int]]  # of fixed point per unit; tensors without have steps by their bound

    def quality(self) -> dict[str, Any]:
        """The sum of the metric over users with held-out rows, and the count of what it is over; nothing without."""

    def update(self, *, is_masked: bool) -> tuple[dict[str, Any], float]:
        """The sum of the users' updates, and their weight."""

    def local_state(self) -> Tables:
        """What the device has to remember of the update."""


def require_room(capacity: str, size: int, counted: int, whole: int) -> None:
    """Refuse a task beyond a capacity: all bytes within a budget, or counted ones within a share of the whole's."""
    amount = amount_of(capacity)
    if amount is None:
        raise NeedsWorker("a capacity in another form")
    number, unit = amount
    if size > number * UNITS[unit] if unit in UNITS else counted > whole / number:
        raise InvalidCapacity(f"a task of {size} bytes", f"at most {capacity}", "Ask this device first.")
