"""What devices train: a model's tensors as the federation sees them, each client's samples, the loss of a sample.

A model's tensors are of three kinds. *Tables* have a row an item; a device looks rows up. *Dense* tensors are used
whole. A user's *own* vectors belong to one client; they stay on the device, or are rows of tables that are sent along.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fairfold.data import Dataset
from fairfold.data.negatives import NegativeSampler, draw_chances
from fairfold.errors import InvalidSettings
from fairfold.federation.outline import outline
from fairfold.federation.settings import Settings
from fairfold.federation.storage import Storage, tables_placed
from fairfold.kernels.form import Form
from fairfold.models import MF, NeuMF, NeuMFMLP, Recommender, sampled_softmax, sampled_squares
from fairfold.models.recommender import make_named
from fairfold.subspace import Capacity

SMALLEST_COMPRESSED = 64
"""Tensors of fewer numbers are held whole: compressing them saves nothing."""

BYTES = 4
"""Of a number."""

ITEM_BIAS = "item_bias.weight"
"""Name of the table of one column that ``item_bias`` asks for: no device holds it compressed."""

GRAM = "gram"
"""Name of the d × d matrix of federated least squares: a device receives that of the items (for ratings that of the
users), adds that of its user."""

CENTRE = "centre"
"""Name of three numbers: mean and spread of all ratings, summed with the counts of items before the first round, and
how many ratings have been spoken of."""

SAID = "said"
"""Name of what a device last said of each of its items, a row a rating: it stays there, and changes are sent."""

CAUGHT = "caught"
"""Name of the full rows of its own items that a device has kept, a row a rating, and whether one has come."""

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Batch:
    """Some samples of one client.

    Attributes:
        items: int64 [samples, width]: the item of each sample, and behind it the negatives drawn for it.
        targets: float [samples], the number that goes with each: what is to be predicted; for the squared error of
            rankings what each of its negatives counts. None for other rankings.
    """

    items: Tensor
    targets: Tensor | None = None

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class LocalData:
    """All samples of a client's round, epoch after epoch.

    Attributes:
        items: See :class:`Batch`.
        targets: See :class:`Batch`.
        ends: Where the samples of each step end; none without samples.
    """

    items: Tensor
    targets: Tensor | None
    ends: list[int]

    def batches(self) -> list[Batch]:
        """Step by step."""
        steps = [slice(start, end) for start, end in pairwise([0, *self.ends])]
        return [Batch(self.items[step], None if self.targets is None else self.targets[step]) for step in steps]


@dataclass(frozen=True)
class CentralData:
    """Samples of all clients: as :class:`LocalData`, and whose each is.

    Attributes:
        users: int64 [samples].
        items: See :class:`Batch`.
        targets: See :class:`Batch`.
        epoch: Samples in an epoch; no step goes beyond its end.
    """

    users: Tensor
    items: Tensor
    targets: Tensor | None
    epoch: int

    def parts(self, size: int) -> "Iterator[CentralData]":
        """In steps of at most ``size`` samples."""
        for first in range(0, len(self.users), self.epoch):
            for start in range(first, first + self.epoch, size):
                part = slice(start, min(start + size, first + self.epoch))
                targets = None if self.targets is None else self.targets[part]
                yield CentralData(self.users[part], self.items[part], targets, self.epoch)


class _Combine(nn.Module):
    """A model's part behind the lookups, in a form that can be called with other weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, users: tuple[Tensor, ...], items: tuple[Tensor, ...]) -> Tensor:
        scores: Tensor = self.model.combine(users, items)  # type: ignore[operator]
        return scores


