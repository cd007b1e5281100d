"""A federation on one machine: its plan, clients and data; loading of data and numbering of items."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

import fairfold.data  # its readers are reached through it, so that a device need not import them
from fairfold.config import Settings
from fairfold.config.fleet import DifferentialPrivacy
from fairfold.config.tables import DeviceData, ImageData, InteractionData, SyntheticData
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.data.interactions import PopularityCounts, items_at, ranks_of
from fairfold.data.partition import Partition, by_label, by_writer
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.federation.algorithm import COUNTS, NumbersItems, PrivateReleases
from fairfold.federation.architecture import Storage
from fairfold.federation.clients import Clients, ImageClients, serves_new_users
from fairfold.federation.noise import add_aggregate_noise, noise_headroom, simulation_noise
from fairfold.federation.plan import Plan
from fairfold.federation.plugin_check import check_plugins
from fairfold.federation.plugins import uses_plugins
from fairfold.federation.randomness import Purpose, draw_fault, generator, secure_groups
from fairfold.federation.robust import combined_statistics
from fairfold.federation.scheduling import ClientSampler
from fairfold.federation.updates import PublicStatistics, State
from fairfold.metrics.ranking import Scorer
from fairfold.privacy.fixed_point import Encoding, MeasuredUpdate, VectorLayout
from fairfold.subspace.projection import Hashed
from fairfold.typing import FLOAT_BYTES, Weights

BEST_POSSIBLE = "best possible"  # name of the baseline that knows how the synthetic data was drawn: an upper bound


@dataclass(frozen=True)
class Federation:
    """A simulated federation: the plan, the clients with their local state, and the data with its test part."""

    plan: Plan
    sampler: ClientSampler
    clients: Clients
    data: Dataset | ImageDataset

    @classmethod
    def of(
        cls, settings: Settings, data: Dataset | ImageDataset, public: PublicStatistics | None = None
    ) -> "Federation":
        """Build a federation, with statistics taken already if given; refused if settings and data do not agree."""
        if uses_plugins(settings):
            check_plugins(settings)
        if isinstance(data, ImageDataset):
            height, width = data.train.images.shape[1:]
            plan = Plan.of(settings, PublicStatistics(0), (height, width, data.num_classes))
            clients: Clients = ImageClients(plan, data, _partition_images(data, settings))
        else:
            _check_held_out_users(settings, data)
            plan = Plan.of(settings, collect_statistics(data, settings) if public is None else public)
            clients = Clients(plan, data.train, {})
        return cls(plan, ClientSampler.of(plan, clients.num_clients), clients, data)

    @classmethod
    def with_numbered_items(cls, settings: Settings, data: Dataset) -> "Federation":
        """Number the items as the settings ask and build the federation; statistics are taken once."""
        data, public = _number_items(data, settings)
        return cls.of(settings, data, public)

    def initial(self, storage: Storage | None = None) -> State:
        """The server's state before the first round; the clients get their initial local state."""
        state, local_state = self.plan.initial(storage)
        self.clients.local_state.update(local_state)
        return state

    @cached_property
    def evaluated_clients(self) -> Clients:
        """The clients whose users models are evaluated for: new ones where users are held out, else all."""
        if isinstance(self.data, ImageDataset) or self.data.held_out_users is None:
            return self.clients
        return Clients.new(self.plan, self.data.held_out_users.train)

    @property
    def interactions(self) -> Dataset:
        """The interactions of a recommender."""
        assert isinstance(self.data, Dataset)
        return self.data


def _check_held_out_users(settings: Settings, data: Dataset) -> None:
    algorithm = settings.algorithm
    if data.held_out_users is None or (serves_new_users(algorithm) and not settings.predicts_ratings):
        return
    kind = "of ratings" if settings.predicts_ratings else "which trains users' vectors"
    remedy = "Hold out interactions of every user (split = 'random'), or rank items by --recipe default, fair or paper."
    given = f"users who are held out, and algorithm.kind={algorithm.kind!r}, {kind}"
    raise InvalidSettings(given, "rankings by an algorithm that serves new users", remedy)


def _partition_images(data: ImageDataset, settings: Settings) -> Partition:
    chosen = settings.data
    assert isinstance(chosen, ImageData)
    if chosen.split == "dirichlet":
        seed = settings.run.seed if chosen.seed is None else chosen.seed
        return by_label(data.train.labels, chosen.clients, chosen.concentration, seed).without_empty()
    if data.train.writers is None:
        given = f"data.split='writer' on {data.name!r}, which does not name its writers"
        remedy = "Use --data qmnist-writers or femnist, or data.split='dirichlet'."
        raise InvalidSettings(given, "the writer of every image", remedy)
    return by_writer(data.train.writers).without_empty()


