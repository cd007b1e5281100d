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

MAX_DENSE = 1 << 26  # numbers of a vector up to which sums of sparse vectors are dense
MERGED_AT_ONCE = 1 << 22  # listed numbers that are sorted at a time
GROWTH = 0.5  # what is merged at once, against what was merged before
PLACES = ".places"  # suffix of the name of a sparse vector in an algorithm's state: its positions


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
    group: int = 0  # of clients that are summed together; not sent

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


class SparseSum:
    """A sum of sparse vectors in double precision; multiples of one unit add up exactly, in any order."""

    def __init__(self, size: int) -> None:
        self._size = size
        nothing = torch.empty(0, dtype=torch.int64)
        self._merged, self._waiting = (nothing, nothing.double()), list[tuple[Tensor, Tensor]]()
        self._num_waiting = 0

    def add(self, vector: Tensor) -> None:
        """Add a sparse vector."""
        vector = vector.coalesce()
        self._waiting.append((vector.indices()[0], vector.values().double()))
        self._num_waiting += vector.values().numel()
        if self._num_waiting > max(MERGED_AT_ONCE, GROWTH * len(self._merged[0])):
            self._merge_waiting()

    def total(self) -> Tensor:
        """The sum of all vectors that were added, coalesced."""
        self._merge_waiting()
        return sparse_vector(*self._merged, self._size)

    def _merge_waiting(self) -> None:
        """Merge what waits, a range of positions at a time: little is held beside what comes in and what goes out."""
        if not self._waiting:
            return
        parts = [part for part in (self._merged, *self._waiting) if len(part[0])]
        if len(parts) < 2:  # in its own memory
            self._merged = parts[0] if parts else self._merged
            self._waiting, self._num_waiting = [], 0
            return
        longest = max((places for places, _ in parts), key=len)
        step = max(1, MERGED_AT_ONCE * len(longest) // sum(len(places) for places, _ in parts))
        bounds = [*longest[step::step].tolist(), self._size]
        listed = sum(len(places) for places, _ in parts)
        places, values = torch.empty(listed, dtype=torch.int64), torch.empty(listed, dtype=torch.float64)
        filled, starts = 0, [0] * len(parts)
        for bound in bounds:
            stops = [int(torch.searchsorted(each, bound)) for each, _ in parts]
            cut = [slice(*between) for between in zip(starts, stops, strict=True)]
            here = torch.cat([each[at] for (each, _), at in zip(parts, cut, strict=True)])
            weights = torch.cat([each[at] for (_, each), at in zip(parts, cut, strict=True)])
            distinct, owners = torch.unique(here, return_inverse=True)
            stop = filled + len(distinct)
            places[filled:stop] = distinct
            values[filled:stop] = weights.new_zeros(len(distinct)).index_add_(0, owners, weights)
            filled, starts = stop, stops
        self._waiting, self._num_waiting = [], 0
        self._merged = places[:filled], values[:filled]  # memory behind that was never touched takes no room


def sparse_vector(places: Tensor, values: Tensor, size: int) -> Tensor:
    """A sparse vector from ascending positions and their values."""
    return torch.sparse_coo_tensor(places[None], values, (size,), check_invariants=False, is_coalesced=True)


class Aggregate:
    """Sums of the updates of a round, one per size, per group and per round in which the task was sent."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], tuple[ClientTask, Update]] = {}
        self._owned: set[tuple[int, ...]] = set()  # sums whose tensors may be changed
        self._sparse: dict[tuple[int, ...], dict[str, SparseSum]] = {}  # those too long to be dense

    def add(self, task: ClientTask, update: Update, *, alone: bool = False, users: int = 1) -> None:
        """Add an update of at most so many users; with ``alone`` as a sum of its own (a hash per client)."""
        key = (len(self._sums),) if alone else (task.size, task.round_number, task.group)
        additive = {
            name: task.projections[name].additive_form(vector, update.weight) if name in task.projections else vector
            for name, vector in update.sums.items()
        }
        for name in [name for name, vector in additive.items() if vector.is_sparse and len(vector) > MAX_DENSE]:
            long = self._sparse.setdefault(key, {})
            long.setdefault(name, SparseSum(len(additive[name]))).add(additive.pop(name))
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
        """Set the sum of the task's size, group and round to one that was summed elsewhere."""
        self._sums[task.size, task.round_number, task.group] = task, total

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def weight(self) -> float:
        """Total weight of all updates."""
        return sum(total.weight for _, total in self._sums.values())

    def parts(self) -> Iterable[tuple[ClientTask, Update]]:
        """Every task with the sum of the updates to it."""
        for key, (task, update) in self._sums.items():
            totals = {name: of.total() for name, of in self._sparse.get(key, {}).items()}
            yield task, Update(update.sums | totals, update.weight)

    def updates(self) -> Iterable[tuple[ClientTask, Update]]:
        """Sums of updates, by task."""
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


def add_vectors(before: Tensor | None, updates: Sequence[Tensor], size: int) -> Tensor:
    """The sum in double precision of a vector and the updates to its leading numbers; sparse if it is long."""
    if before is not None and not updates:
        return before
    if size <= MAX_DENSE:
        total = torch.zeros(size, dtype=torch.float64) if before is None else before.clone()
        for update in updates:
            total[: len(update)] += update
        return total
    listed = SparseSum(size)
    for part in updates if before is None else (before, *updates):
        listed.add(part if part.is_sparse else part.to_sparse())
    return listed.total()


def stored_vector(name: str, vector: Tensor) -> Weights:
    """A vector as dense tensors for an algorithm's state."""
    return {name + PLACES: vector.indices()[0], name: vector.values()} if vector.is_sparse else {name: vector}


def vector_in(group: Weights, name: str, size: int) -> Tensor | None:
    """A stored vector, in the same memory; None if there is none."""
    if name + PLACES not in group:
        return group.get(name)
    return sparse_vector(group[name + PLACES], group[name], size)


def same_vectors(one: Tensor, other: Tensor) -> bool:
    """Whether two vectors of one kind are the same."""
    if not one.is_sparse:
        return one.equal(other)
    return one.indices().equal(other.indices()) and one.values().equal(other.values())


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
