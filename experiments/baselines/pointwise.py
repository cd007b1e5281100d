"""What the federated recommenders of the literature have in common: samples of 1 and 0, and an averaged item table.

A device holds an item table, a vector of its user's own and perhaps layers. Per local step it takes all of its user's
items as ones and, drawn anew, so many others for each as zeros, and descends the logistic loss. It sends its
change, the server steps along the mean (:mod:`fairfold.algorithms.averaging`). What makes a method is its score, what
it keeps to itself, and what it adds to the loss: a file each, beside this one.

Clients of a size train in one program; the specification is the same program with one client.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fairfold.algorithms.averaging import AveragingAlgorithm
from fairfold.federation.algorithm import BatchedUpdates
from fairfold.federation.architecture import Architecture, ImageShape, Storage
from fairfold.federation.clients import Client, Clients
from fairfold.federation.plan import Plan
from fairfold.federation.plugins import register_algorithm
from fairfold.federation.updates import (
    ClientTask,
    ClientUpdate,
    PublicStatistics,
    ScheduledTask,
    Update,
    group_by_task,
    to_device,
)
from fairfold.methods import Tensors
from fairfold.metrics.ranking import Scorer
from fairfold.typing import FLOAT_BYTES, Shapes, Weights

ITEM = "item"
USER = "user"
NUMBERS_AT_ONCE = 1 << 24
"""Of the clients' own copies of the item table that are trained at a time."""


class BaselineArchitecture(Architecture):
    """An item table, vectors of the users' own, and layers."""

    def __init__(self, items: int, users: int, factors: int, user_vectors: dict[str, int], dense: Shapes) -> None:
        self.items, self.users = items, users
        self.user_vectors, self.dense = user_vectors, dense
        self.tables, self.user_tables = {ITEM: (items, factors)}, {}

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """Normal numbers: of tables with deviation 0.1, of layers by the width they read."""

        def drawn(shape: tuple[int, ...], spread: float) -> Tensor:
            return spread * torch.randn(prod(shape), generator=generator)

        full = {ITEM: drawn(self.tables[ITEM], 0.1)}
        full |= {name: drawn(shape, shape[-1] ** -0.5) for name, shape in self.dense.items()}
        return full, {name: drawn((self.users, size), 0.1).view(-1, size) for name, size in self.user_vectors.items()}

    @property
    def tensors(self) -> Tensors:
        return Tensors(self.tables, self.dense)


@dataclass
class Local:
    """Clients of one size in training: a copy of everything each.

    Attributes:
        items: The table that all received, [items, factors].
        change: Of each client's own copy of it, [clients, items, factors].
        local_state: Vectors of the users, [clients, length].
        dense: Layers, [clients, ...].
        received: The layers as all received them.
        held: Which columns devices of this size hold, 1 or 0.
        round_number: Rounds done before this one.
    """

    items: Tensor
    change: Tensor
    local_state: Weights
    dense: Weights
    received: Weights
    held: Tensor
    round_number: int


@dataclass
class Samples:
    """What some clients learn from in a step: items, labels and which of them are there, [clients, samples]."""

    items: Tensor
    labels: Tensor
    there: Tensor

    @property
    def client_ids(self) -> Tensor:
        """Their numbers, [clients, 1]."""
        return torch.arange(len(self.items), device=self.items.device)[:, None]


