"""The clients' side: data and local state. No object of the server's side leads in here; a test walks the types."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairfold.data import Interactions
from fairfold.data.images import ImageDataset
from fairfold.data.partition import Partition
from fairfold.data.sampling import NegativeSampler
from fairfold.federation.algorithm import Algorithm, Centralized, FoldsIn, RemembersUpdates
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Purpose, generator
from fairfold.federation.training import ImageTraining, RankingTraining
from fairfold.federation.updates import copy_async
from fairfold.typing import Weights


@dataclass(frozen=True)
class Client:
    """One client in one round: its id, its local state (of its user and of its samples) and its random numbers."""

    clients: "Clients"
    number: int
    local_state: Weights
    generator: torch.Generator

    @property
    def items(self) -> Tensor:
        """The items of its user's history."""
        return self.clients.train.of(self.number)

    @property
    def num_samples(self) -> int:
        """Number of its training samples."""
        return self.clients.num_samples(self.number)


def serves_new_users(algorithm: Algorithm) -> bool:
    """Whether a model of an algorithm can rank for users who did not train, from their histories."""
    return algorithm.serves_new_users or isinstance(algorithm, FoldsIn)


class Clients:
    """Users with interactions, one client each (one in all if centralized), and local state by user or by sample."""

    def __init__(self, plan: Plan, train: Interactions, local_state: Weights, seed: int | None = None) -> None:
        self.plan, self.train, self.outside = plan, train, train  # negatives are drawn outside of ``outside``
        self.local_state = local_state
        self.are_new = False  # whether they are users who did not train, and have no vectors of their own
        self.seed = plan.settings.run.seed if seed is None else seed
        self._centralized = isinstance(plan.algorithm, Centralized)
        self.num_clients = 1 if self._centralized else train.num_users
        self._sample_state = RemembersUpdates.of(plan.algorithm).sample_state_shapes(plan)
        for name, length in self._sample_state.items():
            if name not in local_state:
                local_state[name] = torch.zeros(len(train), length)

    @classmethod
    def new(cls, plan: Plan, histories: Interactions) -> "Clients":
        """Make clients of users who did not train, with these histories."""
        clients = cls(plan, histories, {})
        clients.are_new = True
        return clients

    @cached_property
    def training(self) -> RankingTraining:
        """Samples and losses of gradient steps."""
        return RankingTraining(self.plan, self.train)

    @cached_property
    def negative_sampler(self) -> NegativeSampler:
        """Draws items that a user does not have."""
        return NegativeSampler(self.outside)

    def num_samples(self, client: int) -> int:
        """Number of a client's training samples."""
        span = self.train.span(client)
        return len(self.train) if self._centralized else span.stop - span.start

    def state_rows(self, name: str, client: int) -> int | slice:
        """The rows of a tensor of the local state that are a client's: its vector, or one row per sample."""
        if self._centralized:
            return slice(None)
        return self.train.span(client) if name in self._sample_state else client

    def source(self, round_number: int, client: int) -> torch.Generator:
        """A client's random numbers of a round."""
        return generator(self.seed, Purpose.TRAINING, round_number, client)

    def client(self, number: int, round_number: int) -> Client:
        """One client's data, local state and random numbers in a round."""
        local_state = {name: rows[self.state_rows(name, number)] for name, rows in self.local_state.items()}
        return Client(self, number, local_state, self.source(round_number, number))

    def save_local_state(self, client_ids: list[int], local_state: Weights) -> None:
        """Store the new local state of clients: a row each or, per sample, the rows of all one after another."""
        for name, rows in local_state.items():
            stored = self.local_state.setdefault(name, torch.zeros_like(rows))
            if len(client_ids) == 1:
                target = stored[self.state_rows(name, client_ids[0])]
                target.copy_(rows.view(target.shape))
            elif name in self._sample_state:
                stored[self.sample_indices(client_ids)] = rows.to(stored.dtype)
            else:
                stored[copy_async(client_ids, stored.device)] = rows.to(stored.dtype)

    def sample_indices(self, client_ids: list[int]) -> Tensor:
        """Positions of all samples of some clients, one client after another."""
        starts, counts = self.train.offsets[client_ids], self.train.counts_by_user[client_ids]
        return torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - counts.cumsum(0) + counts, counts)


class ImageClients(Clients):
    """Clients with images, divided among them by a partition."""

    def __init__(self, plan: Plan, images: ImageDataset, partition: Partition, seed: int | None = None) -> None:
        self.plan, self.images, self.partition = plan, images, partition
        self.local_state = {}
        self.seed = plan.settings.run.seed if seed is None else seed
        self.num_clients = len(partition)
        self._centralized = False
        self._sample_state = {}

    @cached_property
    def training(self) -> ImageTraining:  # type: ignore[override]
        return ImageTraining(self.plan, self.images, self.partition)

    def num_samples(self, client: int) -> int:
        return int(self.partition.offsets[client + 1] - self.partition.offsets[client])
