"""A federation ready to run: task, capacities and who has which, from settings and data."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairfold.algorithms import assign
from fairfold.errors import InvalidSettings
from fairfold.federation.least_squares import first_state
from fairfold.federation.projection import Assignment, Hashed
from fairfold.federation.rating_squares import first_ratings
from fairfold.federation.sampling import Purpose, generator, hash_seed, sample_cohort
from fairfold.federation.settings import Settings
from fairfold.federation.storage import Storage
from fairfold.federation.task import BYTES, Task, Weights
from fairfold.subspace import Capacity, assign_groups, parse_scheme


def _started_in(smallest: Assignment, full: Weights) -> Weights:
    """Random tensors moved into a subspace, as large there as they were: √count makes up for taking means."""
    moved = dict(full)
    for name, projection in (smallest.projections or {}).items():
        if isinstance(projection, Hashed):
            counts = projection.counts(torch.arange(projection.size)).clamp(min=1)
            moved[name] = projection.recover(projection.reduce(full[name]) * counts.to(full[name].dtype).sqrt())
    return moved


@dataclass(frozen=True)
class Federation:
    """What does not change over a run.

    Attributes:
        settings: Of the run.
        task: Model, data and loss.
        capacities: One a group of clients.
        group: The group of every client.
        taking_part: The clients that the method does not leave out.
    """

    settings: Settings
    task: Task
    capacities: list[Capacity]
    group: Tensor
    taking_part: Tensor

    @classmethod
    def of(cls, settings: Settings, task: Task) -> "Federation":
        """Split the clients by the capacity scheme; refuse what cannot work, before any work."""
        capacities = parse_scheme(settings.capacities)
        wanted = settings.clients_per_round
        if wanted is not None and wanted > task.num_clients and not settings.replacement:
            raise InvalidSettings(
                f"clients_per_round = {wanted} of {task.num_clients} clients",
                f"at most {task.num_clients}",
                "Ask for fewer, or draw with replacement.",
            )
        group = assign_groups(task.num_clients, len(capacities), settings.shares, settings.group_seed)
        federation = cls(settings, task, capacities, group, torch.arange(task.num_clients))
        held = federation.assignments(0)  # a capacity that the method cannot serve is told now
        serves = torch.tensor([assignment.projections is not None for assignment in held])
        return replace(federation, taking_part=serves[group].nonzero().flatten())

    def cohort(self, round_number: int) -> Tensor:
        """C, the clients of a round, drawn among those that take part: K of them, or all where they are fewer."""
        settings, many = self.settings, len(self.taking_part)
        if settings.clients_per_round is not None and settings.clients_per_round > many and not settings.replacement:
            return self.taking_part
        return self.taking_part[sample_cohort(settings, many, round_number)]

    def assignments(self, round_number: int, client: int | None = None) -> list[Assignment]:
        """What each group holds in a round; with ``client``, under that client's own, independent hash."""
        seed = hash_seed(self.settings, round_number)
        if client is not None:
            seed ^= (client + 1) << 32
        task = self.task
        whole = {name: shape for name, shape in task.shapes.items() if name not in task.compressed}
        limited = [self.limited(capacity) for capacity in self.capacities]
        return assign(self.settings, task.compressed, whole, limited, seed, task.reads)

    def limited(self, capacity: Capacity) -> Capacity:
        """What a device of this capacity is given: at most what the data supports, counted in rows of the reference."""
        settings, task = self.settings, self.task
        capacity = task.left(capacity)
        if not settings.support and settings.reference_factors is None:
            return capacity
        items, factors = next(iter(task.tables.values()))  # the only one, but for a bias
        reference = items * (settings.reference_factors or factors)
        limit = capacity.limit(reference)
        if settings.support and settings.mapping == "ranked":
            smallest = min(known.limit(reference) for known in [*map(task.left, self.capacities), capacity])
            limit = min(limit, self._supported(items, factors, smallest))
        return Capacity.parse("1x") if limit >= items * factors else Capacity(budget=limit * BYTES)

    def _supported(self, items: int, factors: int, smallest: int) -> int:
        """Numbers enough for every item that ``support`` users have to own a row, and for the tail."""
        data = self.task.data
        counts = data.train.counts_by_item if data.counted is None else data.counted.counts
        owned = max(1, int((counts >= self.settings.support).sum()))
        if self.settings.tail_share is None:  # half of every size
            return min(items, 2 * owned) * factors
        share = self.settings.tail_share
        shared = int(min(smallest // factors * share, owned * share / (1 - share)))
        return min(items, owned + max(shared, 1)) * factors

    def initial(self, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """The server's tensors and the users' own vectors, kept in ``storage``, before training."""
        full, own = self.task.initial(generator(self.settings, Purpose.MODEL), storage)
        if self.settings.solver == "least_squares":
            first = first_ratings if self.task.ratings else first_state
            full = first(full, self.assignments(0), self.task)
        if self.settings.start == "subspace":
            held = [known for known in self.assignments(0) if known.projections is not None]
            full = _started_in(min(held, key=lambda known: known.size()), full)
        return full, own
