"""Partitions of a data set: rows divided among clients, and validation data held out of the training data."""

from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairfold.data.images import ImageDataset
from fairfold.data.interactions import Interactions, offsets_of
from fairfold.data.sampling import generator, numpy_generator
from fairfold.errors import InvalidData, InvalidSettings


@dataclass(frozen=True)
class Partition:
    """Division of the rows of a data set among clients, in memory proportional to the rows."""

    offsets: Tensor  # int64 [clients + 1]; client c holds the rows offsets[c] to offsets[c + 1]
    rows: Tensor | None = None  # int64 [rows], row numbers in the data set; None where they are 0, 1, 2, … in order

    def __len__(self) -> int:
        return int(self.offsets.numel()) - 1

    @property
    def counts(self) -> Tensor:
        """Number of rows of each client."""
        return self.offsets[1:] - self.offsets[:-1]

    def of(self, client: int) -> Tensor:
        """The row numbers of one client's share of the data."""
        start, stop = self.offsets[client : client + 2].tolist()
        return torch.arange(start, stop) if self.rows is None else self.rows[start:stop]

    def without_empty(self) -> "Partition":
        """Leave out clients without rows, and renumber the others."""
        kept = self.counts > 0
        return Partition(torch.cat([self.offsets[:1], self.offsets[1:][kept]]), self.rows)


def by_user(interactions: Interactions) -> Partition:
    """Make one client per user; nothing is copied, since interactions are grouped by user."""
    return Partition(interactions.offsets)


def by_writer(writers: Tensor) -> Partition:
    """Make one client per writer of images, given the writer of every image."""
    if int(writers.min()) < 0:
        raise InvalidData(f"the writer {int(writers.min())}", "numbers from 0 on", "Number the writers densely.")
    return _partition_by_owner(writers, int(writers.max()) + 1)


def by_label(labels: Tensor, num_clients: int, concentration: float, seed: int = 0) -> Partition:
    """Divide every label's rows among the clients in shares drawn from a Dirichlet distribution.

    A small ``concentration`` gives every client few labels, a large one the same mixture to all. Some of many clients
    hold nothing.

    Example:
        >>> clients = by_label(torch.arange(100) % 10, 5, concentration=0.5)
        >>> len(clients), sum(len(clients.of(client)) for client in range(5))
        (5, 100)
    """
    if num_clients < 1 or not concentration > 0:
        given = f"{num_clients} clients with concentration {concentration}"
        raise InvalidData(given, "at least one client, a concentration above 0", "Change num_clients or concentration.")
    label_of = labels.numpy()
    owners = numpy.empty(len(label_of), dtype=numpy.int64)
    for label in range(int(label_of.max()) + 1 if len(label_of) else 0):
        random = numpy_generator(seed, label)
        rows = numpy.flatnonzero(label_of == label)
        random.shuffle(rows)
        ends = numpy.cumsum(_dirichlet(num_clients, concentration, random))
        # Row k of n goes to the client whose share of the unit interval holds the middle of [k, k + 1] / n.
        middles = (numpy.arange(len(rows)) + 0.5) / max(1, len(rows)) * ends[-1]
        owners[rows] = numpy.searchsorted(ends, middles, side="right")
    return _partition_by_owner(torch.from_numpy(owners), num_clients)


def _dirichlet(size: int, concentration: float, random: numpy.random.Generator) -> NDArray[Any]:
    """Draw shares up to a common factor, in logarithms, since gammas of a small concentration underflow."""
    # If G ~ Gamma(a + 1) and U is uniform, then G·U^(1/a) ~ Gamma(a).
    logs = numpy.log(random.gamma(concentration + 1, size=size)) + numpy.log1p(-random.random(size)) / concentration
    return numpy.asarray(numpy.exp(logs - logs.max()))


def _partition_by_owner(owners: Tensor, num_clients: int) -> Partition:
    offsets = offsets_of(torch.bincount(owners, minlength=num_clients))
    return Partition(offsets, torch.argsort(owners, stable=True))


def hold_out(interactions: Interactions, share: float, seed: int = 0) -> tuple[Interactions, Interactions]:
    """Split every user's interactions at random into those kept (at least one) and those held out."""
    _check_share(share)
    users, counts = interactions.users, interactions.counts_by_user
    chance = torch.rand(len(interactions), generator=generator(seed, 2), dtype=torch.float64)
    # Users stay in order and each user's interactions are in random order, since chance < 1.
    order = (users.double() + chance).argsort()
    place = torch.arange(len(interactions)) - interactions.offsets[users]
    wanted = torch.minimum((counts * share).round().long(), (counts - 1).clamp(min=0))
    held = torch.zeros(len(interactions), dtype=torch.bool)
    held[order] = place < wanted[users]
    return interactions.where(~held), interactions.where(held)


def hold_out_images(data: ImageDataset, share: float, seed: int = 0) -> ImageDataset:
    """Put a random share of the training images in the place of the test set."""
    _check_share(share)
    order = torch.randperm(len(data.train), generator=generator(seed, 2))
    num_held = round(share * len(data.train))
    train = data.train.at(order[num_held:].sort().values)
    return replace(data, train=train, test=data.train.at(order[:num_held].sort().values))


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise InvalidSettings(f"share = {share}", "between 0 and 1", "Hold out 0.1, for example.")
