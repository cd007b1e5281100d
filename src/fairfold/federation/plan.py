"""The plan of a federation: what server and clients agree on before the first round, without any data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy
from fairfold.errors import InvalidSettings
from fairfold.federation.algorithm import (
    COUNTS,
    Algorithm,
    Capability,
    DerivesSettings,
    PrivateReleases,
    RemembersUpdates,
    SettingsRules,
    TrainsImages,
)
from fairfold.federation.architecture import Architecture, ImageShape, Storage
from fairfold.federation.randomness import Purpose, generator, hash_seed
from fairfold.federation.updates import ClientTask, PublicStatistics, State, reduce_per_size
from fairfold.methods import Fair, Method
from fairfold.privacy.accounting import privacy_cost
from fairfold.subspace import Capacity, parse_scheme
from fairfold.subspace.projection import Assignment, Hashed, Projection
from fairfold.subspace.stored_table import StoredTable
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.config import Settings

STREAM = "stream"  # name of the rows of the server's table that pass by clients of a size in a round


@dataclass(frozen=True)
class Plan:
    """The model's tensors, public statistics, and the capacity of every size of client."""

    settings: "Settings"
    public: PublicStatistics
    architecture: Architecture
    capacities: list[Capacity]
    assigned: list[Assignment] | None = None
    _cache: dict[tuple[int, int], list[Assignment]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, settings: "Settings", public: PublicStatistics, image_shape: ImageShape | None = None) -> "Plan":
        """Make the plan of a recommender or of an image network; refused if the method cannot serve a capacity."""
        if settings.model.reads_images != (image_shape is not None):
            given = f"model.kind={settings.model.kind!r} on {'interactions' if image_shape is None else 'images'}"
            if image_shape is None:
                raise InvalidSettings(given, "images", "Use e.g. --data mnist.")
            raise InvalidSettings(given, "a model of images", "Use --model mlp or lenet.")
        architecture = settings.algorithm.architecture(settings, public, image_shape)
        plan = cls(settings, public, architecture, parse_scheme(settings.fleet.capacities))
        plan.assignments(0)
        if settings.run.table_storage == "disk" and (problem := StoresTables.of(plan.algorithm).problem(plan)):
            remedy = "Change that (docs/runs.md), or leave tables in memory: --set run.table_storage=memory."
            raise InvalidSettings(f"run.table_storage='disk' with {problem[0]}", problem[1], remedy)
        return plan

    @classmethod
    def on_device(
        cls, settings: "Settings", items: int, users: int, image_shape: ImageShape | None, held: dict[str, Projection]
    ) -> "Plan":
        """Make a client's plan from its task: the server decides what the client holds."""
        public = PublicStatistics(items, users)
        architecture = settings.algorithm.architecture(settings, public, image_shape, held)
        return cls(settings, public, architecture, [Capacity.parse("1x")], assigned=[Assignment(held)])

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm of the settings, with what follows from the statistics."""
        algorithm = self.settings.algorithm
        if isinstance(algorithm, DerivesSettings):
            return algorithm.with_derived_settings(self.settings, self.public)
        return algorithm

    @property
    def resolved_settings(self) -> "Settings":
        """The settings with what follows from the statistics, as clients and files for them have them."""
        return self.settings.model_copy(update={"algorithm": self.algorithm})

    @property
    def method(self) -> Method:
        """The method of the settings, which turns capacities into what clients hold."""
        return self.settings.subspace

    def assignments(self, round_number: int, client: int | None = None) -> list[Assignment]:
        """What clients of each size hold in a round; with ``client``, under that client's own hash."""
        if self.assigned is not None:
            return self.assigned
        seed = hash_seed(self.settings, round_number)
        if client is not None:
            return self._assign_by_seed(seed ^ (client + 1) << 32, round_number)
        key = (seed, round_number if self.method.changes_per_round else 0)
        if key not in self._cache:
            self._cache.clear()  # only the last round's: with a new hash every round it would grow without end
            self._cache[key] = self._assign_by_seed(seed, round_number)
        return self._cache[key]

    def client_task(self, state: State, size: int, client: int) -> ClientTask:
        """The task of a client that has a hash of its own."""
        held = self.assignments(state.round_number, client)[size]
        (vectors,) = reduce_per_size(state.full, [held])
        return ClientTask(state.round_number, size, held.projections or {}, vectors or {})

    def _stored(self, name: str, vector: Tensor, storage: Storage) -> Tensor:
        """The vector as the server keeps it: in memory, or on disk where its storage has put it there."""
        file = storage.files.get(vector.data_ptr())
        if file is None:
            return vector
        held = [one.projections[name] for one in self.assignments(0) if one.projections is not None]
        return StoredTable.of(file, [one.subspace for one in held if isinstance(one, Hashed)])

    def _assign_by_seed(self, seed: int, round_number: int) -> list[Assignment]:
        counts = self.public.statistics.get(COUNTS)
        return self.method.assign(self.architecture.tensors, self.capacities, seed, counts, round_number)

    def assignment_for(self, capacity: Capacity, round_number: int) -> tuple[dict[str, Projection], bool, bool]:
        """What a client of any capacity holds; whether such clients took part, and whether they could."""
        held, tensors = self.assignments(round_number), self.architecture.tensors
        if capacity in self.capacities:
            own = held[self.capacities.index(capacity)].projections
            if own is not None and self.method.fits(tensors, own, capacity):
                return own, True, True
        counts = self.public.statistics.get(COUNTS)
        remaining = self.method.remaining_capacity(tensors, capacity, self.capacities, counts)
        alone, joins = self.method.assignment_for(tensors, remaining, held, hash_seed(self.settings, round_number))
        assert alone.projections is not None
        return alone.projections, any(alone.projections == one.projections for one in held), joins

    def size_for(self, capacity: Capacity) -> int | None:
        """The size of a client: that of its capacity in the scheme, else the largest that fits; None if none does."""
        tensors, held = self.architecture.tensors, self.assignments(0)
        served = {size: one.projections for size, one in enumerate(held) if one.projections is not None}
        fitting = [size for size, projections in served.items() if self.method.fits(tensors, projections, capacity)]
        own = self.capacities.index(capacity) if capacity in self.capacities else None
        return own if own in fitting else max(fitting, key=lambda size: held[size].size(), default=None)

    def initial(self, storage: Storage | None = None) -> tuple[State, Weights]:
        """The server's state, and the clients' local state (allocated in ``storage``), before training."""
        storage = storage or Storage()
        full, local_state = self.architecture.initial(generator(self.settings, Purpose.MODEL), storage)
        full = {name: self._stored(name, vector, storage) for name, vector in full.items()}
        if isinstance(self.algorithm, RemembersUpdates):
            self.algorithm.init_local_state(local_state)
        in_subspace = isinstance(self.method, Fair) and self.method.start == "subspace"
        if in_subspace and isinstance(self.algorithm, TrainsImages):
            held = [one for one in self.assignments(0) if one.projections is not None]
            full = _moved_into(min(held, key=Assignment.size), full)
        return self.algorithm.init(self, full), local_state