def load_federation(settings: Settings) -> tuple[Federation, dict[str, Scorer]]:
    """Load the data of a run, number its items, and build the federation; with the baselines that go with the data."""
    if isinstance(settings.data, ImageData):
        return Federation.of(settings, fairfold.data.load_images(settings.data.name)), {}
    data, best = load_unnumbered(settings)
    numbered = best and not settings.subspace.counts_items  # synthetic items are numbered by popularity already
    federation = (Federation.of if numbered else Federation.with_numbered_items)(settings, data)
    return federation, _baselines_of(federation.interactions, best)


def load_data(settings: Settings) -> tuple[Dataset | ImageDataset, dict[str, Scorer]]:
    """Load the data of a run, its items numbered, and its baselines."""
    if isinstance(settings.data, ImageData):
        return fairfold.data.load_images(settings.data.name), {}
    return load_interactions(settings)


def load_interactions(settings: Settings) -> tuple[Dataset, dict[str, Scorer]]:
    """Load the interactions of a recommender, its items numbered, and its baselines; refused for images."""
    data, best = load_unnumbered(settings)
    if not best or settings.subspace.counts_items:
        data = number_items(data, settings)
    return data, _baselines_of(data, best)


def _baselines_of(data: Dataset, best: Mapping[str, Scorer]) -> dict[str, Scorer]:
    return popularity_baseline(data) | (renumber_scorers(best, data) if data.counted is not None else dict(best))


def load_unnumbered(settings: Settings) -> tuple[Dataset, dict[str, Scorer]]:
    """Load interactions with the catalogue's own item numbers, as clients of a fleet have them."""
    chosen = settings.data
    if isinstance(chosen, DeviceData):
        given = "data.kind='devices', settings of a run over a network, whose data lies on its devices"
        raise InvalidSettings(given, "data that is here", "Name it with --data, or resume that run over its network.")
    if isinstance(chosen, InteractionData):
        options = chosen.options | ({"ratings": True} if settings.predicts_ratings else {})
        # A published validation set is not needed: the model and its baselines alike train on it and mask it.
        return fairfold.data.load(chosen.name, **options).with_validation(), {}
    if not isinstance(chosen, SyntheticData):
        given = f"model.kind={settings.model.kind!r}, which reads images, where only recommenders are served"
        remedy = "Use mf, neumf or neumf-mlp here; `fairfold train` serves images."
        raise InvalidSettings(given, "a model of interactions", remedy)
    if settings.predicts_ratings:
        given = "a model of ratings on the synthetic world"
        raise InvalidSettings(given, "data with ratings", "Use e.g. --data ml-100k, or rank items: --recipe fair.")
    world = SyntheticDataset(**chosen.model_dump(exclude={"kind"}), seed=settings.run.seed)
    return world.dataset(), {BEST_POSSIBLE: world.best_scores}


def popularity_baseline(data: Dataset | ImageDataset) -> dict[str, Scorer]:
    """The baseline that ranks items by their number of users."""
    if isinstance(data, ImageDataset):
        return {}
    popularity = data.train.counts_by_item.float()
    return {"popularity": lambda users: popularity.expand(len(users), -1)}


def collect_statistics(data: Dataset, settings: Settings) -> PublicStatistics:
    """Sum what clients contribute before the first round; counts of a separate count replace those of the sum."""
    statistics = sum_statistics(data, settings)
    if data.counted is not None and COUNTS in statistics:
        statistics = statistics | {COUNTS: data.counted.counts.double()}
    return PublicStatistics(data.num_items, data.num_users, statistics)


