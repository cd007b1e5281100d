"""Clients whose updates are attacked: those of a run, replayed from its settings, data and seed, and synthetic ones.

The attacker is honest but curious: it follows the protocol, and knows the settings, the hash, the popularity of every
item, and who takes part. Synthetic clients, with histories drawn by popularity, show it updates by chance.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Generator, Tensor

from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.backends.batched import batched
from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy
from fairfold.data import Interactions
from fairfold.federation.aggregation import Aggregator
from fairfold.federation.algorithm import FixedPointUpdates, RemembersUpdates
from fairfold.federation.clients import Clients
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import make_aggregator, run_round
from fairfold.federation.scheduling import ClientSampler
from fairfold.federation.updates import ClientTask, ScheduledTask, State, Update
from fairfold.typing import Weights

Advance = Callable[[], None]  # called as an attack proceeds
TARGETS_PER_COHORT = 10
LARGE_COHORTS = 4  # cohorts that are attacked where each has most of the clients
COMPARED_USERS = 20  # other users with whose items those of a target are compared


@dataclass(frozen=True)
class Observation:
    """What the server sees: the task of a size, and the update of one client or the sum of several."""

    task: ClientTask
    update: Update


@dataclass(frozen=True)
class AttackedCohort:
    """A cohort, some of whose members are targets."""

    members: list[int]
    targets: list[int]
    outside: list[int]  # other clients, which replace the targets in a sum without them
    aside: list[int]  # clients in neither sum: their items are compared with those of the targets

    def compared(self, source: Generator) -> list[int]:
        """A random sample of the clients that are in neither sum."""
        order = torch.randperm(len(self.aside), generator=source)
        return [self.aside[place] for place in order[:COMPARED_USERS].tolist()]

    @property
    def without_targets(self) -> list[int]:
        """The cohort with other clients in place of the targets."""
        return [user for user in self.members if user not in set(self.targets)] + self.outside


class _Silent(Rejections):
    """Discards the rejections of an attack's own sums."""

    def note(self, round_number: int, client: int, reason: str) -> None:
        pass


class _Unchanged(Clients):
    """Clients that save no local state, so that the same updates can be computed again."""

    def __init__(self, clients: Clients) -> None:
        self.__dict__.update(clients.__dict__)

    def save_local_state(self, client_ids: list[int], local_state: Weights) -> None:
        pass


