"""Who holds what: the rows of a data set divided among clients, in memory proportional to the rows."""

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairfold.data.interactions import Interactions, offsets_of
from fairfold.data.seeds import numpy_generator
from fairfold.errors import InvalidData


@dataclass(frozen=True)
class Clients:
    """Rows of a data set, one client's after another; no object is made per client.

    Attributes:
        offsets: int64 [clients + 1]; client c holds the rows ``offsets[c]`` to ``offsets[c + 1]``.
        rows: int64 [rows], the row numbers in the data set; None where they are 0, 1, 2, … in order.
    """

    offsets: Tensor
    rows: Tensor | None = None

    def __len__(self) -> int:
        return int(self.offsets.numel()) - 1

    @property
    def counts(self) -> Tensor:
        """How many rows each client holds."""
        return self.offsets[1:] - self.offsets[:-1]

    def of(self, client: int) -> Tensor:
        """The rows of one client."""
        start, stop = int(self.offsets[client]), int(self.offsets[client + 1])
        return torch.arange(start, stop) if self.rows is None else self.rows[start:stop]

    def without_empty(self) -> "Clients":
        """The clients that hold something, renumbered."""
        kept = self.counts > 0
        return Clients(torch.cat([self.offsets[:1], self.offsets[1:][kept]]), self.rows)


def by_user(interactions: Interactions) -> Clients:
    """One client per user. Interactions are grouped by user already, so nothing is copied.

    Example:
        >>> from fairfold.data.synthetic import SyntheticWorld
        >>> len(by_user(SyntheticWorld(users=20, items=50, interactions_per_user=10).dataset().train))
        20
    """
    return Clients(interactions.offsets)


def by_writer(writers: Tensor) -> Clients:
    """One client per writer of images, given the writer of every image, in the writers' order.

    Example:
        >>> by_writer(torch.tensor([0, 0, 1, 2, 1])).of(1)
        tensor([2, 4])
    """
    if int(writers.min()) < 0:
        raise InvalidData(f"the writer {int(writers.min())}", "numbers from 0 on", "Number the writers densely.")
    return _grouped(writers, int(writers.max()) + 1)


def by_label(labels: Tensor, num_clients: int, concentration: float, seed: int = 0) -> Clients:
    """Divide every label's rows among the clients in shares drawn from a Dirichlet distribution.

    Args:
        labels: The label of every row, dense.
        num_clients: Number of clients; some hold nothing when there are many.
        concentration: Parameter of the symmetric Dirichlet distribution. Small values give every client few labels,
            large ones give all clients the same mixture.
        seed: Seed of the shares and of the order of the rows.

    Example:
        >>> clients = by_label(torch.arange(100) % 10, 5, concentration=0.5)
        >>> len(clients), sum(len(clients.of(client)) for client in range(5))
        (5, 100)
    """
    if num_clients < 1 or not concentration > 0:
        given = f"{num_clients} clients with concentration {concentration}"
        raise InvalidData(
            given, "at least one client and a concentration above 0", "Change num_clients or concentration."
        )
    known = labels.numpy()
    owners = numpy.empty(len(known), dtype=numpy.int64)
    for label in range(int(known.max()) + 1 if len(known) else 0):
        random = numpy_generator(seed, label)
        rows = numpy.flatnonzero(known == label)
        random.shuffle(rows)
        ends = numpy.cumsum(_dirichlet(num_clients, concentration, random))
        # Row k of n goes to the client whose share of the unit interval holds the middle of [k, k + 1] / n.
        middles = (numpy.arange(len(rows)) + 0.5) / max(1, len(rows)) * ends[-1]
        owners[rows] = numpy.searchsorted(ends, middles, side="right")
    return _grouped(torch.from_numpy(owners), num_clients)


def _dirichlet(size: int, concentration: float, random: numpy.random.Generator) -> NDArray[Any]:
    """Shares up to a common factor: gammas in the logarithm, since with a small concentration they all underflow."""
    # If G ~ Gamma(a + 1) and U is uniform, then G·U^(1/a) ~ Gamma(a).
    logs = numpy.log(random.gamma(concentration + 1, size=size)) + numpy.log1p(-random.random(size)) / concentration
    return numpy.asarray(numpy.exp(logs - logs.max()))


def _grouped(owners: Tensor, num_clients: int) -> Clients:

    offsets = offsets_of(torch.bincount(owners, minlength=num_clients))
    return Clients(offsets, torch.argsort(owners, stable=True))
