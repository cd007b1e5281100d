"""The clients' side: everybody's data and private vectors where a machine simulates them, a device's own on a device.

Nothing of the server's side has a path to anything in here; a test walks the types.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairfold.data import Interactions
from fairfold.data.clients import Clients
from fairfold.data.images import ImageDataset
from fairfold.data.negatives import NegativeSampler
from fairfold.protocol.plan import Plan
from fairfold.protocol.sampling import Purpose, generator
from fairfold.protocol.words import put
from fairfold.protocol.work import ImageWork, Work
from fairfold.values import Weights


@dataclass(frozen=True)
class Client:
    """One client in one round: its number among others, its private tensors (of its user, of its samples)."""

    people: "People"
    number: int
    own: Weights
    generator: torch.Generator

    @property
    def items(self) -> Tensor:
        """What its user has."""
        return self.people.train.of(self.number)

    @property
    def samples(self) -> int:
        """How much data it has."""
        return self.people.samples(self.number)


class People:
    """Users with interactions, one client each; one in all where the algorithm pools everybody's data.

    Their ``private`` tensors are written to; their random draws have a ``seed`` of their own, or the run's. Items that
    a user does not have are drawn ``outside`` of their training data.
    """

    def __init__(self, plan: Plan, train: Interactions, private: Weights, seed: int | None = None) -> None:
        self.plan, self.train, self.private = plan, train, private
        self.seed = plan.settings.run.seed if seed is None else seed
        self.num_clients = 1 if plan.algorithm.pooled else train.num_users
        self.outside = train
        self._remembered = plan.algorithm.remembered(plan)
        for name, length in self._remembered.items():
            if name not in private:
                private[name] = torch.zeros(len(train), length)

    @cached_property
    def work(self) -> Work:
        """What gradient steps are taken on."""
        return Work(self.plan, self.train)

    @cached_property
    def negatives(self) -> NegativeSampler:
        """Draws items that a user does not have."""
        return NegativeSampler(self.outside)

    def samples(self, client: int) -> int:
        """How much data a client has."""
        span = self.train.span(client)
        return len(self.train) if self.plan.algorithm.pooled else span.stop - span.start

    def rows_of(self, name: str, client: int) -> int | slice:
        """Which rows of a private tensor are a client's: its vector, or one row per sample."""
        if self.plan.algorithm.pooled:
            return slice(None)
        return self.train.span(client) if name in self._remembered else client

    def source(self, round_number: int, client: int) -> torch.Generator:
        """A client's random numbers of a round."""
        return generator(self.seed, Purpose.TRAINING, round_number, client)

    def client(self, number: int, round_number: int) -> Client:
        """One of them in a round."""
        own = {name: rows[self.rows_of(name, number)] for name, rows in self.private.items()}
        return Client(self, number, own, self.source(round_number, number))

    def keep(self, clients: list[int], own: Weights) -> None:
        """Let clients keep what they learned, a row each or, of samples, all their rows one after another."""
        for name, rows in own.items():
            mine = self.private.setdefault(name, torch.zeros_like(rows))
            if len(clients) == 1:
                room = mine[self.rows_of(name, clients[0])]
                room.copy_(rows.view(room.shape))
            elif name in self._remembered:
                mine[self.chosen(clients)] = rows.to(mine.dtype)
            else:
                mine[put(clients, mine.device)] = rows.to(mine.dtype)

    def chosen(self, clients: list[int]) -> Tensor:
        """The places of all samples of some clients, one client after another."""
        begins, many = self.train.offsets[clients], self.train.counts_by_user[clients]
        return torch.arange(int(many.sum())) + torch.repeat_interleave(begins - many.cumsum(0) + many, many)


class ImagePeople(People):
    """Devices with images."""

    def __init__(self, plan: Plan, images: ImageDataset, clients: Clients, seed: int | None = None) -> None:
        self.plan, self.images, self.clients, self.private = plan, images, clients, {}
        self.seed = plan.settings.run.seed if seed is None else seed
        self.num_clients, self._remembered = len(clients), {}

    @cached_property
    def work(self) -> ImageWork:  # type: ignore[override]
        """What gradient steps are taken on."""
        return ImageWork(self.plan, self.images, self.clients)

    def samples(self, client: int) -> int:
        """How many images a device holds."""
        return int(self.clients.offsets[client + 1] - self.clients.offsets[client])
