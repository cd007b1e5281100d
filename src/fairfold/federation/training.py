"""Local training by gradient steps: its settings, a client's samples of a round, losses, and the optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from fairfold.config.tables import FrozenSettings, ImageData
from fairfold.data import Interactions
from fairfold.data.images import ImageDataset
from fairfold.data.partition import Partition
from fairfold.data.sampling import NegativeSampler
from fairfold.errors import InvalidSettings
from fairfold.federation.architecture import ImageArchitecture
from fairfold.federation.plan import Plan
from fairfold.models import sampled_bpr, sampled_softmax, sampled_squares
from fairfold.typing import Weights


class LocalSgd(FrozenSettings):
    """Settings of a client's gradient steps.

    Attributes:
        local_epochs: E, passes over the client's samples per round.
        batch_size: Samples per step.
        shuffle: New order of the samples every epoch.
        local_optimizer: ``"sgd"``, ``"adagrad"`` or ``"adam"``, fresh every round.
        local_lr: Its learning rate.
    """

    local_epochs: int = Field(1, ge=1, lt=2**31)
    batch_size: int = Field(512, ge=1, lt=2**31)
    shuffle: bool = True
    local_optimizer: Literal["sgd", "adagrad", "adam"] = "sgd"
    local_lr: float = Field(1.0, gt=0)

    @property
    def proximal_weight(self) -> float:
        """μ of FedProx; 0 for no proximal term."""
        return 0.0


class RankingSgd(LocalSgd):
    """Settings of gradient steps of recommenders.

    Attributes:
        objective: The loss of rankings: ``"bpr"`` (an item of the user scores above each negative), ``"softmax"`` (it
            is the one to choose among them) or ``"squared"`` (squared error over the whole catalogue, of which the
            negatives are a sample); docs/default-recommender.md.
        num_negatives: Items that the user does not have, drawn for each one they have.
        l2: Weight of the squared norm of the vectors a sample uses (rankings).
        unobserved_weight: Weight of an item that the user does not have, against 1 for one they have (``"squared"``).
        RANKING_KEYS: Keys that are inactive where ratings are predicted.
    """

    ACTIVE_WHEN: ClassVar = {"unobserved_weight": ("objective", ("squared",))}
    RANKING_KEYS: ClassVar = ("objective", "num_negatives", "l2", "unobserved_weight")  # inactive for ratings

    objective: Literal["bpr", "softmax", "squared"] = "bpr"
    num_negatives: int = Field(1, ge=1, lt=2**31)
    l2: float = Field(1e-6, ge=0)
    unobserved_weight: float = Field(0.5, gt=0, le=1)


@dataclass(frozen=True)
class Batch:
    """Training samples of one step."""

    items: Tensor  # int64 [samples, width]: the item of each sample, and behind it its negatives
    targets: Tensor | None = None  # float [samples]: ratings; for the squared error of rankings weights of negatives
    users: Tensor | None = None  # int64 [samples], the user of each; None where all are of one client

    def __len__(self) -> int:
        return len(self.items)

    def part(self, start: int, stop: int) -> "Batch":
        """A part of the batch: the samples [start, stop)."""
        chosen = slice(start, stop)
        targets = None if self.targets is None else self.targets[chosen]
        return Batch(self.items[chosen], targets, None if self.users is None else self.users[chosen])


@dataclass(frozen=True)
class RoundSamples(Batch):
    """All samples of a client's round, epoch after epoch; ``ends`` is where those of each step end."""

    ends: Sequence[int] = ()

    def batches(self) -> list[Batch]:
        """The samples of each step."""
        return [self.part(start, end) for start, end in pairwise([0, *self.ends])]


