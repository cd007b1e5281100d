"""The base class of algorithms: what clients compute, what the server makes of their sums, how items are scored.

An algorithm is one frozen object whose fields are its settings. All else (sampling, transport, aggregation, faults) is
shared. A new one is a subclass of :class:`Algorithm`, and of a :class:`Capability` for each thing that only some need.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from fairfold.config.tables import FrozenSettings
from fairfold.federation.updates import (
    Aggregate,
    ClientTask,
    ClientUpdate,
    PublicStatistics,
    ScheduledTask,
    State,
    Update,
    nonzero_values,
    reduce_per_size,
)
from fairfold.privacy.accounting import Release
from fairfold.subspace.projection import Assignment
from fairfold.typing import FLOAT_BYTES, Weights

if TYPE_CHECKING:
    from fairfold.config import Settings
    from fairfold.data import Interactions
    from fairfold.federation.architecture import Architecture, ImageShape
    from fairfold.federation.clients import Client, Clients
    from fairfold.federation.plan import Plan
    from fairfold.metrics.ranking import Scorer
    from fairfold.metrics.rating import Predictor
    from fairfold.subspace.projection import Projection

COUNTS = "counts"  # name of the statistic that counts the users of each item


class Statistic(NamedTuple):
    """A sum over clients before the first round."""

    per_item: bool  # a number per item; else three numbers
    steps: int | None = None  # fixed-point steps per 1, where every user's numbers are multiples of a step
    counts_users: bool = False  # its first number is that of users


class Algorithm(FrozenSettings):
    """What clients compute, what the server makes of their sums, and how items are scored.

    Attributes:
        kind: Its name in settings.
        max_change: An update that changes a number by more than this is refused.
        sends_weights: Whether an update is the weighted model itself; else a weighted change, or another sum.
        depends_on_model: Whether an update depends on the model that was sent; else it is never stale.
        serves_new_users: Whether a user's scores follow from the model and their own history alone.
    """

    kind: str
    max_change: float = Field(1e4, gt=0)

    sends_weights: ClassVar[bool] = False
    depends_on_model: ClassVar[bool] = True
    serves_new_users: ClassVar[bool] = False

    def incompatibility(self, settings: "Settings") -> str | None:
        """Say why the other tables do not go with this algorithm; None if they do."""
        return None

    def statistics(self, settings: "Settings") -> Mapping[str, Statistic]:
        """Sums that clients contribute to before the first round, by name."""
        return {COUNTS: Statistic(per_item=True, steps=1)} if settings.subspace.needs_counts else {}

    def client_statistics(self, settings: "Settings", histories: "Interactions", items: range) -> Update:
        """A client's part of the statistics, for a range of items; those not per item go with the first range."""
        sums = {COUNTS: count_of(histories, items)} if settings.subspace.needs_counts else {}
        return Update(sums, float(histories.num_users))

    def architecture(
        self,
        settings: "Settings",
        public: PublicStatistics,
        image_shape: "ImageShape | None" = None,
        projections: Mapping[str, "Projection"] | None = None,
    ) -> "Architecture":
        """The model's tensors; ``projections`` are given on a client, which knows only what it is to hold."""
        from fairfold.federation.architecture import architecture_of

        return architecture_of(settings, public.num_items, public.num_users, image_shape)

    def init(self, plan: "Plan", full: Weights) -> State:
        """The server's state before the first round, from tensors drawn at random."""
        return State(full)

    def tasks(self, plan: "Plan", state: State, sizes: Sequence[int]) -> list[ClientTask]:
        """What clients of each size receive: ψ ← projection(S, θ), once per size."""
        assignments = plan.assignments(state.round_number)
        held = [assignments[size] for size in sizes]
        return [
            ClientTask(state.round_number, size, one.projections or {}, vectors or {})
            for size, one, vectors in zip(sizes, held, reduce_per_size(state.full, held), strict=True)
        ]

    @abstractmethod
    def client_update(self, plan: "Plan", task: ClientTask, client: "Client") -> tuple[Update, Weights]:
        """Compute one client's additive update and its new local state. This is the specification."""

    def update_shapes(self, plan: "Plan", task: ClientTask) -> dict[str, int]:
        """Name and length of each vector of an update."""
        return {name: held.size for name, held in task.projections.items()}

    def validate_update(self, plan: "Plan", task: ClientTask, update: Update | None) -> str | None:
        """Say why an update cannot be used; None if it can. The only check there is."""
        if update is None:
            return "no update in time"
        shapes, dtype = self.update_shapes(plan, task), next(iter(task.vectors.values())).dtype
        if update.sums.keys() != shapes.keys():
            return "other tensors than were sent"
        if not 0 <= update.weight < float("inf"):
            return "a weight out of range"
        if any(vector.shape != (shapes[name],) or vector.dtype != dtype for name, vector in update.sums.items()):
            return "wrong size"
        changes = (mean_change(self, task, name, vector, update.weight) for name, vector in update.sums.items())
        ends = [end for change in filter(len, map(nonzero_values, changes)) for end in torch.aminmax(change)]
        found = torch.stack(ends).tolist() if ends else []  # one transfer: a GPU is waited for once
        if not all(map(math.isfinite, found)):
            return "NaN or infinity"
        return "values out of range" if any(abs(value) > self.max_change for value in found) else None

    @abstractmethod
    def server_update(self, plan: "Plan", state: State, aggregate: Aggregate) -> State:
        """The server's next state from the sums of a round. It may modify the state in place."""

    def traffic(self, plan: "Plan", size: int, round_number: int = 0) -> tuple[int, int]:
        """Bytes that a client of a size receives and sends in a round."""
        model_bytes = plan.assignments(0)[size].size() * FLOAT_BYTES
        return model_bytes, model_bytes

    def scorer(self, plan: "Plan", full: Weights, held: Sequence[Any], clients: "Clients") -> "Scorer":
        """A function that scores all items for users of ``clients``.

        ``full`` are the server's tensors, or those that a client's compact ones stand for; ``held`` the assignments of
        the clients whose model this is, all of them for the server's.
        """
        raise NotImplementedError


