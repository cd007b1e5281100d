"""Gradient training: E epochs of local steps inside the subspaces, the paper's Algorithm 2; centralized training.

A client receives ψ, minimizes F(S·ψ) over ψ with a fresh optimizer, and sends ψ′ (the paper's rule) or ψ′ − ψ, times
its weight pᵢ. Its user's own vectors are trained along and not sent, unless they are to be uploaded: their direction
can be read from the update all the same (docs/privacy.md).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import vmap

from fairfold.algorithms.averaging import AveragingAlgorithm
from fairfold.federation.aggregation import ROBUST, CombinesRobustly, RobustRule
from fairfold.federation.algorithm import (
    Algorithm,
    Centralized,
    FoldsIn,
    PredictsRatings,
    SettingsRules,
    TrainsImages,
)
from fairfold.federation.architecture import Architecture
from fairfold.federation.bounds import MAX_USER_IMAGES
from fairfold.federation.clients import Client, Clients
from fairfold.federation.plan import Plan, StoresTables
from fairfold.federation.randomness import Purpose, generator
from fairfold.federation.training import LocalOptimizer, LocalSgd, RankingSgd
from fairfold.federation.updates import Aggregate, ClientTask, PublicStatistics, State, Update
from fairfold.methods import Fair
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor
from fairfold.models import predictor, scorer
from fairfold.subspace.projection import Hashed, Projection, whole
from fairfold.typing import Weights

FOLD_IN_EPOCHS, FOLD_IN_LR = 60, 0.05  # of Adam, for the vectors of a new user


class GradientAlgorithm(AveragingAlgorithm, LocalSgd):
    """Base of algorithms whose clients take gradient steps: recommenders and image networks.

    Attributes:
        prox: μ of FedProx: ½μ‖S(ψ − ψ_sent)‖² is added to the loss.
    """

    prox: float = Field(0.0, ge=0)

    @property
    def proximal_weight(self) -> float:
        return self.prox

    def incompatibility(self, settings: Any) -> str | None:
        if settings.subspace.method == "fedhm" and self.aggregation != "paper":
            return "method='fedhm' averages models: use algorithm.aggregation='paper'"
        return None

    @property
    def has_standard_training(self) -> bool:
        """Whether local training is just that of this class, so that a batched backend may compute it."""
        own, base = type(self), GradientAlgorithm
        same_loop = own.client_update is base.client_update
        return same_loop and own.local_loss is base.local_loss and own.optimizer is base.optimizer

    def client_update(self, plan: Plan, task: ClientTask, client: Client) -> tuple[Update, Weights]:
        compacts = {name: vector.clone().requires_grad_() for name, vector in task.vectors.items()}
        own = {name: vector.clone().requires_grad_() for name, vector in client.local_state.items()}
        optimizer = self.optimizer([*compacts.values(), *own.values()])
        batches = client.clients.training.batches(client.number, client.generator)
        with plan.architecture.dropout(client.generator):
            for batch in batches:
                loss = self.local_loss(batch, task, compacts, own, client)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        weight = self.weight(client.num_samples)  # pᵢ
        learned = {name: tensor.detach() for name, tensor in compacts.items()}
        if not self.sends_weights:
            learned = {name: vector - task.vectors[name] for name, vector in learned.items()}
        sums = {name: vector * weight for name, vector in learned.items()}
        return Update(sums, weight), {name: tensor.detach() for name, tensor in own.items()}

    def local_loss(self, batch: Any, task: ClientTask, compacts: Weights, own: Weights, client: Client) -> Tensor:
        """Loss of a batch, with the proximal term."""
        work = client.clients.training
        projections = task.projections
        me = torch.tensor(client.number)
        users = [own[name] if name in own else projections[name].rows(compacts[name], me) for name in work.user_vectors]
        rows = [projections[name].rows(compacts[name], batch.items) for name in work.tables]
        dense = {name: projections[name].whole(compacts[name]) for name in work.dense}
        loss = work.losses(batch, dense, users, rows).mean()
        if self.prox:
            loss = loss + 0.5 * self.prox * distance(compacts, task.vectors, projections)
        return loss

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
        optimizer: torch.optim.Optimizer = kinds[self.local_optimizer](parameters, lr=self.local_lr)
        return optimizer


class RecommenderAlgorithm(Algorithm, RankingSgd, SettingsRules, PredictsRatings, FoldsIn):
    """Base of recommenders trained by gradient steps, on items with sampled negatives or on ratings."""

    ACTIVE_WHEN: ClassVar = RankingSgd.ACTIVE_WHEN

    def inactive_keys(self, settings: Any) -> Sequence[str]:
        return [f"algorithm.{key}" for key in RankingSgd.RANKING_KEYS] if settings.model.predicts_ratings else []

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Scorer:
        return scorer(self._full_model(plan, full, clients))

    def predictor(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Predictor:
        return predictor(self._full_model(plan, full, clients))

    def _full_model(self, plan: Plan, full: Weights, clients: Clients) -> nn.Module:
        if not clients.are_new:
            return plan.architecture.model_of(full, clients.local_state)
        users = list(range(clients.train.num_users))
        architecture = Architecture(plan.settings, plan.public.num_items, len(users))
        shared = {name: full[name] for name in architecture.shapes}
        task = ClientTask(0, 0, {name: whole(shape) for name, shape in architecture.shapes.items()}, shared)
        return architecture.model_of(shared, self.fold_in(plan, task, clients, users))

    def fold_in(self, plan: Plan, task: ClientTask, clients: Clients, users: list[int]) -> Weights:
        work, projections = clients.training, task.projections
        dense = {name: projections[name].whole(task.vectors[name]) for name in work.dense}
        new = Architecture(plan.settings, 1, len(users))
        _, vectors = new.initial(generator(clients.seed, Purpose.MODEL))
        for row, user in enumerate(users):
            own = {name: vectors[name][row].clone().requires_grad_() for name in new.user_vectors}
            optimizer = torch.optim.Adam(own.values(), lr=FOLD_IN_LR)
            draws = clients.source(0, user)
            for _ in range(math.ceil(FOLD_IN_EPOCHS / self.local_epochs)):
                for batch in work.batches(user, draws):
                    rows = [projections[name].rows(task.vectors[name], batch.items) for name in work.tables]
                    loss = work.losses(batch, dense, list(own.values()), rows).mean()
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            for name, vector in own.items():
                vectors[name][row] = vector.detach()
        return vectors


class Gradient(GradientAlgorithm, RecommenderAlgorithm, StoresTables, CombinesRobustly):
    """Recommenders trained by gradient steps.

    Attributes:
        kind: Its name in settings.
        aggregation: ``"paper"`` and ``"delta"`` as for all averaging; or the delta rule along a robust mean of the
            changes: ``"clipped"``, ``"trimmed"``, ``"median"`` or ``"multi-krum"`` (docs/robustness.md).
        byzantine_share: Largest share of hostile clients of a round, for ``"trimmed"`` and ``"multi-krum"``.
        user_vectors: ``"private"``: not sent; ``"uploaded"``: sent and averaged, as the authors' code does.
    """

    ACTIVE_WHEN: ClassVar = (
        AveragingAlgorithm.ACTIVE_WHEN
        | RankingSgd.ACTIVE_WHEN
        | {"byzantine_share": ("aggregation", ("trimmed", "multi-krum"))}
    )

    kind: Literal["gradient"] = "gradient"
    aggregation: Literal["paper", "delta", "clipped", "trimmed", "median", "multi-krum"] = "delta"  # type: ignore[assignment]
    byzantine_share: float = Field(0.1, gt=0, lt=0.5)
    user_vectors: Literal["private", "uploaded"] = "private"

    def architecture(
        self, settings: Any, public: PublicStatistics, image_shape: Any = None, projections: Any = None
    ) -> Architecture:
        upload = self.user_vectors == "uploaded"
        return Architecture(settings, public.num_items, public.num_users, upload_user_vectors=upload)

    def problem(self, plan: Plan) -> tuple[str, str] | None:
        settings = plan.settings
        sizes = [size.projections or {} for size in plan.assignments(0)]
        held = [one for size in sizes for one in size.values()]
        tables = [one for size in sizes for name, one in size.items() if name in plan.architecture.tables]
        whole = any(isinstance(one, Hashed) and one.subspace.is_full for one in tables)
        needed = [
            (self.aggregation != "delta", f"algorithm.aggregation={self.aggregation!r}", "'delta': added changes"),
            (settings.subspace.rehashes, "subspace.rehash=true", "one hash for the whole run"),
            (
                settings.subspace.per_client or not all(type(one) is Hashed for one in held),
                f"method={settings.subspace.method!r}", "subspaces: fair, fair_hom, full_trn or fedavg",
            ),
            (
                whole and self.server_optimizer != "sgd",
                f"algorithm.server_optimizer={self.server_optimizer!r} and devices that hold the whole table",
                "'sgd': the moments of others move rows that nobody touched",
            ),
            (self.prox > 0, f"algorithm.prox={self.prox:g}", "prox=0: FedProx counts all coordinates"),
            (not settings.fleet.asynchronous.is_synchronous, "fleet.asynchronous", "synchronous rounds"),
            (settings.run.backend != "batched", f"run.backend={settings.run.backend!r}", "'batched'"),
        ]  # fmt: skip
        return next(((given, wanted) for found, given, wanted in needed if found), None)

    @property
    def robust_rule(self) -> RobustRule | None:
        return RobustRule(self.aggregation, self.byzantine_share) if self.aggregation in ROBUST else None

    def incompatibility(self, settings: Any) -> str | None:
        masked = settings.privacy.uses_secure_aggregation and settings.fleet.secure_groups == 1
        if self.robust_rule is not None and masked:
            groups = "use 'delta', or compare sums (--set fleet.secure_groups=5)"
            return f"algorithm.aggregation={self.aggregation!r} compares single updates, which masks hide: {groups}"
        if self.robust_rule is not None and settings.subspace.per_client:
            of_each = f"method={settings.subspace.method!r}, where every client has a hash of its own"
            return f"algorithm.aggregation={self.aggregation!r} compares updates number by number, unlike {of_each}"
        if settings.model.is_custom and settings.subspace.method == "heterofl":
            return "method='heterofl' has to know which layers read a table's columns: use a built-in model"
        return super().incompatibility(settings)


def distance(compacts: Weights, received: Weights, projections: dict[str, Projection]) -> Tensor:
    """‖S(ψ − ψ_received)‖², in the full space, where a slot counts as often as it has coordinates."""
    total = torch.zeros(())
    for name, compact in compacts.items():
        total = total + (projections[name].whole(compact) - projections[name].whole(received[name])).square().sum()
    return total


class ImageGradient(GradientAlgorithm, TrainsImages):
    """Image networks trained by gradient steps; defaults are those of the paper's experiment."""

    DEFAULTS: ClassVar = {
        "fleet": {"clients_per_round": 10},
        "run": {"rounds": 200},
        "subspace": {"compress": "all", "mapping": "chunk"},
    }

    kind: Literal["images"] = "images"
    local_epochs: int = Field(20, ge=1, lt=2**31)
    batch_size: int = Field(64, ge=1, lt=2**31)
    local_optimizer: Literal["sgd", "adagrad", "adam"] = "adam"
    local_lr: float = Field(0.01, gt=0)
    weighting: Literal["data", "equal"] | float = Field("data", union_mode="left_to_right")
    aggregation: Literal["paper", "delta"] = "paper"

    def max_user_weight(self, plan: Plan) -> float:
        return self.weight(MAX_USER_IMAGES)

    def incompatibility(self, settings: Any) -> str | None:
        method = settings.subspace
        if isinstance(method, Fair) and method.mapping == "ranked":
            return f"weights of model.kind={settings.model.kind!r} have no order of popularity: use mapping='chunk'"
        if isinstance(method, Fair) and method.compress == "tables":
            return f"model.kind={settings.model.kind!r} has no item tables: use subspace.compress='all' or 'model'"
        return super().incompatibility(settings)


