"""Central training: all users' data in one place, the yardstick for every federation.

The optimiser is Adam over whole tables, in torch's fused form, so the numbers are those of plain Adam. Its cost a
step grows with the catalogue (16 ms for NeuMF on 359,014 items, two cores) and not with the batch; batches larger
than the paper's 512 are how an epoch becomes fast.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fairfold.data.interactions import Interactions
from fairfold.data.negatives import NegativeSampler
from fairfold.data.seeds import generator
from fairfold.errors import InvalidData, InvalidSettings, InvalidVector
from fairfold.models.losses import bpr_loss, squared_error
from fairfold.models.recommender import Recommender


@dataclass(frozen=True)
class CentralSettings:
    """How to train.

    Attributes:
        epochs: Passes over the training set.
        learning_rate: Of Adam.
        batch_size: Positives (or ratings) a step.
        negatives: Negatives drawn for each positive and epoch; for rankings only.
        regulariser: Weight of the embeddings' norm in the BPR loss; for rankings only.
        weight_decay: Adam's penalty on all weights; for ratings only.
        seed: Of shuffling and of the negatives.
    """

    epochs: int = 20
    learning_rate: float = 1e-3
    batch_size: int = 4096
    negatives: int = 1
    regulariser: float = 1e-6
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "negatives"):
            if getattr(self, name) < 1:
                raise InvalidSettings(f"{name} = {getattr(self, name)}", "at least 1", f"Raise {name}.")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidSettings(f"learning_rate = {self.learning_rate}", "a finite number above 0", "Try 0.001.")
        for name in ("regulariser", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidSettings(f"{name} = {value}", "a finite number, 0 or more", "Try 0.")
        if self.seed < 0:
            raise InvalidSettings(f"seed = {self.seed}", "0 or more", "Choose another seed.")


@dataclass(frozen=True)
class EpochReport:
    """What an epoch came to.

    Attributes:
        epoch: Its number, from 1.
        loss: Mean loss over its samples.
        seconds: Time its training took.
    """

    epoch: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Choice:
    """How long to train, chosen on held-out data.

    Attributes:
        epochs: The epoch with the best value.
        value: Its value.
        tried: How many epochs were looked at.
    """

    epochs: int
    value: float
    tried: int


def ignore(samples: int) -> None:
    """Do nothing after a step."""


def train_ranking(
    model: Recommender,
    train: Interactions,
    settings: CentralSettings,
    on_step: Callable[[int], None] = ignore,
) -> Iterator[EpochReport]:
    """Train on positives against fresh negatives with the BPR loss; yields after every epoch.

    Args:
        model: Trained in place, on the device it is on.
        train: The positives.
        settings: How to train.
        on_step: Told after every step how many positives it had.
    """
    sampler = NegativeSampler(train, settings.negatives, settings.seed)
    device = next(model.parameters()).device
    users, items = train.users.to(device), train.items.to(device)

    def epoch_loss(epoch: int) -> Callable[[Tensor], Tensor]:
        negatives = sampler.epoch(epoch).to(device)

        def loss(rows: Tensor) -> Tensor:
            owners = model.embed_users(users[rows, None])
            wanted, unwanted = model.embed_items(items[rows, None]), model.embed_items(negatives[rows])
            positive, negative = model.combine(owners, wanted), model.combine(owners, unwanted)
            used = (*owners, *wanted, *unwanted)
            return bpr_loss(positive, negative, used, settings.regulariser)

        return loss

    return _epochs(model, len(train), settings, 0.0, epoch_loss, on_step)


def train_ratings(
    model: Recommender,
    train: Interactions,
    settings: CentralSettings,
    on_step: Callable[[int], None] = ignore,
) -> Iterator[EpochReport]:
    """Train on ratings with the squared error; yields after every epoch. Arguments as for rankings."""
    if train.ratings is None:
        raise InvalidData("implicit interactions", "ratings", "Prepare the data with ratings kept.")
    device = next(model.parameters()).device
    users, items, ratings = train.users.to(device), train.items.to(device), train.ratings.to(device)

    def loss(rows: Tensor) -> Tensor:
        return squared_error(model(users[rows], items[rows]), ratings[rows])

    return _epochs(model, len(train), settings, settings.weight_decay, lambda _: loss, on_step)


def choose_epochs(
    epochs: Iterator[EpochReport],
    measure: Callable[[], float],
    patience: int,
    on_epoch: Callable[[EpochReport, float], None] | None = None,
) -> Choice:
    """Train until a measure on held-out data has not risen for ``patience`` epochs.

    Args:
        epochs: A training under way, as :func:`train_ranking` or :func:`train_ratings` returns it.
        measure: Value of the model as it now is; larger is better.
        patience: Epochs without a new best value after which training ends.
        on_epoch: Told of every epoch and its value.
    """
    if patience < 1:
        raise InvalidSettings(f"patience = {patience}", "at least 1", "Wait one epoch or more.")
    best = Choice(0, -math.inf, 0)
    for report in epochs:
        value = measure()
        if on_epoch is not None:
            on_epoch(report, value)
        best = replace(best, tried=report.epoch)
        if value > best.value:
            best = Choice(report.epoch, value, report.epoch)
        if report.epoch - best.epochs >= patience:
            break
    return best


def _epochs(
    model: nn.Module,
    samples: int,
    settings: CentralSettings,
    weight_decay: float,
    epoch_loss: Callable[[int], Callable[[Tensor], Tensor]],
    on_step: Callable[[int], None],
) -> Iterator[EpochReport]:
    if not samples:
        raise InvalidData("an empty training set", "at least one interaction", "Check how the data was split.")
    device = next(model.parameters()).device
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, weight_decay=weight_decay, fused=True)
    for epoch in range(1, settings.epochs + 1):
        started = time.perf_counter()
        model.train()
        loss_of = epoch_loss(epoch)
        order = torch.randperm(samples, generator=generator(settings.seed, epoch, 1)).to(device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, samples, settings.batch_size):
            rows = order[start : start + settings.batch_size]
            optimiser.zero_grad()
            loss = loss_of(rows)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += loss.detach().double() * len(rows)
            on_step(len(rows))
        mean = float(total) / samples
        if not math.isfinite(mean):
            raise InvalidVector(
                f"a loss of {mean} in epoch {epoch}", "a finite loss", "Training diverged: lower the learning rate."
            )
        yield EpochReport(epoch, mean, time.perf_counter() - started)
