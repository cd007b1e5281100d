"""What gradient steps are taken on: a client's samples of a round, and the loss of a sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from fairfold.data import Interactions
from fairfold.data.clients import Clients
from fairfold.data.images import ImageDataset
from fairfold.data.negatives import NegativeSampler
from fairfold.errors import InvalidSettings
from fairfold.models import sampled_bpr, sampled_softmax, sampled_squares
from fairfold.protocol.architecture import ImageArchitecture
from fairfold.protocol.plan import Plan
from fairfold.protocol.steps import RankingSteps, Steps
from fairfold.settings.parts import ImageData
from fairfold.values import Weights


@dataclass(frozen=True)
class Batch:
    """Some samples.

    Attributes:
        items: int64 [samples, width]: the item of each sample, and behind it the negatives drawn for it.
        targets: float [samples], the number that goes with each: what is to be predicted; for the squared error of
            rankings what each of its negatives counts. None for other rankings.
        users: int64 [samples], whose each is; None where all are of one client.
    """

    items: Tensor
    targets: Tensor | None = None
    users: Tensor | None = None

    def __len__(self) -> int:
        return len(self.items)

    def part(self, start: int, stop: int) -> "Batch":
        """Some of them."""
        chosen = slice(start, stop)
        targets = None if self.targets is None else self.targets[chosen]
        return Batch(self.items[chosen], targets, None if self.users is None else self.users[chosen])


@dataclass(frozen=True)
class RoundSamples(Batch):
    """All samples of a client's round, epoch after epoch; ``ends`` is where those of each step end."""

    ends: Sequence[int] = ()

    def batches(self) -> list[Batch]:
        """Step by step."""
        return [self.part(start, end) for start, end in pairwise([0, *self.ends])]


class Work:
    """One recommender, some users' interactions, and how devices take their steps: the algorithm.

    Attributes:
        ratings: Whether ratings are predicted; else items are ranked.
        has_targets: Whether a number goes with each sample; see :class:`Batch`.
        products: Whether some devices hold tables as products of two factors.
    """

    def __init__(self, plan: Plan, train: Interactions) -> None:
        algorithm: object = plan.algorithm
        assert isinstance(algorithm, RankingSteps)
        self.architecture, self.train, self.steps = plan.architecture, train, algorithm
        self.prox: float = getattr(plan.algorithm, "prox", 0.0)
        self.tables, self.dense = self.architecture.tables, self.architecture.dense
        self.own, self.user_tables = self.architecture.own, self.architecture.user_tables
        self.form, self.num_items = self.architecture.form, train.num_items
        self.ratings = plan.algorithm.predicts_ratings(plan.settings)
        self.objective = self.steps.objective
        held = [one.projections for one in plan.assignments(0) if one.projections is not None]
        self.products = any(not of[name].linear for of in held for name in self.tables)
        self.has_targets = self.ratings or self.objective == "squared"
        if self.ratings and train.ratings is None:
            raise InvalidSettings(
                f"model.kind={plan.settings.model.kind!r} on data without ratings", "ratings", "Use 'mf' or 'neumf'."
            )
        self._negatives = None if self.ratings else NegativeSampler(train)

    def draw(self, generator: torch.Generator, order: Tensor, chance: Tensor | None) -> None:
        """Draw all that chance decides of a client's round.

        ``order`` becomes which of its interactions each sample is, int64 [samples], epoch after epoch; ``chance`` a
        number of [0, 1) for every negative, float64 [samples, negatives], None for ratings.
        """
        count = len(order) // self.steps.local_epochs
        for epoch in order.view(self.steps.local_epochs, count):
            if self.steps.shuffle:
                torch.randperm(count, generator=generator, out=epoch)
            else:
                torch.arange(count, out=epoch)
        if chance is not None:  # negatives are independent of their positive, so in no need of its order
            chance.uniform_(generator=generator)

    def local(self, client: int, generator: torch.Generator) -> RoundSamples:
        """What a client trains on in a round."""
        train, size, epochs = self.train, self.steps.batch_size, self.steps.local_epochs
        mine = train.of(client)
        count = len(mine)
        order = torch.empty(epochs * count, dtype=torch.int64)
        chance = None if self.ratings else torch.empty(len(order), self.steps.negatives, dtype=torch.float64)
        self.draw(generator, order, chance)
        items = mine[order, None]
        if self._negatives is not None and chance is not None:
            items = torch.cat([items, self._negatives.of_user(client, chance)], dim=1)
        targets = train.ratings_of(client)[order] if self.ratings else None
        if targets is None and self.has_targets:
            targets = self.negative_weights(torch.tensor([count])).expand(len(order))
        stops = [min(stop, count) for stop in range(size, count + size, size)]
        ends = [epoch * count + stop for epoch in range(epochs) for stop in stops]
        return RoundSamples(items, targets, ends=ends)

    def negative_weights(self, counts: Tensor) -> Tensor:
        """What a negative of users with so many items counts: see :func:`fairfold.models.losses.sampled_squares`."""
        others = self.num_items - counts
        weight: float = self.steps.unobserved_weight
        return weight * others / (counts.clamp(min=1) * self.steps.negatives)

    def batches(self, client: int, generator: torch.Generator) -> list[Batch]:
        """All batches of a client's round, epoch after epoch."""
        return self.local(client, generator).batches()

    def losses(self, batch: Batch, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
        """The loss of every sample of a batch; arguments as for :meth:`sample_losses`."""
        return self.sample_losses(dense, users, items, batch.targets)

    def everything(self, generator: torch.Generator, size: int) -> Iterator[Batch]:
        """All clients' samples as if they were in one place, a round's epochs, in batches of at most ``size``."""
        train = self.train
        epochs = []
        for _ in range(self.steps.local_epochs):
            order = torch.arange(len(train))
            if self.steps.shuffle:
                order = torch.randperm(len(train), generator=generator)
            users, items = train.users[order], train.items[order, None]
            targets = None if train.ratings is None else train.ratings[order]
            if self._negatives is not None:
                targets = self.negative_weights(train.counts_by_user)[users] if self.has_targets else None
                owners = users[:, None].expand(-1, self.steps.negatives)
                items = torch.cat([items, self._negatives.draw(owners, generator)], dim=1)
            epochs.append(Batch(items, targets, users))
        return (epoch.part(start, start + size) for epoch in epochs for start in range(0, len(epoch), size))

    def sample_losses(
        self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor], targets: Tensor | None
    ) -> Tensor:
        """The loss of every sample of a batch, by the dense weights and ``targets`` (:class:`Batch`).

        ``users`` are the user's own vectors, each [length]; ``items`` rows of every table, [samples, width, length].
        """
        losses = self.unpenalised_losses(dense, users, items, targets)
        if not self.ratings and self.steps.regulariser:
            norms = sum(rows.square().sum((1, 2)) for rows in items) + sum(vector.square().sum() for vector in users)
            losses = losses + 0.5 * self.steps.regulariser * norms
        return losses

    def unpenalised_losses(
        self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor], targets: Tensor | None
    ) -> Tensor:
        """The same without the regulariser, whose gradient is known: its weight times the vectors a sample uses."""
        wide = tuple(vector.expand(*items[0].shape[:2], -1) for vector in users)
        scores = self.architecture.scores(dense, wide, items)
        if targets is not None:
            return (scores[:, 0] - targets).square() if self.ratings else sampled_squares(scores, targets)
        return (sampled_softmax if self.objective == "softmax" else sampled_bpr)(scores)