def sum_statistics(data: Dataset, settings: Settings) -> Weights:
    """Sum the clients' statistics; with noise under differential privacy, the same for the same seed."""
    everything = range(data.num_items)
    if (number := settings.fleet.secure_groups) > 1:
        group = secure_groups(settings, data.num_users)
        members = [data.train.of_users((group == one).nonzero().flatten()) for one in range(number)]
        sums = [settings.algorithm.client_statistics(settings, histories, everything) for histories in members]
        return combined_statistics(settings, sums).sums
    exact = settings.algorithm.client_statistics(settings, data.train, everything)
    if not isinstance(settings.privacy, DifferentialPrivacy):
        return exact.sums
    steps = {name: one.steps for name, one in settings.algorithm.statistics(settings).items() if one.steps is not None}
    num_clients = data.num_users
    layout = VectorLayout({0: {name: len(total) for name, total in exact.sums.items()}})
    encoding = Encoding(layout, 1.0, num_clients, steps, noise_headroom(settings, steps, num_clients))
    (segment,) = layout.segments
    draw = simulation_noise(settings, -1)
    total = encoding.encode(MeasuredUpdate(exact), 0, num_clients=num_clients)
    for name in exact.sums:
        if name in PrivateReleases.of(settings.algorithm).releases:
            total = add_aggregate_noise(settings, encoding, name, segment, num_clients, num_clients, total, draw)
    return encoding.decode({segment: total})[0].update.sums


def number_items(data: Dataset, settings: Settings) -> Dataset:
    """The data set with its items numbered as the settings ask: by counts, by the algorithm, or as they are."""
    return _number_items(data, settings)[0]


def _number_items(data: Dataset, settings: Settings) -> tuple[Dataset, PublicStatistics | None]:
    """The data set with its items numbered, and its statistics in the new numbers, where they were taken."""
    if settings.subspace.counts_items and data.counted is None:
        return number_items_by_counts(data, settings), None
    public = collect_statistics(data, settings)
    numbers = NumbersItems.of(settings.algorithm).numbering(Plan.of(settings, public))
    if numbers is None:
        return data, public
    order = numbers.argsort()
    kinds = settings.algorithm.statistics(settings)
    statistics = {name: of[order] if kinds[name].per_item else of for name, of in public.statistics.items()}
    counted = None
    if isinstance(settings.privacy, DifferentialPrivacy):  # what was released once is not asked for again
        users = data.num_users
        moved = users * data.num_items * FLOAT_BYTES
        counted = PopularityCounts(statistics[COUNTS], order.to(torch.int32), users, users, moved, moved)
    return data.renumbered(numbers, counted), replace(public, statistics=statistics)


def number_items_by_counts(data: Dataset, settings: Settings) -> Dataset:
    """Number items by a count that all participants are asked for once, and record its outcome and traffic."""
    train, num_items = data.train, data.num_items
    public = PublicStatistics(num_items, data.num_users, {COUNTS: train.counts_by_item.double()})
    asked = ClientSampler.of(Plan.of(settings, public), data.num_users).participants.tolist()
    draws = ((client, generator(settings, Purpose.COUNTING, 1, client)) for client in asked)
    counting = [client for client, source in draws if draw_fault(settings.fleet.faults, source) is None]
    if not counting:
        remedy = "Ask more devices, or take the catalogue's own order (popularity='catalogue')."
        raise InvalidData(f"a count to which 0 of {len(asked)} devices contributed", "at least one that does", remedy)
    contributes = torch.zeros(data.num_users, dtype=torch.bool)
    contributes[counting] = True
    counts = torch.bincount(train.items[contributes[train.users]], minlength=num_items)
    leading, numbers = popularity_order(counts, settings, data.num_users)
    ranked = torch.empty_like(counts)
    ranked[numbers] = counts
    down, up = (len(asked) * length * FLOAT_BYTES for length in (len(leading), num_items))
    return data.renumbered(numbers, PopularityCounts(ranked, leading, len(asked), len(counting), down, up))


def popularity_order(counts: Tensor, settings: Settings, users: int = 1) -> tuple[Tensor, Tensor]:
    """Items that own slots on some client that lacks others, by falling counts, and the new number of every item."""
    plan = Plan.of(settings, PublicStatistics(len(counts), users, {COUNTS: counts.double()}))
    owned = 0
    for held in plan.assignments(0):
        for name, (_, length) in plan.architecture.tables.items():
            projection = (held.projections or {}).get(name)
            if isinstance(projection, Hashed) and not projection.subspace.is_full:
                owned = max(owned, -(-projection.subspace.head // length))
    leading = counts.argsort(descending=True, stable=True)[:owned].to(torch.int32)
    return leading, ranks_of(torch.arange(len(counts)), leading)


def renumber_scorers(baselines: Mapping[str, Scorer], data: Dataset) -> dict[str, Scorer]:
    """Baselines that score the catalogue's own numbers, for the data set's."""
    assert data.counted is not None
    order = items_at(torch.arange(data.num_items), data.counted.leading)

    def renumbered(score: Scorer) -> Scorer:
        return lambda users: score(users)[:, order]

    return {name: renumbered(score) for name, score in baselines.items()}