@dataclass(frozen=True)
class ReplayedClients:
    """Clients with their data and state at one moment of a run."""

    sampler: ClientSampler
    clients: Clients
    state: State
    noise_rounds: Iterator[int] = field(default_factory=lambda: count(1 << 20), repr=False, compare=False)

    @classmethod
    def of_run(cls, federation: Federation, rounds: int = 0) -> "ReplayedClients":
        """Replay the clients of a run up to the end of some rounds."""
        found = cls(federation.sampler, federation.clients, federation.initial())
        for _ in range(rounds):
            found = found.after_round()
        return found

    def after_round(self) -> "ReplayedClients":
        """The clients one round later; their local state changes in place."""
        if isinstance(self.sampler.plan.algorithm, CoOccurrence):  # its updates do not depend on the model
            client_ids = self.sampler.cohort(self.state.round_number).tolist()
            self._aggregate(make_aggregator(self.clients, self.sampler.size[client_ids].tolist()), client_ids)
            return replace(self, state=replace(self.state, round_number=self.state.round_number + 1))
        return replace(self, state=run_round(self.state, self.sampler, self.clients, _Silent(), batched))

    def with_histories(self, histories: Interactions, like: Tensor) -> "ReplayedClients":
        """New clients with given histories, each with the size and the local state of a client of the run."""
        plan, known = self.clients.plan, self.clients.local_state
        local_state = {name: known[name][like].clone() for name in plan.architecture.user_vectors if name in known}
        if isinstance(plan.algorithm, RemembersUpdates):
            local_state = {name: torch.zeros_like(rows) for name, rows in local_state.items()}
        sampler = replace(self.sampler, size=self.sampler.size[like], participants=torch.arange(len(like)))
        return ReplayedClients(sampler, Clients(plan, histories, local_state), self.state, self.noise_rounds)

    def updates(self, client_ids: list[int]) -> Iterator[Observation]:
        """The update of each of some clients."""
        return (seen for seen, _ in self.updates_and_secrets(client_ids))

    def updates_and_secrets(self, client_ids: list[int]) -> Iterator[tuple[Observation, Weights]]:
        """The update of each client with the local state behind it, by which an attack is evaluated."""
        plan = self.sampler.plan
        for scheduled in self.sampler.schedule(self.state, client_ids):
            client = self.clients.client(scheduled.client, self.state.round_number)
            update, local_state = plan.algorithm.client_update(plan, scheduled.task, client)
            secret = local_state if plan.algorithm.serves_new_users else client.local_state
            yield Observation(scheduled.task, update.dense()), secret

    def sums(self, client_ids: list[int], *, rough: bool = False) -> list[Observation]:
        """What the server sees of some clients together; ``rough`` sums leave out the slow rounding of each update."""
        plan, clients = self.sampler.plan, _Unchanged(self.clients)
        noisy = isinstance(plan.settings.privacy, DifferentialPrivacy)
        if rough and not noisy and not FixedPointUpdates.of(plan.algorithm).fixed_point:
            return self._aggregate(Aggregator(clients), client_ids)
        return self._aggregate(make_aggregator(clients, self.sampler.size[client_ids].tolist()), client_ids)

    def _aggregate(self, aggregator: Aggregator, client_ids: list[int]) -> list[Observation]:
        plan, scheduled = self.sampler.plan, self.sampler.schedule(self.state, client_ids)
        if isinstance(plan.settings.privacy, DifferentialPrivacy):
            scheduled = self._with_fresh_noise(scheduled)
        for one in batched(aggregator.clients, scheduled, aggregator.separate_clients(client_ids, {})):
            if plan.algorithm.validate_update(plan, one.task, one.update) is None:
                aggregator.add(one, one.update)
        return [Observation(task, update) for task, update in aggregator.aggregate([]).parts()]

    def _with_fresh_noise(self, scheduled: Iterator[ScheduledTask]) -> Iterator[ScheduledTask]:
        """Renumber the round: simulated noise follows from its number, and must not be known before."""
        known, number = dict[int, ClientTask](), next(self.noise_rounds)
        for one in scheduled:
            task = known.setdefault(id(one.task), replace(one.task, round_number=number))
            yield ScheduledTask(one.client, task)

    def exact_sums(self, client_ids: list[int]) -> list[Observation]:
        """Sums by size without masks and noise, by which an attack on noise is evaluated."""
        return self._aggregate(Aggregator(_Unchanged(self.clients)), client_ids)

    def cohorts(self, size: int, users: int, source: Generator) -> list[AttackedCohort]:
        """Random cohorts with ``users`` targets in all; at least half of the other clients are aside."""
        participants, privacy = self.sampler.participants, self.clients.plan.settings.privacy
        available = len(participants)
        # Where a cohort would have every client, some are left out for comparison, as far as a sum may do without them.
        min_cohort = privacy.min_cohort if isinstance(privacy, SecurePrivacy) else 1
        size = min(size, available - max(0, min(available // 5, available - min_cohort)))
        # Where it has most of the clients, a few cohorts have all targets: others would be much the same.
        at_once = min(max(TARGETS_PER_COHORT, -(-users // LARGE_COHORTS) if 2 * size >= available else 0), size, users)
        found = []
        for first in range(0, users, at_once):
            drawn = participants[torch.randperm(available, generator=source)].tolist()
            members, others = drawn[:size], drawn[size:]
            num_targets = min(at_once, users - first)
            replacing = min(num_targets, len(others) // 2)
            found.append(AttackedCohort(members, members[:num_targets], others[:replacing], others[replacing:]))
        return found

    def synthetic(self, num_clients: int, source: Generator) -> "ReplayedClients":
        """Clients with histories drawn by popularity and as long as real ones, which any attacker can simulate."""
        train, participants = self.clients.train, self.sampler.participants
        like = participants[torch.randint(len(participants), (num_clients,), generator=source)]
        popularity = train.counts_by_item.double()
        lengths = train.counts_by_user[like].clamp(max=int((popularity > 0).sum()))
        items = list[Tensor]()
        for length in lengths.tolist():
            # Drawn without repeats: the largest of popularity^(1/u)-like keys (Efraimidis and Spirakis).
            keys = torch.rand(len(popularity), generator=source, dtype=torch.float64).log() / popularity
            items.append(keys.topk(length).indices)
        users = torch.repeat_interleave(torch.arange(num_clients), lengths)
        ratings = None
        if train.ratings is not None:
            ratings = train.ratings[torch.randint(len(train), (len(users),), generator=source)]
        histories = Interactions.from_pairs(users, torch.cat(items), num_clients, train.num_items, ratings)
        return self.with_histories(histories, like)