class Pointwise(AveragingAlgorithm, BatchedUpdates):
    """Logistic loss on a user's items and others drawn for them.

    Attributes:
        num_negatives: Others drawn for each item.
        local_epochs: Steps of a device per round, each over all of its samples.
        local_lr: Step size of the user's vector and of layers, along the mean over samples.
        item_lr: Step size of the item table, along the sum over samples.
        BITS: Size of a number of the table, and of a user's vector, on a device.
        PHASES: What moves in each step: in one go, or one after the other.
    """

    BITS: ClassVar[int] = 8 * FLOAT_BYTES
    PHASES: ClassVar[tuple[tuple[str, ...], ...]] = (("user_vectors", "dense", "items"),)

    num_negatives: int = Field(4, ge=1, lt=2**10)
    local_epochs: int = Field(5, ge=1, lt=2**10)
    local_lr: float = Field(1.0, gt=0)
    item_lr: float = Field(0.1, gt=0)

    # -- what makes a method -------------------------------------------------------------------------------------------

    def local_vectors_of(self, factors: int, items: int) -> dict[str, int]:
        """Name and length of what a user has."""
        return {USER: factors}

    def layers_of(self, factors: int) -> Shapes:
        """Name and shape of what is averaged beside the item table."""
        return {}

    def logits(self, rows: Tensor, user_vectors: Weights, dense: Weights) -> Tensor:
        """Scores [clients, items] of rows [clients, items, factors]."""
        return (rows * user_vectors[USER][:, None, :]).sum(-1)

    def loss(self, local: Local, samples: Samples, rows: Tensor, user_vectors: Weights, dense: Weights) -> Tensor:
        """Of every client, [clients]: the mean over its samples."""
        return mean_loss(self.logits(rows, user_vectors, dense), samples)

    # -- the protocol --------------------------------------------------------------------------------------------------

    def architecture(
        self, settings: Any, public: PublicStatistics, image_shape: ImageShape | None = None, projections: Any = None
    ) -> Architecture:
        factors = settings.model.factors
        user_vectors = self.local_vectors_of(factors, public.num_items)
        return BaselineArchitecture(public.num_items, public.num_users, factors, user_vectors, self.layers_of(factors))

    def client_update(self, plan: Plan, task: ClientTask, client: Client) -> tuple[Update, Weights]:
        """The same program with one client."""
        local = self.train_locally(plan, task, client.clients, [client.number])
        return self.make_update(plan, task, local), {name: of[0].cpu() for name, of in local.local_state.items()}

    def client_updates(self, plan: Plan, clients: Clients, scheduled: list[ScheduledTask]) -> Iterator[ClientUpdate]:
        """Partition of a size together, those with as many items beside each other."""
        for task, everybody in group_by_task(scheduled):
            client_ids = sorted(everybody, key=clients.num_samples)
            many = max(1, NUMBERS_AT_ONCE // prod(plan.architecture.tables[ITEM]))
            for start in range(0, len(client_ids), many):
                some = client_ids[start : start + many]
                local = self.train_locally(plan, task, clients, some)
                yield ClientUpdate(
                    task, some, self.make_update(plan, task, local), to_device(local.local_state, torch.device("cpu"))
                )

    def make_update(self, plan: Plan, task: ClientTask, local: Local) -> Update:
        """The sum of the changes of some clients."""
        sums = {ITEM: task.projections[ITEM].reduce(local.change.sum(0).view(-1).cpu())}
        sums |= {name: (of - local.received[name]).sum(0).view(-1).cpu() for name, of in local.dense.items()}
        return Update(sums, float(len(local.change)))

    # -- training ------------------------------------------------------------------------------------------------------

    def init_local(self, plan: Plan, task: ClientTask, clients: Clients, client_ids: Sequence[int]) -> Local:
        """Before the first step."""
        held = task.projections[ITEM]
        many = len(client_ids)
        device = training_device(plan)
        items = held.whole(task.vectors[ITEM]).view(plan.architecture.tables[ITEM]).to(device)
        columns = held.rows(torch.ones_like(task.vectors[ITEM]), torch.zeros(1, dtype=torch.int64))[0]
        received = {
            name: task.projections[name].whole(task.vectors[name]).view(shape).to(device)
            for name, shape in plan.architecture.dense.items()
        }
        user_vectors = {
            name: clients.local_state[name][list(client_ids)].to(device) for name in plan.architecture.user_vectors
        }
        dense = {name: of.expand(many, *of.shape).clone() for name, of in received.items()}
        change = items.new_zeros(many, *items.shape)
        return Local(items, change, user_vectors, dense, received, (columns != 0).to(items), task.round_number)

    def train_locally(self, plan: Plan, task: ClientTask, clients: Clients, client_ids: Sequence[int]) -> Local:
        """Some clients after their steps of a round."""
        local = self.init_local(plan, task, clients, client_ids)
        for samples in self.draw(clients, client_ids, task.round_number, local.items.device):
            for moving in self.PHASES:
                self.step(local, samples, moving)
        return local

    def draw(
        self, clients: Clients, client_ids: Sequence[int], round_number: int, device: torch.device
    ) -> Iterator[Samples]:
        """Step by step all items of some users, and others that are not theirs."""
        found = []
        for client in client_ids:
            mine, source = clients.train.of(client), clients.source(round_number, client)
            chance = torch.rand(
                self.local_epochs, len(mine) * self.num_negatives, generator=source, dtype=torch.float64
            )
            others = clients.negative_sampler.of_user(client, chance)
            found.append(torch.cat([mine.expand(self.local_epochs, -1), others], dim=1).T)
        lengths = torch.tensor([len(of) for of in found])
        items = torch.nn.utils.rnn.pad_sequence(found, batch_first=True).permute(2, 0, 1).to(device)
        place = torch.arange(items.shape[2])
        ones = place < torch.div(lengths, self.num_negatives + 1, rounding_mode="floor")[:, None]
        labels, there = ones.to(device, torch.get_default_dtype()), (place < lengths[:, None]).to(device)
        yield from (Samples(of_step, labels, there) for of_step in items)

    def step(self, local: Local, samples: Samples, moving: Sequence[str]) -> None:
        """One step of all clients, each along its own loss."""
        rows = local.items[samples.items] + local.change[samples.client_ids, samples.items]
        rows = rows.requires_grad_("items" in moving)
        user_vectors = {
            name: of.detach().requires_grad_("user_vectors" in moving) for name, of in local.local_state.items()
        }
        dense = {name: of.detach().requires_grad_("dense" in moving) for name, of in local.dense.items()}
        total = self.loss(local, samples, rows, user_vectors, dense).sum()
        leaves = [of for of in (rows, *user_vectors.values(), *dense.values()) if of.requires_grad]
        slopes = dict(zip(map(id, leaves), torch.autograd.grad(total, leaves, allow_unused=True), strict=True))
        for kept, given in ((local.local_state, user_vectors), (local.dense, dense)):
            for name, leaf in given.items():
                slope = slopes.get(id(leaf))
                if slope is not None:
                    kept[name] = kept[name] - self.local_lr * slope
        slope = slopes.get(id(rows))
        if slope is not None:
            self.move_items(local, samples, slope * samples.there.sum(1)[:, None, None])

    def move_items(self, local: Local, samples: Samples, slope: Tensor) -> None:
        """A step of the item tables along the slope of the sum over samples."""
        _, items, factors = local.change.shape
        places = (samples.client_ids * items + samples.items).view(-1)
        moved = (-self.item_lr * slope * local.held).view(-1, factors)
        local.change.view(-1, factors).index_add_(0, places, moved)

    # -- what was learned ----------------------------------------------------------------------------------------------

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Scorer:
        """By the server's tensors and what users keep."""
        items = full[ITEM].view(plan.architecture.tables[ITEM])
        dense = {name: full[name].view(1, *shape) for name, shape in plan.architecture.dense.items()}

        def score(users: Tensor) -> Tensor:
            user_vectors = {name: clients.local_state[name][users] for name in plan.architecture.user_vectors}
            return self.logits(items.expand(len(users), *items.shape), user_vectors, dense)

        return score


def training_device(plan: Plan) -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if plan.settings.run.device != "cpu" and torch.cuda.is_available() else "cpu")


def mean_loss(logits: Tensor, samples: Samples) -> Tensor:
    """The logistic loss of every client, the mean over its samples."""
    each = functional.binary_cross_entropy_with_logits(logits, samples.labels, reduction="none")
    return (each * samples.there).sum(1) / samples.there.sum(1)


# -- FedMF: matrix factorisation whose user vectors stay on the devices.
# (Chai et al., *Secure Federated Matrix Factorization*, 2019.) Its homomorphic encryption, which changes no number, is
# left out.


@register_algorithm
class FedMF(Pointwise):
    """Score ⟨u, v⟩.

    Attributes:
        kind: Its name in settings.
    """

    kind: Literal["fedmf"] = "fedmf"