MOMENT = "moment/"  # prefix of the optimizer's moments in the local state of centralized training


class Central(RecommenderAlgorithm, Centralized):
    """Gradient steps on everybody's data in one place: the yardstick for every federation.

    It runs like a federation of one client, which has all interactions and holds the full model. A round is as many
    epochs over all samples as a client does, and a step sees as many samples as all clients of a round in theirs.
    Unlike a client's, the optimizer's moments last: they are the one client's local state.
    """

    sends_weights: ClassVar[bool] = True
    DEFAULTS: ClassVar = {"subspace": {"method": "fedavg"}}

    kind: Literal["central"] = "central"

    def incompatibility(self, settings: Any) -> str | None:
        if settings.subspace.method != "fedavg":
            return f"data in one place is trained with the full model: leave out method={settings.subspace.method!r}"
        return None

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        return 0, 0

    def client_update(self, plan: Plan, task: ClientTask, client: Client) -> tuple[Update, Weights]:
        clients = client.clients
        work = clients.training
        vectors = {name: rows for name, rows in client.local_state.items() if not name.startswith(MOMENT)}
        values = {name: vector.clone() for name, vector in task.vectors.items()}
        values |= {name: rows.reshape(-1).clone() for name, rows in vectors.items()}
        batch = self.batch_size * (plan.settings.fleet.clients_per_round or clients.train.num_users)
        done = task.round_number * self.local_epochs * math.ceil(len(clients.train) / batch)
        moments = {name: _optimizer_moments(client.local_state, name) for name in values}
        steps = {name: LocalOptimizer(tensor, self, moments[name], done) for name, tensor in values.items()}
        losses = vmap(work.sample_losses, in_dims=(None, 0, 0, 0 if work.has_targets else None))
        for part in work.everything(clients.source(task.round_number, 0), batch):
            read: Weights = {name: values[name].requires_grad_() for name in values}
            users = [read[name].view(-1, columns)[part.users] for name, columns in work.user_vectors.items()]
            items = [read[name].view(shape)[part.items][:, None] for name, shape in work.tables.items()]
            targets = None if part.targets is None else part.targets[:, None]
            loss: Tensor = losses({name: read[name] for name in work.dense}, users, items, targets).mean()
            for name, gradient in zip(read, torch.autograd.grad(loss, list(read.values())), strict=True):
                values[name] = values[name].detach()
                steps[name].step(gradient, gradient.numel())
        local_state = {name: values[name].detach().view(rows.shape) for name, rows in vectors.items()}
        for name, optimizer in steps.items():
            local_state |= {f"{MOMENT}{moment}/{name}": tensor for moment, tensor in optimizer.moments.items()}
        return Update({name: values[name].detach() for name in task.vectors}, 1.0), local_state

    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        full = dict(state.full)
        for _, update in aggregate.parts():
            full |= update.sums
        return replace(state, full=full, round_number=state.round_number + 1)


def _optimizer_moments(local_state: Weights, name: str) -> Weights:
    mine = {key.removeprefix(MOMENT): of for key, of in local_state.items() if key.startswith(MOMENT)}
    return {key.removesuffix(f"/{name}"): of for key, of in mine.items() if key.endswith(f"/{name}")}
