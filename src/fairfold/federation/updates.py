"""What passes between server and clients: tasks, and updates that add up.

``update(a) + update(b)`` is the update that clients a and b would have sent together. The server knows public
statistics and sums of updates, nothing else of its clients; so sums can be taken in any order, grouping and place.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairfold.subspace.projection import Assignment, Projection
from fairfold.subspace.stored_table import StoredTable
from fairfold.typing import FLOAT_BYTES, Weights


@dataclass(frozen=True)
class PublicStatistics:
    """All that the server knows of its clients before the first round: sums over clients, and their number or 1."""

    num_items: int
    num_users: int = 1
    statistics: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class ClientTask:
    """What the server sends to the clients of one size in one round."""

    round_number: int  # rounds done before this one
    size: int  # index among the plan's sizes
    projections: dict[str, Projection]
    vectors: Weights  # every tensor as such a client holds it, and what an algorithm sends beside them
    context: dict[str, Projection] = field(default_factory=dict)  # further projections that updates refer to, by tensor

    @property
    def bytes_down(self) -> int:
        """Bytes of the vectors as they are sent, packed where a projection packs them."""
        packed = {name: held for name, held in self.projections.items() if held.is_packed}
        plain = {name: vector for name, vector in self.vectors.items() if name not in packed}
        return _num_bytes(plain) + sum(held.bytes for held in packed.values())


@dataclass(frozen=True)
class Update:
    """A weighted sum of what one or several clients computed, sparse where few numbers change; updates add up."""

    sums: Weights
    weight: float

    def __add__(self, other: "Update") -> "Update":
        sums = {name: _add_tensors(vector, other.sums[name]) for name, vector in self.sums.items()}
        return Update(sums, self.weight + other.weight)

    def dense(self, besides: Container[str] = ()) -> "Update":
        """Copy with dense vectors in the place of sparse ones, but for some."""
        sums = {name: vector if name in besides else vector.to_dense() for name, vector in self.sums.items()}
        return Update(sums, self.weight)

    @property
    def bytes_up(self) -> int:
        """Bytes of the numbers, and of their positions where they are sparse."""
        return _num_bytes(self.sums)


@dataclass(frozen=True)
class ClientUpdate:
    """The update of one or several clients of one size, with their new local state, which is not sent."""

    task: ClientTask
    client_ids: list[int]
    update: Update
    local_state: Weights


@dataclass(frozen=True)
class ScheduledTask:
    """A client of a round with its task; clients of one size share one task object."""

    client: int
    task: ClientTask


def group_by_task(scheduled: Iterable[ScheduledTask]) -> Iterable[tuple[ClientTask, list[int]]]:
    """Distinct tasks, each with the clients that received it."""
    groups: dict[int, tuple[ClientTask, list[int]]] = {}
    for one in scheduled:
        groups.setdefault(id(one.task), (one.task, []))[1].append(one.client)
    return groups.values()


class Aggregate:
    """Sums of the updates of a round, one per size and per round in which the task was sent."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], tuple[ClientTask, Update]] = {}
        self._owned: set[tuple[int, ...]] = set()  # sums whose tensors may be changed

    def add(self, task: ClientTask, update: Update, *, alone: bool = False) -> None:
        """Add an update; with ``alone`` as a sum of its own (a hash per client)."""
        key = (len(self._sums),) if alone else (task.size, task.round_number)
        additive = {
            name: task.projections[name].additive_form(vector, update.weight) if name in task.projections else vector
            for name, vector in update.sums.items()
        }
        if key not in self._sums:
            on_disk = [name for name, sent in task.vectors.items() if isinstance(sent, StoredTable)]
            self._sums[key] = task, Update(additive, update.weight).dense(on_disk)
            return
        task, total = self._sums[key]
        if key in self._owned:
            sums = {name: total.sums[name].add_(vector) for name, vector in additive.items()}
            self._sums[key] = task, Update(sums, total.weight + update.weight)
        else:
            self._sums[key] = task, total + Update(additive, update.weight)
            self._owned.add(key)

    def set_sum(self, task: ClientTask, total: Update) -> None:
        """Set the sum of the task's size and round to one that was summed elsewhere."""
        self._sums[task.size, task.round_number] = task, total

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def weight(self) -> float:
        """Total weight of all updates."""
        return sum(total.weight for _, total in self._sums.values())

    def parts(self) -> Iterable[tuple[ClientTask, Update]]:
        """Every task with the sum of the updates to it."""
        return self._sums.values()


@dataclass(frozen=True)
class State:
    """All that the server carries over rounds: θ, a flat vector per tensor, and an algorithm's state by group."""

    full: Weights
    round_number: int = 0
    algorithm_state: dict[str, Weights] = field(default_factory=dict)

    def copy(self) -> "State":
        """Deep copy, which later rounds do not change."""
        return self._map_groups(lambda tensors: {name: tensor.clone() for name, tensor in tensors.items()})

    def to(self, device: torch.device) -> "State":
        """Copy on a torch device."""
        return self._map_groups(lambda tensors: to_device(tensors, device))

    def _map_groups(self, change: Callable[[Weights], Weights]) -> "State":
        groups = {group: change(tensors) for group, tensors in self.algorithm_state.items()}
        return State(change(self.full), self.round_number, groups)


def to_device(weights: Mapping[str, Tensor], device: torch.device) -> Weights:
    """Move named tensors to a torch device."""
    return {name: tensor.to(device) for name, tensor in weights.items()}


def copy_async(
    values: Tensor | Sequence[int | float | list[bool]], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy host values to ``device`` asynchronously through pinned memory."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def nonzero_values(vector: Tensor) -> Tensor:
    """All values of a dense vector, or the stored ones of a sparse vector."""
    return vector.coalesce().values() if vector.is_sparse else vector


def reduce_per_size(full: Weights, assignments: list[Assignment]) -> list[Weights | None]:
    """Reduce every tensor once per size: what clients of each size receive; None for a size that takes no part."""
    sizes = [held.projections for held in assignments]
    reduced: dict[tuple[str, Projection], Tensor] = {}
    for name, vector in full.items():
        distinct = list(dict.fromkeys(held[name] for held in sizes if held is not None))
        if not distinct:
            continue
        if isinstance(vector, StoredTable):
            vectors = vector.reduce_each(distinct)
        else:
            vectors = type(distinct[0]).reduce_each(vector, distinct)
        reduced |= {(name, held): compact for held, compact in zip(distinct, vectors, strict=True)}
    return [None if held is None else {name: reduced[name, held[name]] for name in full} for held in sizes]


def _add_tensors(one: Tensor, other: Tensor) -> Tensor:
    return other + one if one.is_sparse and not other.is_sparse else one + other  # torch adds sparse to dense only


def _num_bytes(weights: Weights) -> int:
    return sum(nonzero_values(vector).numel() * (1 + vector.is_sparse) for vector in weights.values()) * FLOAT_BYTES