class Capability:
    """What only some algorithms can do: a base class to inherit from beside :class:`Algorithm`."""

    @classmethod
    def of(cls, algorithm: Algorithm) -> Self:
        """The algorithm itself if it has this capability, else the defaults of this class."""
        return algorithm if isinstance(algorithm, cls) else cls()


class Centralized(Capability):
    """Trains on all data in one place: the federation has one client, which has everybody's."""


class CombinesGroups(Capability):
    """Combines the secure sums of groups of clients by a robust rule."""


class TrainsImages(Capability):
    """Trains networks on images; other algorithms train recommenders."""


class SettingsRules(Capability):
    """Decides about keys of other settings tables."""

    draws: ClassVar[bool] = True  # whether anything is drawn at random by clients, subspaces or the server

    def inactive_keys(self, settings: "Settings") -> Sequence[str]:
        """Keys, as ``table.key``, that have no effect beside these settings, and are then unknown."""
        return ()

    def fixed_settings(self, settings: "Settings") -> Mapping[str, Mapping[str, Any]]:
        """Values of other tables that the algorithm decides; they are then no keys there."""
        return {}

    def disclosure(self, settings: "Settings") -> str | None:
        """A sentence on what is left out of exact sums to protect users, if anything is."""
        return None


class DerivesSettings(Capability):
    """Has settings that follow from the statistics."""

    def with_derived_settings(self, settings: "Settings", public: PublicStatistics) -> Self:
        """The algorithm with what follows from the statistics; itself where all settings are given."""
        return self


class NumbersItems(Capability):
    """Renumbers the items of the catalogue by the statistics."""

    def numbering(self, plan: "Plan") -> Tensor | None:
        """The new number of every item; None where items keep theirs."""
        return None


class PredictsRatings(Capability):
    """Predicts ratings, always or for some models."""

    def predicts_ratings(self, settings: "Settings") -> bool:
        """Whether ratings are predicted under these settings; else items are ranked."""
        return settings.model.predicts_ratings

    def predictor(self, plan: "Plan", full: Weights, held: Sequence[Any], clients: "Clients") -> "Predictor":
        """A function that predicts ratings of pairs of users and items; arguments as for :meth:`Algorithm.scorer`."""
        raise NotImplementedError


class BatchedUpdates(Capability):
    """Computes the updates of many clients at once."""

    def client_updates(
        self, plan: "Plan", clients: "Clients", scheduled: list[ScheduledTask]
    ) -> Iterator[ClientUpdate]:
        """The same sums as :meth:`Algorithm.client_update`, faster; only valid updates may be added up here."""
        raise NotImplementedError


class RemembersUpdates(Capability):
    """Updates are changes: a client stores what it last sent, once the server has acknowledged it."""

    supports_retraction: ClassVar[bool] = False  # a later update may be about another history, and retract the earlier

    def sample_state_shapes(self, plan: "Plan") -> dict[str, int]:
        """Name and row length of what a client stores for each of its samples."""
        return {}

    def mark_lost(self, local_state: Weights, lost: Tensor) -> None:
        """Mark, in place, the samples that a client's users no longer have."""

    def init_local_state(self, local_state: Weights) -> None:
        """Set a client's state to zero, in place: the server's sums hold nothing of it yet."""
        for rows in local_state.values():
            rows.zero_()