class RankingTraining:
    """Samples and losses of a recommender, which predicts ``ratings`` or else ranks, on users' interactions."""

    def __init__(self, plan: Plan, train: Interactions) -> None:
        algorithm: object = plan.algorithm
        assert isinstance(algorithm, RankingSgd)
        self.steps = algorithm
        self.prox, self.objective = algorithm.proximal_weight, algorithm.objective
        self.train = train
        self.num_items, self.architecture = train.num_items, plan.architecture
        self.tables, self.dense = plan.architecture.tables, plan.architecture.dense
        self.user_vectors, self.user_tables = plan.architecture.user_vectors, plan.architecture.user_tables
        self.form, self.ratings = plan.architecture.form, plan.settings.predicts_ratings
        self.has_targets = self.ratings or self.objective == "squared"
        held = [one.projections for one in plan.assignments(0) if one.projections is not None]
        # Whether some clients hold tables as products of two factors
        self.products = any(not one[name].linear for one in held for name in self.tables)
        if self.ratings and train.ratings is None:
            given = f"model.kind={plan.settings.model.kind!r} on data without ratings"
            raise InvalidSettings(given, "ratings", "Use 'mf' or 'neumf'.")
        self._negatives = None if self.ratings else NegativeSampler(train)

    def draw(self, generator: torch.Generator, order: Tensor, chance: Tensor | None) -> None:
        """Draw a client's round in place: the interaction of each sample, and a number of [0, 1) per negative."""
        count = len(order) // self.steps.local_epochs
        for epoch in order.view(self.steps.local_epochs, count):
            if self.steps.shuffle:
                torch.randperm(count, generator=generator, out=epoch)
            else:
                torch.arange(count, out=epoch)
        if chance is not None:  # negatives do not depend on their positive, nor on its order
            chance.uniform_(generator=generator)

    def round_samples(self, client: int, generator: torch.Generator) -> RoundSamples:
        """Draw all samples of a client's round: items with their negatives, and targets."""
        own_items = self.train.of(client)
        count = len(own_items)
        order = torch.empty(self.steps.local_epochs * count, dtype=torch.int64)
        chance = None if self.ratings else torch.empty(len(order), self.steps.num_negatives, dtype=torch.float64)
        self.draw(generator, order, chance)
        items = own_items[order, None]
        if self._negatives is not None and chance is not None:
            items = torch.cat([items, self._negatives.of_user(client, chance)], dim=1)
        targets = self.train.ratings_of(client)[order] if self.ratings else None
        if targets is None and self.has_targets:
            targets = self.negative_weights(torch.tensor([count])).expand(len(order))
        size = self.steps.batch_size
        stops = [min(stop, count) for stop in range(size, count + size, size)]
        ends = [epoch * count + stop for epoch in range(self.steps.local_epochs) for stop in stops]
        return RoundSamples(items, targets, ends=ends)

    def negative_weights(self, counts: Tensor) -> Tensor:
        """Weight of a negative of users with so many items: see :func:`fairfold.models.recommender.sampled_squares`."""
        others = self.num_items - counts
        return self.steps.unobserved_weight * others / (counts.clamp(min=1) * self.steps.num_negatives)

    def batches(self, client: int, generator: torch.Generator) -> list[Batch]:
        """All batches of a client's round, epoch after epoch."""
        return self.round_samples(client, generator).batches()

    def everything(self, generator: torch.Generator, size: int) -> Iterator[Batch]:
        """All clients' samples as if in one place, the epochs of a round, in batches of at most ``size``."""
        train = self.train
        epochs = []
        for _ in range(self.steps.local_epochs):
            count = len(train)
            order = torch.randperm(count, generator=generator) if self.steps.shuffle else torch.arange(count)
            users, items = train.users[order], train.items[order, None]
            targets = None if train.ratings is None else train.ratings[order]
            if self._negatives is not None:
                targets = self.negative_weights(train.counts_by_user)[users] if self.has_targets else None
                owners = users[:, None].expand(-1, self.steps.num_negatives)
                items = torch.cat([items, self._negatives.draw(owners, generator)], dim=1)
            epochs.append(Batch(items, targets, users))
        return (epoch.part(start, start + size) for epoch in epochs for start in range(0, len(epoch), size))

    def losses(self, batch: Batch, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
        """The loss of every sample of a batch; arguments as for :meth:`sample_losses`."""
        return self.sample_losses(dense, users, items, batch.targets)

    def sample_losses(
        self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor], targets: Tensor | None
    ) -> Tensor:
        """The loss of every sample by one user's vectors, each [length], and table rows, [samples, width, length]."""
        losses = self.unregularized_losses(dense, users, items, targets)
        if not self.ratings and self.steps.l2:
            norms = sum(rows.square().sum((1, 2)) for rows in items) + sum(vector.square().sum() for vector in users)
            losses = losses + 0.5 * self.steps.l2 * norms
        return losses

    def unregularized_losses(
        self, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor], targets: Tensor | None
    ) -> Tensor:
        """The loss of every sample without the L2 term, whose gradient is known: its weight times the vectors."""
        wide = tuple(vector.expand(*items[0].shape[:2], -1) for vector in users)
        scores = self.architecture.scores(dense, wide, items)
        if targets is not None:
            return (scores[:, 0] - targets).square() if self.ratings else sampled_squares(scores, targets)
        return (sampled_softmax if self.objective == "softmax" else sampled_bpr)(scores)