class ImageWork:
    """One network, the images, which of them each device holds, and how devices take their steps: the algorithm."""

    ratings = has_targets = False

    def __init__(self, plan: Plan, images: ImageDataset, clients: Clients) -> None:
        algorithm: object = plan.algorithm
        assert isinstance(plan.architecture, ImageArchitecture)
        assert isinstance(algorithm, Steps)
        self.architecture, self.images, self.clients = plan.architecture, images, clients
        self.steps, self.seen = algorithm, plan.settings.data
        self.tables, self.dense = self.architecture.tables, self.architecture.dense
        self.own, self.user_tables = self.architecture.own, self.architecture.user_tables

    def batches(self, client: int, generator: torch.Generator) -> list[Batch]:
        """All batches of a device's round, epoch after epoch: numbers of images, and their labels."""
        return [
            Batch(part, self.images.train.labels[part])
            for order in self.orders(client, generator)
            for part in torch.split(order, self.steps.batch_size)
        ]

    def orders(self, client: int, generator: torch.Generator) -> list[Tensor]:
        """A device's images in the order in which each epoch takes them."""
        rows = self.clients.of(client)
        if not self.steps.shuffle:
            return [rows] * self.steps.local_epochs
        return [rows[torch.randperm(len(rows), generator=generator)] for _ in range(self.steps.local_epochs)]

    def losses(self, batch: Batch, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
        """The cross-entropy of every image of a batch."""
        assert batch.targets is not None
        weights, pixels = self.architecture.in_shape(dense), self.pixels(batch.items)
        logits: Tensor = functional_call(self.architecture.network, weights, (pixels,))
        return functional.cross_entropy(logits, batch.targets, reduction="none")

    def pixels(self, rows: Tensor) -> Tensor:
        """Training images as the network takes them."""
        return as_input(self.images.train.images[rows], self.seen)


def as_input(images: Tensor, seen: object) -> Tensor:
    """Grey values as a network takes them, by the settings of the data: 0 to 1, less the mean, over the deviation."""
    assert isinstance(seen, ImageData)
    return images.to(torch.get_default_dtype()).div_(255).sub_(seen.mean).div_(seen.deviation)
