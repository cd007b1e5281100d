"""Secure sums of a simulation: fixed-point encodings added up as masks would leave them, for each group of clients."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy
from fairfold.federation.aggregation import (
    ONE,
    Aggregator,
    Ranks,
    fixed_point_encoding,
    from_weighted_change,
    weighted_change,
)
from fairfold.federation.algorithm import FixedPointUpdates
from fairfold.federation.clients import Clients
from fairfold.federation.noise import add_aggregate_noise, simulation_noise
from fairfold.federation.updates import Aggregate, ClientTask, ClientUpdate, ScheduledTask, Update
from fairfold.privacy.fixed_point import Encoding, FixedPointVector, MeasuredUpdate, Segment, add_modular
from fairfold.privacy.noise import min_survivors


class SecureAggregator(Aggregator):
    """Adds up fixed-point encodings of updates; a sum of fewer clients than ``privacy.min_cohort`` stays closed."""

    def __init__(self, clients: Clients, cohort: Mapping[int, int], ranks: Ranks = ONE) -> None:
        super().__init__(clients, ranks)
        self._cohort = cohort  # clients by size
        self._num_clients = max(1, sum(cohort.values()))
        self._updates: list[ClientUpdate] = []
        self._tasks: dict[int, ClientTask] = {}
        self._sums: dict[int, FixedPointVector] = {}
        self._num_updates: Counter[int] = Counter()

    def separate_clients(self, cohort: list[int], failing: Mapping[int, str]) -> dict[int, str]:
        if FixedPointUpdates.of(self.plan.algorithm).fixed_point:  # exact: may be summed before they are encoded
            return dict(failing)
        return dict.fromkeys(cohort, "") | dict(failing)

    def add(self, client_update: ClientUpdate, update: Update) -> None:
        """Add an encoded update; it is acknowledged once its sum is known to be opened."""
        task = client_update.task
        size = task.size
        num_clients = len(client_update.client_ids)
        self._tasks.setdefault(size, task)
        self._updates.append(client_update)
        self._num_updates[size] += num_clients
        encoding = fixed_point_encoding(self.plan, {size: task}, self._num_clients)
        measured = MeasuredUpdate(weighted_change(self.plan, task, update))
        encoded = encoding.encode(measured, size, num_clients=num_clients)
        self._sums[size] = add_modular(self._sums.get(size), encoded)

    def aggregate(self, refused: list[tuple[int, str]]) -> Aggregate:
        privacy = self.plan.settings.privacy
        assert isinstance(privacy, SecurePrivacy)
        self._sum_over_ranks()
        aggregate = Aggregate()
        if not self._tasks:
            return aggregate
        encoding = fixed_point_encoding(self.plan, self._tasks, self._num_clients)
        opened: dict[Segment, FixedPointVector] = {}
        for segment in encoding.layout.segments:
            if self._num_contributors(segment) >= self._min_clients(privacy, segment):
                for size in segment.owners:
                    part = self._sums[size][segment.start : segment.stop]
                    opened[segment] = add_modular(opened.get(segment), part)
        if isinstance(privacy, DifferentialPrivacy):
            opened = {segment: self._add_noise(encoding, segment, total) for segment, total in opened.items()}
        for client_update in self._updates:
            segments = encoding.layout.segments_of(client_update.task.size)
            if any(segment in opened for segment in segments):
                self._acknowledge(client_update)
                continue
            few = max(self._min_clients(privacy, segment) for segment in segments) == privacy.min_cohort
            reason = f"a sum of fewer than {privacy.min_cohort} clients" if few else "too few clients for their noise"
            refused += [(client, reason) for client in client_update.client_ids]
        for size, measured in encoding.decode(opened).items():
            task = self._tasks[size]
            aggregate.add(task, from_weighted_change(self.plan, task, measured.update))
        return aggregate

    def _sum_over_ranks(self) -> None:
        """Add up sums and numbers of clients over all processes: integers, the same however clients are shared out."""
        if self.ranks.num_ranks == 1:
            return
        tasks = {size: task for (size, _), task in self._all_tasks.items()}
        layout = fixed_point_encoding(self.plan, tasks, self._num_clients).layout
        for size in sorted(tasks):
            total = torch.zeros(layout.length(size) + 1, dtype=torch.int64)
            if size in self._sums:
                total[:-1] = torch.from_numpy(self._sums[size].astype("int64"))
                total[-1] = self._num_updates[size]
            self.ranks.all_reduce([total])
            if int(total[-1]):
                self._tasks[size] = tasks[size]
                self._num_updates[size] = int(total[-1])
                self._sums[size] = (total[:-1] & 0xFFFFFFFF).numpy().astype("uint32")

    def _num_contributors(self, segment: Segment) -> int:
        return sum(self._num_updates[size] for size in segment.owners)

    def _cohort_size(self, segment: Segment) -> int:
        return sum(self._cohort[size] for size in segment.owners)

    def _min_clients(self, privacy: SecurePrivacy, segment: Segment) -> int:
        """Clients that a sum needs to be opened; where clients add noise, as many as make it enough."""
        adds_noise = isinstance(privacy, DifferentialPrivacy) and privacy.noise == "devices"
        return max(privacy.min_cohort, min_survivors(self._cohort_size(segment)) if adds_noise else 0)

    def _add_noise(self, encoding: Encoding, segment: Segment, total: FixedPointVector) -> FixedPointVector:
        settings = self.plan.settings
        draw = simulation_noise(settings, next(iter(self._tasks.values())).round_number)
        cohort, contributors = self._cohort_size(segment), self._num_contributors(segment)
        for name, _ in encoding.layout.ordered(segment.owners[0]):
            total = add_aggregate_noise(settings, encoding, name, segment, cohort, contributors, total, draw)
        return total


class GroupedAggregator(Aggregator):
    """Adds up the updates of each group of clients by itself; a robust rule takes their sums for updates."""

    def __init__(self, clients: Clients, sizes: Sequence[int], groups: Sequence[int], ranks: Ranks = ONE) -> None:
        super().__init__(clients, ranks)
        numbers = range(clients.plan.settings.fleet.secure_groups)
        of_group = [Counter(size for size, of in zip(sizes, groups, strict=True) if of == group) for group in numbers]
        self._groups = [SecureAggregator(clients, cohort, ranks) for cohort in of_group]

    def own_tasks(self, scheduled: Iterable[ScheduledTask]) -> Iterable[ScheduledTask]:
        everything = list(scheduled)
        for number, group in enumerate(self._groups):
            group.own_tasks([one for one in everything if one.task.group == number])
        return [one for one in everything if self.ranks.owns(one.client)]

    def separate_clients(self, cohort: list[int], failing: Mapping[int, str]) -> dict[int, str]:
        return self._groups[0].separate_clients(cohort, failing)

    def add(self, client_update: ClientUpdate, update: Update) -> None:
        self._groups[client_update.task.group].add(client_update, update)

    def aggregate(self, refused: list[tuple[int, str]]) -> Aggregate:
        for group in self._groups:
            for task, update in group.aggregate(refused).parts():
                self._aggregate.add(task, update)
        return self._aggregate
