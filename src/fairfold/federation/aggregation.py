"""Aggregation of updates, in the plain or as secure aggregation gives it: the same integers without masks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fairfold.config.fleet import SecurePrivacy
from fairfold.federation.algorithm import (
    CombinesGroups,
    FixedPointUpdates,
    RemembersUpdates,
)
from fairfold.federation.clients import Clients
from fairfold.federation.noise import noise_headroom
from fairfold.federation.plan import Plan
from fairfold.federation.updates import MAX_DENSE, Aggregate, ClientTask, ClientUpdate, ScheduledTask, Update
from fairfold.privacy.fixed_point import (
    Encoding,
    VectorLayout,
)

if TYPE_CHECKING:
    from fairfold.config import Settings

Value = TypeVar("Value")
ROBUST = ("clipped", "trimmed", "median", "multi-krum")  # rules of :mod:`.robust`


class RobustRule(NamedTuple):
    """How changes are combined, and the largest share of clients that may be hostile."""

    kind: str
    share: float

    def num_hostile(self, clients: int) -> int:
        """How many of some clients may be hostile: as many as leave a majority of others."""
        return min(math.ceil(self.share * clients), (clients - 1) // 2)


class CombinesRobustly(CombinesGroups):
    """Takes a mean of its clients' changes, or by a robust rule what stands in its place."""

    times_median: ClassVar[float] = 5.0  # of the median norm: a device's change at most, without a rule
    groups_times_median: ClassVar[float] = 2.0  # the same of sums of groups of devices, which are more alike

    @property
    def robust_rule(self) -> RobustRule | None:
        """The rule; None for the mean."""
        return None

    @property
    def weighs_samples(self) -> bool:
        """Whether a user's weight depends on what the user has, which the server cannot know."""
        return False


def make_aggregate(settings: "Settings", *, bounded: bool = False) -> Aggregate:
    """The sums of a round, or where an algorithm combines robustly what takes their place; ``bounded`` for devices."""
    algorithm = settings.algorithm
    rule = CombinesRobustly.of(algorithm).robust_rule
    if rule is None and not (bounded and isinstance(algorithm, CombinesRobustly)):
        return Aggregate()
    from fairfold.federation.robust import BoundedAggregate, RobustAggregate  # where it is asked for

    return BoundedAggregate(settings) if rule is None else RobustAggregate(settings, rule)


class Ranks:
    """Processes that share the clients of a simulation: one that has all; several are in ``backends.distributed``."""

    rank: int = 0
    num_ranks: int = 1
    synchronized: bool = False  # once the first has broadcast where to begin

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def owns(self, client: int) -> bool:
        """Whether this process trains a client, in all rounds: it stores the client's local state."""
        return client % self.num_ranks == self.rank

    def owned(self, client_ids: Iterable[int]) -> list[int]:
        """The clients that this process trains."""
        return [client for client in client_ids if self.owns(client)]

    def check_device(self, device: torch.device) -> None:
        """Refuse a torch device that this process cannot have for itself."""

    def fail_together(self) -> AbstractContextManager[None]:
        """Context in which an error of one process is raised in all of them."""
        return nullcontext()

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in place."""

    def all_gather(self, values: list[Value]) -> list[Value]:
        """Concatenate the lists of all processes."""
        return values

    def broadcast(self, value: Value) -> Value:
        """The value of the first process."""
        return value

    def mark_trained(self, client_ids: list[int]) -> None:
        """Note clients whose local state may have changed since it was last gathered."""

    def gather_local_state(self, clients: Clients) -> None:
        """Copy the local state of all clients to all processes."""


ONE = Ranks()


class Aggregator:
    """Adds up the updates of a round in the plain."""

    def __init__(self, clients: Clients, ranks: Ranks = ONE) -> None:
        self.clients, self.plan, self.ranks = clients, clients.plan, ranks
        self._aggregate = make_aggregate(self.plan.settings)
        self._all_tasks: dict[tuple[int, int], ClientTask] = {}  # of all ranks, by size and round

    def own_tasks(self, scheduled: Iterable[ScheduledTask]) -> Iterable[ScheduledTask]:
        """The tasks of this process's clients."""
        if self.ranks.num_ranks == 1:
            return scheduled
        everything = list(scheduled)
        self._all_tasks = {(one.task.size, one.task.round_number): one.task for one in everything}
        return [one for one in everything if self.ranks.owns(one.client)]

    def separate_clients(self, cohort: list[int], failing: Mapping[int, str]) -> dict[int, str]:
        """Clients whose updates a backend must yield one by one, each with its fault (or "")."""
        robust = CombinesRobustly.of(self.plan.algorithm).robust_rule is not None
        return (dict.fromkeys(cohort, "") if robust else {}) | dict(failing)

    def add(self, client_update: ClientUpdate, update: Update) -> None:
        """Add an accepted update; a client that remembers its updates stores that this one was acknowledged."""
        self._acknowledge(client_update)
        self._aggregate.add(client_update.task, update, alone=self.plan.method.per_client)

    def aggregate(self, refused: list[tuple[int, str]]) -> Aggregate:
        """The sums for the server; clients whose sums stay closed are appended to ``refused`` with the reason."""
        if self.ranks.num_ranks == 1:
            return self._aggregate
        return sum_over_ranks(self.ranks, self.plan, self._aggregate, list(self._all_tasks.values()))

    def _acknowledge(self, client_update: ClientUpdate) -> None:
        if isinstance(self.plan.algorithm, RemembersUpdates):
            self.clients.save_local_state(client_update.client_ids, client_update.local_state)