class FixedPointUpdates(Capability):
    """Numbers of updates are multiples of a step for every user, so that secure sums lose nothing."""

    fixed_point: ClassVar[Mapping[str, int]] = {}  # steps per 1, by name; of others they follow from ``privacy.clip``
    value_bounds: ClassVar[Mapping[str, float]] = {}  # the largest absolute number, by name; 1 if not given
    nested_sums: ClassVar[frozenset[str]] = frozenset()  # vectors of which small clients send a prefix


class SparseUpdates(Capability):
    """Some vectors of an update may list their nonzero numbers with their positions."""

    sparse_sums: ClassVar[frozenset[str]] = frozenset()

    def max_update_bytes(self, plan: "Plan", size: int) -> int:
        """Bytes that no update of a client of a size exceeds."""
        return plan.algorithm.traffic(plan, size)[1]


class PrivateReleases(Capability):
    """Can be trained with differential privacy."""

    releases: ClassVar[Mapping[str, Release]] = {}  # sums released with noise under ``privacy.level = "private"``
    public_sums: ClassVar[frozenset[str]] = frozenset()  # sums that count users and need no noise


class Tunable(Capability):
    """Chooses during a run what clients hold."""

    def resolve(self, plan: "Plan", state: State) -> "Plan":
        """The plan with what was chosen so far."""
        return plan

    def participating_share(self, plan: "Plan", round_number: int) -> float:
        """The share of all clients that take part in a round, the same ones in all rounds of that share."""
        return 1.0

    def notes(self, plan: "Plan", state: State) -> list[str]:
        """Sentences for the report of a run on what was chosen."""
        return []


class DeviceScoring(Capability):
    """Scores items on a client, block by block, from what it holds."""

    def scoring_vectors(self, plan: "Plan", task: ClientTask, clients: "Clients", users: list[int]) -> Weights:
        """The vectors of some users that items are scored with, a row each."""
        return {name: clients.local_state[name][users] for name in plan.architecture.user_vectors}

    def block_scores(self, plan: "Plan", task: ClientTask, vectors: Weights, items: Tensor) -> Tensor:
        """Scores [users, items] of some items, or of other items for each user (ids [users, items])."""
        held, architecture = task.projections, plan.architecture
        dense = {name: held[name].whole(task.vectors[name]) for name in architecture.dense if name in held}
        rows = [held[name].rows(task.vectors[name], items) for name in architecture.tables]
        rows = [table if table.dim() == 3 else table[None] for table in rows]
        return architecture.scores(dense, [vectors[name][:, None, :] for name in architecture.user_vectors], rows)

    def num_candidates(self, plan: "Plan", task: ClientTask, top: int) -> int:
        """How many leading items contain anybody's best ``top``: all, unless the others are never ranked first."""
        return plan.public.num_items


class WeighsUsers(Capability):
    """Users of an update may weigh more than one another."""

    def max_user_weight(self, plan: "Plan") -> float:
        """The most that one user may weigh in a sum."""
        return 1.0


class FoldsIn(Capability):
    """Trains users' vectors, and can find those of a new user by training them alone, with the model as it is."""

    def fold_in(self, plan: "Plan", task: ClientTask, clients: "Clients", users: list[int]) -> Weights:
        """Vectors of some users from their histories, a row each; ``task`` is the model that they are to go with."""
        raise NotImplementedError


class CompactScoring(Capability):
    """Scores items from tensors as they are stored on a client."""

    def compact_scorer(
        self, plan: "Plan", held: Mapping[str, "Projection"], stored: Weights, clients: "Clients"
    ) -> "Scorer":
        """The scorer of a client's model, from its stored bytes."""
        full = {name: one.recover(one.unpacked(stored[name])) for name, one in held.items()}
        return plan.algorithm.scorer(plan, full, [Assignment(dict(held))], clients)

    def distinguishable_items(self, plan: "Plan", held: Sequence[Any], items: Tensor) -> Tensor:
        """Which items the model of these clients knows apart from others, as booleans."""
        return torch.ones_like(items, dtype=torch.bool)


def mean_change(algorithm: Algorithm, task: ClientTask, name: str, vector: Tensor, weight: float) -> Tensor:
    """The change that an update asks for, of one client or the mean of several."""
    mean = vector / weight if weight else vector
    return mean - task.vectors[name] if algorithm.sends_weights and weight else mean


def count_of(histories: "Interactions", items: range, weights: Tensor | None = None) -> Tensor:
    """Number of users of each item in a range; with ``weights``, one per user, the sum of their weights."""
    inside = (histories.items >= items.start) & (histories.items < items.stop)
    counted = None if weights is None else weights[histories.users[inside]]
    return torch.bincount(histories.items[inside] - items.start, counted, minlength=len(items)).to(torch.float64)
