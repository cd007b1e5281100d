"""What server and devices agree on before the first round: the model's tensors and who holds what. No one's data."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fairfold.errors import InvalidSettings
from fairfold.methods import Method
from fairfold.projections import Assignment, Hashed, Projection
from fairfold.protocol.algorithm import COUNTS, Algorithm
from fairfold.protocol.architecture import Architecture, Picture
from fairfold.protocol.sampling import Purpose, generator, hash_seed
from fairfold.protocol.storage import Storage
from fairfold.protocol.words import Public, Sent, State, reduced
from fairfold.subspace import Capacity, parse_scheme
from fairfold.values import Weights

if TYPE_CHECKING:
    from fairfold.settings import Settings


@dataclass(frozen=True)
class Plan:
    """A federation without its clients: what is public of them, the model's tensors, and the capacity of every size.

    On a device ``ordered`` is what an order says that it holds.
    """

    settings: "Settings"
    public: Public
    architecture: Architecture
    capacities: list[Capacity]
    ordered: list[Assignment] | None = None
    _assigned: dict[tuple[int, int], list[Assignment]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, settings: "Settings", public: Public, picture: Picture | None = None) -> "Plan":
        """Of a recommender, or of a network for images; refused where the method cannot serve a capacity."""
        if settings.model.reads_images != (picture is not None):
            given = f"model.kind={settings.model.kind!r} on {'interactions' if picture is None else 'images'}"
            if picture is None:
                raise InvalidSettings(given, "images", "Use e.g. --data mnist.")
            raise InvalidSettings(given, "a model of images", "Use --model mlp or lenet.")
        architecture = settings.algorithm.architecture(settings, public, picture)
        plan = cls(settings, public, architecture, parse_scheme(settings.fleet.capacities))
        plan.assignments(0)
        return plan

    @classmethod
    def on_device(
        cls, settings: "Settings", items: int, users: int, picture: Picture | None, projections: dict[str, Projection]
    ) -> "Plan":
        """What a device makes of an order: what it holds is the server's to decide."""
        public, whole = Public(items, users), [Capacity.parse("1x")]
        architecture = settings.algorithm.architecture(settings, public, picture, projections)
        return cls(settings, public, architecture, whole, ordered=[Assignment(projections)])

    @property
    def algorithm(self) -> Algorithm:
        """What devices compute, and what the server makes of it."""
        return self.settings.algorithm

    @property
    def method(self) -> Method:
        """How capacities become what devices hold."""
        return self.settings.subspace

    def assignments(self, round_number: int, client: int | None = None) -> list[Assignment]:
        """What each size holds in a round; with ``client``, under that client's own, independent hash."""
        if self.ordered is not None:
            return self.ordered
        seed = hash_seed(self.settings, round_number)
        if client is not None:
            return self._assign(seed ^ (client + 1) << 32, round_number)
        key = (seed, round_number if self.method.moves else 0)
        if key not in self._assigned:
            self._assigned.clear()  # the last round's alone: with a new hash every round there would be no end of them
            self._assigned[key] = self._assign(seed, round_number)
        return self._assigned[key]

    def sent_alone(self, state: State, size: int, client: int) -> Sent:
        """What a client receives whose hash is its own."""
        held = self.assignments(state.round_number, client)[size]
        (vectors,) = reduced(state.full, [held])
        return Sent(state.round_number, size, held.projections or {}, vectors or {})

    def _assign(self, seed: int, round_number: int) -> list[Assignment]:
        counts = self.public.survey.get(COUNTS)
        return self.method.assign(self.architecture.tensors, self.capacities, seed, counts, round_number)

    def at(self, capacity: Capacity, round_number: int) -> tuple[dict[str, Projection], bool, bool]:
        """What a device of any capacity holds; whether such devices took part, and whether they could."""
        held = self.assignments(round_number)
        if capacity in self.capacities:
            mine = held[self.capacities.index(capacity)].projections
            if mine is not None and self.method.fits(self.architecture.tensors, mine, capacity):
                return mine, True, True
        tensors = self.architecture.tensors
        limited = self.method.limited(tensors, capacity, self.capacities, self.public.survey.get(COUNTS))
        alone, joins = self.method.at(tensors, limited, held, hash_seed(self.settings, round_number))
        assert alone.projections is not None
        return alone.projections, any(alone.projections == of.projections for of in held), joins

    def size_for(self, capacity: Capacity) -> int | None:
        """A device's own size, where the scheme names it; else the largest that it can hold; None if it can hold none.

        A model of another size may take as few bytes, and what a device of that size says may be more.
        """
        tensors, held = self.architecture.tensors, self.assignments(0)
        known = {size: of.projections for size, of in enumerate(held) if of.projections is not None}
        fitting = [size for size, projections in known.items() if self.method.fits(tensors, projections, capacity)]
        own = self.capacities.index(capacity) if capacity in self.capacities else None
        return own if own in fitting else max(fitting, key=lambda size: held[size].size(), default=None)

    def initial(self, storage: Storage | None = None) -> tuple[State, Weights]:
        """The server's state, and the users' own vectors, kept in ``storage``, before training."""
        full, own = self.architecture.initial(generator(self.settings, Purpose.MODEL), storage)
        self.algorithm.starts_own(self, own)
        if getattr(self.method, "start", "full") == "subspace" and self.algorithm.images:
            held = [known for known in self.assignments(0) if known.projections is not None]
            full = _started_in(min(held, key=Assignment.size), full)
        return self.algorithm.init(self, full), own


def _started_in(smallest: Assignment, full: Weights) -> Weights:
    """Random tensors moved into a subspace, as large there as they were: √count makes up for taking means."""
    moved = dict(full)
    for name, projection in (smallest.projections or {}).items():
        if isinstance(projection, Hashed):
            counts = projection.counts(torch.arange(projection.size)).clamp(min=1)
            moved[name] = projection.recover(projection.reduce(full[name]) * counts.to(full[name].dtype).sqrt())
    return moved
