"""A federation on one machine: the plan, who takes part, their data, and what they are judged by."""

from dataclasses import dataclass

import fairfold.data  # its readers are reached through it, so that a device need not import them
from fairfold.data import Dataset
from fairfold.data.clients import Clients, by_label, by_writer
from fairfold.data.images import ImageDataset
from fairfold.data.synthetic import SyntheticWorld
from fairfold.errors import InvalidSettings
from fairfold.metrics.ranking import Scorer
from fairfold.protocol.dry_run import try_out
from fairfold.protocol.fleet import Fleet
from fairfold.protocol.people import ImagePeople, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.storage import Storage
from fairfold.protocol.words import Public, State
from fairfold.settings import Settings
from fairfold.settings.parts import DeviceData, ImageData, InteractionData, SyntheticData
from fairfold.simulate.numbering import numbered, public_of, renumbered_scores

BEST_POSSIBLE = "best possible"
"""The reference that knows what the synthetic world was drawn from: nobody can reach it."""


@dataclass(frozen=True)
class World:
    """A simulated federation: what all agree on, who takes part, their data, and the same with what is held back."""

    plan: Plan
    fleet: Fleet
    people: People
    data: Dataset | ImageDataset

    @classmethod
    def of(cls, settings: Settings, data: Dataset | ImageDataset) -> "World":
        """From settings and data; refused, before any work, where they do not go together."""
        try_out(settings)
        if isinstance(data, ImageDataset):
            height, width = data.train.images.shape[1:]
            plan = Plan.of(settings, Public(0), (height, width, data.num_classes))
            people: People = ImagePeople(plan, data, _divided(data, settings))
        else:
            plan = Plan.of(settings, public_of(data, settings))
            people = People(plan, data.train, {})
        return cls(plan, Fleet.of(plan, people.num_clients), people, data)

    def initial(self, storage: Storage | None = None) -> State:
        """The server's state before the first round; the users' vectors go to where they live."""
        state, own = self.plan.initial(storage)
        self.people.private.update(own)
        return state

    @property
    def interactions(self) -> Dataset:
        """The data of a recommender."""
        assert isinstance(self.data, Dataset)
        return self.data


def _divided(data: ImageDataset, settings: Settings) -> Clients:
    chosen = settings.data
    assert isinstance(chosen, ImageData)
    if chosen.split == "dirichlet":
        seed = settings.run.seed if chosen.seed is None else chosen.seed
        return by_label(data.train.labels, chosen.devices, chosen.concentration, seed).without_empty()
    if data.train.writers is None:
        given = f"data.split='writer' on {data.name!r}, which does not name its writers"
        remedy = "Use --data qmnist-writers or femnist, or data.split='dirichlet'."
        raise InvalidSettings(given, "the writer of every image", remedy)
    return by_writer(data.train.writers).without_empty()


def load_data(settings: Settings) -> tuple[Dataset | ImageDataset, dict[str, Scorer]]:
    """What a run trains on, and the reference rows that go with it."""
    if isinstance(settings.data, ImageData):
        return fairfold.data.load_images(settings.data.name), {}
    return load_interactions(settings)


def load_interactions(settings: Settings) -> tuple[Dataset, dict[str, Scorer]]:
    """What a recommender trains on, and its reference rows; refused for models of images."""
    data, best = load_catalogued(settings)
    if best and not settings.subspace.counted:  # a synthetic world is numbered by popularity as it is
        return data, popularity_of(data) | best
    data = numbered(data, settings)
    return data, popularity_of(data) | (renumbered_scores(best, data) if best else {})


def load_catalogued(settings: Settings) -> tuple[Dataset, dict[str, Scorer]]:
    """The same in the catalogue's own numbers: where real devices number the items themselves."""
    chosen = settings.data
    if isinstance(chosen, DeviceData):
        raise InvalidSettings(
            "data.kind='devices', settings of a run over a network, whose data lies on its devices",
            "data that is here", "Name it with --data, or go on with that run over its network.",
        )  # fmt: skip
    if isinstance(chosen, InteractionData):
        options = chosen.options | ({"ratings": True} if settings.predicts_ratings else {})
        # Nothing here is chosen by a published validation set: model and references alike train on it and mask it.
        return fairfold.data.load(chosen.name, **options).with_validation(), {}
    if not isinstance(chosen, SyntheticData):
        raise InvalidSettings(
            f"model.kind={settings.model.kind!r}, which reads images, where only recommenders are served",
            "a model of interactions", "Use mf, neumf or neumf-mlp here; `fairfold train` serves images.",
        )  # fmt: skip
    if settings.predicts_ratings:
        raise InvalidSettings(
            "a model of ratings on the synthetic world", "data with ratings", "Use e.g. --data ml-1m."
        )
    world = SyntheticWorld(**chosen.model_dump(exclude={"kind"}), seed=settings.run.seed)
    return world.dataset(), {BEST_POSSIBLE: world.best_scores}


def popularity_of(data: Dataset | ImageDataset) -> dict[str, Scorer]:
    """The reference that learns nothing."""
    if isinstance(data, ImageDataset):
        return {}
    popularity = data.train.counts_by_item.float()
    return {"popularity": lambda users: popularity.expand(len(users), -1)}