class Task:
    """One model and one data set, as a federation of users.

    Attributes:
        tables: Name and shape of every item table.
        dense: Name and shape of every other tensor that is averaged.
        user_tables: Name and shape of the users' tables where these are sent and averaged; else empty.
        own: Name and length of every vector a user has.
        num_clients: One a user.
        form: What the model's scores are made of, for training in one call; None for other models.
        has_targets: Whether a number goes with each sample; see :class:`Batch`.
    """

    form: Form | None = None

    def __init__(self, data: Dataset, settings: Settings) -> None:
        self.data = data
        self.settings = settings
        self.num_clients = data.num_users
        self.ratings = settings.predicts_ratings
        self.has_targets = self.ratings or settings.objective == "squared"
        if self.ratings and data.train.ratings is None:
            raise InvalidSettings(
                f"model={settings.model!r} on {data.name!r}, which has no ratings", "ratings", "Use 'mf' or 'neumf'."
            )
        with outline():  # the architecture alone: its tensors are never made on a device
            model = _make(data, settings)
        # No dropout: all that chance decides of a round comes from its seed.
        self._combine, self.form = _Combine(model).eval(), model.form
        shapes = {name: tuple(tensor.shape) for name, tensor in self._combine.model.named_parameters()}
        self.own = {name: shape[1] for name, shape in shapes.items() if is_table(name, "user")}
        self.tables = {name: shape for name, shape in shapes.items() if is_table(name, "item")}
        self.dense = {name: shape for name, shape in shapes.items() if name not in self.own and name not in self.tables}
        sent = settings.user_vectors == "uploaded"
        self.user_tables = {name: shapes[name] for name in self.own} if sent else {}
        if settings.solver == "least_squares":
            self.dense |= ({CENTRE: (3,)} if self.ratings else {}) | {GRAM: (settings.factors, settings.factors)}
        self._negatives = None if self.ratings else NegativeSampler(data.train, settings.negatives)

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """Tensors before training: those of the server, flat, and those of the users, a row each.

        Args:
            generator: Of the numbers.
            storage: Where the users' are kept; in memory if not given.
        """
        chosen = int(torch.randint(2**62, (), generator=generator))
        placed = nullcontext() if storage is None else tables_placed(storage, self.num_clients)
        with torch.random.fork_rng(devices=[]), placed:
            torch.manual_seed(chosen)
            model = _make(self.data, self.settings)
        everything = {name: tensor.detach() for name, tensor in model.named_parameters()}
        if self.settings.solver == "least_squares":  # before a user's first word the sums hold nothing of theirs
            everything |= {name: torch.zeros(shape) for name, shape in self.dense.items()}
            for name in self.own:
                everything[name].zero_()
        # A copy where there are as many items as users, and an item table has been placed as well.
        in_memory = storage is None or self.data.num_items != self.num_clients
        shared = {name: everything[name].reshape(-1) for name in self.shapes}
        shared = shared if in_memory else {name: tensor.clone() for name, tensor in shared.items()}
        own = {} if self.user_tables else {name: everything[name] for name in self.own}
        return shared, own | {name: torch.zeros(shape) for name, shape in self.remembered.items()}

    @property
    def remembered(self) -> Shapes:
        """Name and shape of what devices keep of each of their samples, all devices' together."""
        if not self.ratings or self.settings.solver != "least_squares":
            return {}
        names = [SAID, CAUGHT] if self.settings.streamed else [SAID]
        return dict.fromkeys(names, (len(self.data.train), self.settings.factors + 1))

    def rows_of(self, name: str, client: int) -> int | slice:
        """Which rows of a private tensor are a client's: its vector, or one row a sample."""
        if name not in self.remembered:
            return client
        return slice(int(self.data.train.offsets[client]), int(self.data.train.offsets[client + 1]))

    @property
    def reads(self) -> dict[str, tuple[str, int]]:
        """Dense tensors whose columns, from a first one on, read the columns of an item table."""
        form, tables, dense = self.form, list(self.tables), list(self.dense)
        if form is None or not form.output:
            return {}
        found = {}
        if form.layers:
            found[dense[0]] = (tables[-1], form.user)
        if form.product:
            found[dense[-2]] = (tables[0], 0)
        return found

    @property
    def shapes(self) -> Shapes:
        """Name and shape of everything the server holds."""
        return self.tables | self.dense | self.user_tables

    @property
    def compressed(self) -> Shapes:
        """What a device holds compressed: item tables, or everything but biases and other small tensors."""
        found = self.tables
        if self.settings.compress != "tables":
            found = {name: shape for name, shape in self.shapes.items() if prod(shape) >= SMALLEST_COMPRESSED}
        if self.settings.item_bias:
            found = {name: shape for name, shape in found.items() if name != ITEM_BIAS}
        return found

    def left(self, capacity: Capacity) -> Capacity:
        """What a capacity leaves to the compressed tensors: a budget in bytes has to hold the items' bias as well."""
        return capacity.beside(BYTES * self.data.num_items if self.settings.item_bias else 0)

    def samples(self, client: int) -> int:
        """How much data a client has."""
        span = self.data.train.span(client)
        return span.stop - span.start

    def draw(self, client: int, generator: torch.Generator, order: Tensor, chance: Tensor | None) -> None:
        """Draw all that chance decides of a client's round.

        Args:
            client: Its number.
            generator: Of the numbers.
            order: Becomes which of the client's interactions each sample is, int64 [samples], epoch after epoch.
            chance: Becomes a number of [0, 1) for every negative, float64 [samples, negatives]; None for ratings.
        """
        count = self.samples(client)
        for epoch in order.view(self.settings.local_epochs, count):
            if self.settings.shuffle:
                torch.randperm(count, generator=generator, out=epoch)
            else:
                torch.arange(count, out=epoch)
        if chance is not None:  # negatives are independent of their positive, so in no need of its order
            draw_chances(chance, generator)

    def local(self, client: int, generator: torch.Generator) -> LocalData:
        """What a client trains on in a round."""
        train, size, epochs = self.data.train, self.settings.batch_size, self.settings.local_epochs
        count = self.samples(client)
        order = torch.empty(epochs * count, dtype=torch.int64)
        chance = None if self.ratings else torch.empty(len(order), self.settings.negatives, dtype=torch.float64)
        self.draw(client, generator, order, chance)
        items = train.of(client)[order, None]
        if self._negatives is not None and chance is not None:
            items = torch.cat([items, self._negatives.of_user(client, chance)], dim=1)
        targets = train.ratings_of(client)[order] if self.ratings else None
        if targets is None and self.has_targets:
            targets = self.negative_weights(torch.tensor([count])).expand(len(order))
        stops = [min(stop, count) for stop in range(size, count + size, size)]
        return LocalData(items, targets, [epoch * count + stop for epoch in range(epochs) for stop in stops])

    def negative_weights(self, counts: Tensor) -> Tensor:
        """What a negative of users with so many items counts: see :func:`fairfold.models.losses.sampled_squares`."""
        others = self.data.num_items - counts
        return self.settings.unobserved_weight * others / (counts.clamp(min=1) * self.settings.negatives)

    def batches(self, client: int, generator: torch.Generator) -> list[Batch]:
        """All batches of a client's round, epoch after epoch."""
        return self.local(client, generator).batches()

    def losses(self, batch: Batch, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
        """The loss of every sample of a batch; arguments as for :meth:`sample_losses`."""
        return self.sample_losses(dense, users, items, batch.targets)

    def scores(self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
        """Scores of looked-up users with looked-up items; their shapes may broadcast."""
        weights = {f"model.{name}": weight.view(self.dense[name]) for name, weight in dense.items()}
        arguments: Any = (tuple(users), tuple(items))
        found: Tensor = functional_call(self._combine, weights, arguments)
        return found

    def everything(self, generator: torch.Generator) -> "CentralData":
        """All clients' samples as if they were in one place: a round's epochs, one after another."""
        settings, train = self.settings, self.data.train
        users, items, targets = [], [], []
        for _ in range(settings.local_epochs):
            order = torch.arange(len(train))
            if settings.shuffle:
                order = torch.randperm(len(train), generator=generator)
            wide = train.items[order, None]
            users.append(train.users[order])
            if self._negatives is None:
                assert train.ratings is not None
                targets.append(train.ratings[order])
            else:
                if self.has_targets:
                    targets.append(self.negative_weights(train.counts_by_user)[users[-1]])
                owners = users[-1][:, None].expand(-1, settings.negatives)
                wide = torch.cat([wide, self._negatives.draw(owners, generator)], dim=1)
            items.append(wide)
        return CentralData(torch.cat(users), torch.cat(items), torch.cat(targets) if targets else None, len(train))

    def sample_losses(
        self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor], targets: Tensor | None
    ) -> Tensor:
        """The loss of every sample of a batch.

        Args:
            dense: Weights of the dense tensors.
            users: The user's own vectors, each [length].
            items: For every table the rows of the batch, [samples, width, row length].
            targets: See :class:`Batch`.
        """
        losses = self.unpenalised_losses(dense, users, items, targets)
        if not self.ratings and self.settings.regulariser:
            norms = sum(rows.square().sum((1, 2)) for rows in items) + sum(vector.square().sum() for vector in users)
            losses = losses + 0.5 * self.settings.regulariser * norms
        return losses

    def unpenalised_losses(
        self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor], targets: Tensor | None
    ) -> Tensor:
        """The same without the regulariser, whose gradient is known: its weight times the vectors a sample uses."""
        scores = self.scores(dense, tuple(vector.expand(*items[0].shape[:2], -1) for vector in users), items)
        if targets is not None:
            return (scores[:, 0] - targets).square() if self.ratings else sampled_squares(scores, targets)
        if self.settings.objective == "softmax":
            return sampled_softmax(scores)
        return -functional.logsigmoid(scores[:, :1] - scores[:, 1:]).mean(1)

    def model_of(self, shared: Weights, own: Weights) -> nn.Module:
        """The whole model, for evaluation: the server's tensors (or a device's, recovered) and every user's vectors."""
        with outline():
            model = _make(self.data, self.settings)
        state = {name: tensor.view(self.shapes[name]) for name, tensor in shared.items()} | own
        model.load_state_dict(state, assign=True)
        return model


def is_table(name: str, side: str) -> bool:
    """Whether a tensor has a row a user, or a row an item."""
    return name.startswith(side) and name.endswith(".weight")


def _make(data: Dataset, settings: Settings) -> Recommender:
    users, items, factors = data.num_users, data.num_items, settings.factors
    if settings.own_model:
        return make_named(settings.model, users, items, factors)
    if settings.model in ("mf", "mf-ratings"):
        return MF(users, items, factors, spread=settings.initial_spread or 0.01, item_bias=settings.item_bias)
    if settings.model == "neumf":
        return NeuMF(users, items, factors)
    return NeuMFMLP(users, items, factors)