def _moved_into(smallest: Assignment, full: Weights) -> Weights:
    """Random tensors projected into a subspace at the same scale: √count makes up for the means of a reduction."""
    moved = dict(full)
    for name, projection in (smallest.projections or {}).items():
        if isinstance(projection, Hashed):
            counts = projection.counts(torch.arange(projection.size)).clamp(min=1)
            moved[name] = projection.recover(projection.reduce(full[name]) * counts.to(full[name].dtype).sqrt())
    return moved


def privacy_report(settings: "Settings") -> dict[str, Any]:
    """A run's privacy as plain values: its level, and what it guarantees under which assumptions."""
    privacy = settings.privacy
    report: dict[str, Any] = {"level": privacy.level}
    warnings = list(privacy.warnings())
    if isinstance(privacy, SecurePrivacy):
        report["min_cohort"] = privacy.min_cohort
    if isinstance(privacy, DifferentialPrivacy):
        report |= privacy_cost(privacy.epsilon, privacy.delta, PrivateReleases.of(settings.algorithm).releases)
        report["noise from"] = privacy.noise
    elif isinstance(privacy, SecurePrivacy):
        disclosure = SettingsRules.of(settings.algorithm).disclosure(settings)
        warnings += [] if disclosure is None else [f"{disclosure} (docs/privacy.md)."]
    return report | {"warnings": warnings}


def privacy_notes(report: Mapping[str, Any]) -> list[str]:
    """Sentences for readers of a :func:`privacy_report`."""
    if report["level"] == "plain":
        return ["Privacy: plain. The server sees the update of every device, and can read a user's history from it."]
    if report["level"] == "secure":
        sums = f"sums over {report['min_cohort']} devices or more"
        return [f"Privacy: secure. The server sees {sums}, and nothing of one device.", *report["warnings"]]
    guarantee = f"ε = {report['epsilon']:.3g}, δ = {report['delta']:g} for {report['unit']}"
    by_devices = report["noise from"] == "devices"
    adds = "each device adds its share" if by_devices else "the server adds it, and sees sums without"
    return [f"Privacy: private. {guarantee}; noise: {adds}.", *report["warnings"]]


class StoresTables(Capability):
    """Trains tables that the server keeps on disk, at the cost of what a round's clients hold and touch."""

    def problem(self, plan: Plan) -> tuple[str, str] | None:
        """What of a plan needs whole tables in a round, and what does not; None where nothing does."""
        given = f"algorithm.kind={plan.settings.algorithm.kind!r}, which reads the whole table in every round"
        return given, "algorithm.kind='gradient'"


class StreamsRows(Capability):
    """Streams rows of the server's table by devices, with every task: beside the compact table that a device holds.

    The same rows pass by all devices of a size, so which of them a device uses is seen by nobody. They are counted in
    its traffic, and not in what it holds.
    """

    def streamed_rows(self, plan: Plan, full: Weights, task: ClientTask) -> Tensor | None:
        """The rows that pass by clients with this task, flat; None where they would learn nothing from them."""
        return None

    def stream_packing(self, held: Mapping[str, Projection]) -> Mapping[str, Projection]:
        """How the rows are packed on their way to clients that hold so much, by :data:`STREAM`; else as numbers."""
        return {}

    def with_streams(self, plan: Plan, full: Weights, tasks: list[ClientTask]) -> list[ClientTask]:
        """Tasks with the rows that pass by, of the server's tensors."""

        def with_stream(task: ClientTask) -> ClientTask:
            rows = self.streamed_rows(plan, full, task)
            if rows is None:
                return task
            context = {**task.context, **self.stream_packing(task.projections)}
            return replace(task, vectors=task.vectors | {STREAM: rows}, context=context)

        return [with_stream(task) for task in tasks]

    def received_bytes(self, held: Assignment) -> int:
        """Bytes of a model, and of what passes by beside it."""
        return held.bytes() + sum(part.bytes for part in self.stream_packing(held.projections or {}).values())

    def encoding_rows(self, plan: Plan, full: Weights, held: Mapping[str, Projection]) -> Weights:
        """The rows by which clients that hold so much encode histories, whatever the task; none by default."""
        return {}