class ImageTraining:
    """Samples and losses of a network on the images of each client."""

    ratings = has_targets = False

    def __init__(self, plan: Plan, images: ImageDataset, partition: Partition) -> None:
        algorithm: object = plan.algorithm
        assert isinstance(plan.architecture, ImageArchitecture)
        assert isinstance(algorithm, LocalSgd)
        self.steps, self.images, self.partition = algorithm, images, partition
        self.seen, self.architecture = plan.settings.data, plan.architecture
        self.tables, self.dense = plan.architecture.tables, plan.architecture.dense
        self.user_vectors, self.user_tables = plan.architecture.user_vectors, plan.architecture.user_tables

    def batches(self, client: int, generator: torch.Generator) -> list[Batch]:
        """All batches of a client's round, epoch after epoch: indices of images, and their labels."""
        orders = self.orders(client, generator)
        parts = [part for order in orders for part in torch.split(order, self.steps.batch_size)]
        return [Batch(part, self.images.train.labels[part]) for part in parts]

    def orders(self, client: int, generator: torch.Generator) -> list[Tensor]:
        """A client's images in the order of each epoch."""
        rows = self.partition.of(client)
        if not self.steps.shuffle:
            return [rows] * self.steps.local_epochs
        return [rows[torch.randperm(len(rows), generator=generator)] for _ in range(self.steps.local_epochs)]

    def losses(self, batch: Batch, dense: Weights, users: Sequence[Tensor], items: Sequence[Tensor]) -> Tensor:
        """The cross-entropy of every image of a batch."""
        assert batch.targets is not None
        weights = self.architecture.in_shape(dense)
        logits: Tensor = functional_call(self.architecture.network, weights, (self.pixels(batch.items),))
        return functional.cross_entropy(logits, batch.targets, reduction="none")

    def pixels(self, rows: Tensor) -> Tensor:
        """Training images as the network's input."""
        return as_input(self.images.train.images[rows], self.seen)


def as_input(images: Tensor, seen: object) -> Tensor:
    """Normalize gray values: to [0, 1], minus the data settings' mean, over their deviation."""
    assert isinstance(seen, ImageData)
    return images.to(torch.get_default_dtype()).div_(255).sub_(seen.mean).div_(seen.deviation)


class LocalOptimizer:
    """An optimizer of many clients' numbers, in place, fresh or after ``done`` steps; finished clients stand last."""

    def __init__(
        self, values: Tensor, steps: LocalSgd, moments: Mapping[str, Tensor] | None = None, done: int = 0
    ) -> None:
        self._kind, self._lr = steps.local_optimizer, steps.local_lr
        self._values = values
        names = {"sgd": (), "adagrad": ("square",), "adam": ("mean", "square")}[self._kind]
        self.moments = {name: (moments or {}).get(name, torch.zeros_like(values)).clone() for name in names}
        self._count = torch.full((), float(done), device=values.device)

    @torch.no_grad()
    def step(self, gradient: Tensor, active: int) -> None:
        """Take one step on the first ``active`` numbers."""
        self._count += 1
        values, slope = self._values[:active], gradient[:active]
        moments = [moment[:active] for moment in self.moments.values()]
        if self._kind == "sgd":
            values.add_(slope, alpha=-self._lr)
        elif self._kind == "adagrad":
            moments[0].addcmul_(slope, slope)
            values.addcdiv_(slope, moments[0].sqrt().add_(1e-10), value=-self._lr)
        else:
            torch._fused_adam_(  # what torch.optim.Adam(fused=True) calls, here on a part of a vector
                [values],
                [slope],
                [moments[0]],
                [moments[1]],
                [],
                [self._count],
                lr=self._lr,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