def fixed_point_encoding(plan: Plan, tasks: Mapping[int, ClientTask], num_clients: int) -> Encoding:
    """The encoding of updates to some sizes' tasks, for a sum over at most ``num_clients``."""
    privacy = plan.settings.privacy
    assert isinstance(privacy, SecurePrivacy)
    exact = FixedPointUpdates.of(plan.algorithm)
    shapes = {size: plan.algorithm.update_shapes(plan, task) for size, task in tasks.items()}
    headroom = noise_headroom(plan.settings, exact.fixed_point, num_clients)
    layout = VectorLayout(shapes, exact.nested_sums)
    return Encoding(layout, privacy.clip, num_clients, exact.fixed_point, headroom, exact.value_bounds)


def weighted_change(plan: Plan, task: ClientTask, update: Update) -> Update:
    """An update as it is encoded: where it is a whole model, the weighted change of it, whose numbers are small."""
    if not plan.algorithm.sends_weights:
        return update
    sums = {name: total - update.weight * task.vectors[name] for name, total in update.sums.items()}
    return replace(update, sums=sums)


def from_weighted_change(plan: Plan, task: ClientTask, update: Update) -> Update:
    """Invert :func:`weighted_change` for a decoded sum; exact fixed-point sums stay in double precision."""
    sums, sent = update.sums, task.vectors
    if plan.algorithm.sends_weights:
        sums = {name: (total + update.weight * sent[name]).to(sent[name].dtype) for name, total in sums.items()}
    else:
        exact = FixedPointUpdates.of(plan.algorithm).fixed_point
        dtype = next(iter(sent.values())).dtype
        sums = {name: total if name in exact else total.to(dtype) for name, total in sums.items()}
    return replace(update, sums=sums)


def merge_small_groups(sizes: Tensor, order: list[int], min_clients: float) -> Tensor:
    """Sizes after groups of fewer than ``min_clients`` joined the next smaller size; ``order``: the largest first."""
    merged = sizes.clone()
    for size, smaller in pairwise(order):
        group = merged == size
        if 0 < int(group.sum()) < min_clients:
            merged[group] = smaller
    return merged


def merged_groups_notes(before: Tensor, after: Tensor, names: list[str]) -> list[str]:
    """Sentences on groups that :func:`merge_small_groups` has merged."""
    notes = []
    for size, name in enumerate(names):
        joined = torch.unique(after[(before == size) & (after != size)]).tolist()
        if joined:
            held = f"{int((before == size).sum()):,} devices of {name} hold {names[joined[0]]}"
            notes.append(f"{held}: too few to be hidden in a sum of their own.")
    return notes


def sum_over_ranks(ranks: Ranks, plan: Plan, aggregate: Aggregate, tasks: Sequence[ClientTask]) -> Aggregate:
    """Reduce the sums of updates to ``tasks`` over all processes; gather them with hashes per client, or if long."""
    if CombinesRobustly.of(plan.algorithm).robust_rule is not None:
        kept = make_aggregate(plan.settings)
        for task, update in ranks.all_gather(list(aggregate.updates())):
            kept.add(task, update)
        return kept
    reduced, lengths = Aggregate(), [_sum_lengths(plan, task) for task in tasks]
    alone = plan.method.per_client
    if alone or max((length for of_task in lengths for length in of_task.values()), default=0) > MAX_DENSE:
        for task, update in ranks.all_gather(list(aggregate.parts())):
            reduced.add(task, update, alone=alone)
        return reduced
    own = {(task.size, task.round_number): update for task, update in aggregate.parts()}
    updates = [own.get((task.size, task.round_number)) for task in tasks]
    vectors = []
    for task, known, of_task in zip(tasks, updates, lengths, strict=True):
        like = next(iter(task.vectors.values()))
        vectors += [like.new_zeros(of_task[name]) if known is None else known.sums[name] for name in of_task]
    counts = torch.tensor([[0.0, 0.0] if one is None else [one.weight, 1.0] for one in updates], dtype=torch.float64)
    flat = torch.cat(vectors)
    ranks.all_reduce([flat, counts])
    parts = iter(torch.split(flat, [len(vector) for vector in vectors]))
    for task, of_task, (weight, num_updates) in zip(tasks, lengths, counts.tolist(), strict=True):
        total = Update({name: next(parts) for name in of_task}, weight)
        if num_updates:
            reduced.set_sum(task, total)
    return reduced


def _sum_lengths(plan: Plan, task: ClientTask) -> dict[str, int]:
    full = {name: torch.Size(held.shape).numel() for name, held in task.projections.items() if not held.linear}
    return {name: full.get(name, length) for name, length in plan.algorithm.update_shapes(plan, task).items()}
