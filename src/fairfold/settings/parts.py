"""The tables that are no methods or algorithms: ``[data]``, ``[model]``, ``[fleet]``, ``[run]`` and ``[privacy]``."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fairfold.errors import nearest
from fairfold.protocol.plugins import registered
from fairfold.settings.base import Frozen
from fairfold.settings.pace import ClockSettings, PaceSettings
from fairfold.subspace import assign_groups, parse_scheme

OWN_MODEL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""How a model of one's own is named: ``package.module:Class``."""

SYNTHETIC = "synthetic"


class SyntheticData(Frozen):
    """The synthetic world: planted tastes over a catalogue whose popularity follows a power law.

    Attributes:
        kind: Of the data.
        users: Number of users.
        items: Size of the catalogue; items are numbered by falling planted popularity.
        interactions_per_user: Items that each user draws, training and test together.
        taste_strength: Standard deviation of the taste term of a score; 0 leaves popularity alone.
    """

    kind: Literal["synthetic"] = "synthetic"
    users: int = Field(600, ge=2, lt=2**40)
    items: int = Field(4_000, ge=10, lt=2**40)
    interactions_per_user: int = Field(100, ge=2, lt=2**40)
    taste_strength: float = Field(2.0, ge=0)

    @property
    def name(self) -> str:
        """Of the data."""
        return SYNTHETIC


class InteractionData(Frozen):
    """Users and what they touched or rated.

    Attributes:
        kind: Of the data.
        name: The name of a known data set, or a folder or file of your own.
        top_users: Keep only the users with most interactions; None keeps all.
        resplit: Pool the publisher's train and test sets and split again, 70 % of each user to train on.
        split_seed: Another number draws another split, where the publisher's is not kept.
        core: Keep users and items with at least this many interactions, until all have them.
        min_rating: Keep what is rated this high or higher, as likes; None keeps everything.
        user_column: Name of the column of users, or its place, counted from 1; None finds it by itself.
        item_column: Name or place of the column of items, likewise.
        rating_column: Name or place of the column of ratings, likewise.
        separator: What stands between the fields of a line; None finds it by itself.
    """

    kind: Literal["interactions"] = "interactions"
    name: str
    top_users: int | None = Field(None, ge=1, lt=2**62)
    resplit: bool = False
    split_seed: int = Field(0, ge=0, lt=2**62)
    core: int = Field(0, ge=0, lt=2**62)
    min_rating: float | None = None
    user_column: str | int | None = None
    item_column: str | int | None = None
    rating_column: str | int | None = None
    separator: str | None = None

    READING: ClassVar = ("split_seed", "core", "min_rating", "user_column", "item_column", "rating_column", "separator")

    def effective(self, *, changed: bool = False) -> dict[str, Any]:
        """See the base class; how a file is read is said where it is not the usual way."""
        found, usual = super().effective(changed=changed), type(self).model_fields
        return {key: of for key, of in found.items() if key not in self.READING or of != usual[key].default}

    @property
    def options(self) -> dict[str, Any]:
        """What is asked of ``prepare``."""
        asked = {key: getattr(self, key) for key in ("top_users", "resplit", *self.READING)}
        asked["seed"] = asked.pop("split_seed")
        return {key: value for key, value in asked.items() if value not in (None, False, 0)}


class ImageData(Frozen):
    """Images, how they are divided among devices, and how a network sees them.

    Attributes:
        kind: Of the data.
        name: The name of a known data set, or a folder of your own.
        split: ``"dirichlet"``: every label's images in shares drawn from a Dirichlet distribution; ``"writer"``: a
            device per writer, where the data names them.
        devices: Number of devices; one that is left without an image does not exist.
        concentration: Parameter of the distribution. Small values leave a device few labels.
        seed: The seed of the shares; None takes the run's.
        mean: Subtracted from every pixel, which is a number from 0 to 1. A constant that everybody knows, as no device
            can work out the mean of all.
        deviation: What the result is divided by.
    """

    NEEDS: ClassVar = dict.fromkeys(("devices", "concentration", "seed"), ("split", ("dirichlet",)))

    kind: Literal["images"] = "images"
    name: str
    split: Literal["dirichlet", "writer"] = "dirichlet"
    devices: int = Field(30, ge=1)
    concentration: float = Field(0.5, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**62)
    mean: float = Field(0.0, ge=0, le=1)
    deviation: float = Field(1.0, gt=0)


class DeviceData(Frozen):
    """What lies on real devices, each of which has its own: a run over a network says so of itself.

    Attributes:
        kind: Of the data.
        items: Size of the catalogue.
    """

    kind: Literal["devices"] = "devices"
    items: int = Field(ge=1, lt=2**40)

    @property
    def name(self) -> str:
        """Of the data."""
        return self.kind


DataSettings = SyntheticData | InteractionData | ImageData | DeviceData
DATA: dict[str, type[Frozen]] = {
    "synthetic": SyntheticData, "interactions": InteractionData, "images": ImageData, "devices": DeviceData,
}  # fmt: skip

RANKING_MODELS, RATING_MODELS, IMAGE_MODELS = ("mf", "neumf"), ("neumf-mlp",), ("mlp", "lenet")
MODELS = (*RANKING_MODELS, *RATING_MODELS, *IMAGE_MODELS)


class ModelSettings(Frozen):
    """What is learned.

    Attributes:
        kind: ``"mf"``, ``"neumf"`` (rankings), ``"neumf-mlp"`` (ratings), ``"mlp"`` or ``"lenet"`` (images), the name
            of a registered model, or a recommender of your own by where it can be imported from
            (``"package.module:Class"``, see :class:`fairfold.models.Recommender`).
        factors: d, numbers per item in each of its tables.
        item_bias: One number more per item, added to its score and 0 at first. Devices of all capacities hold it whole,
            beside their tables: n numbers more to hold, receive and send. Of a capacity in bytes the table gets what
            that leaves, a share such as 16x is one of the table.
        ratings: Whether a model of your own predicts ratings; otherwise it ranks. Of built-in models it is known.
    """

    kind: str = "mf"
    factors: int = Field(8, ge=1, lt=2**31)
    item_bias: bool = False
    ratings: bool = False

    @field_validator("kind")
    @classmethod
    def _known(cls, name: str) -> str:
        known = (*MODELS, *registered("model"))
        if name == "mf-ratings":
            raise ValueError("it is now algorithm.kind='ratings' (--recipe ratings)")
        if name not in known and not OWN_MODEL.fullmatch(name):
            near = nearest(name, known)
            raise ValueError(f"not one of {', '.join(map(repr, known))}, and not 'package.module:Class'{near}")
        return name

    def idle(self, key: str) -> bool:
        """See the base class."""
        if key == "factors":
            return self.reads_images
        if key == "item_bias":
            return self.kind != "mf"
        return key == "ratings" and not self.own

    def why_idle(self, key: str) -> str:  # noqa: ARG002
        """See the base class."""
        return f" with kind={self.kind!r}"

    @property
    def reads_images(self) -> bool:
        """Whether the model is one of images, and not a recommender."""
        return self.kind in IMAGE_MODELS

    @property
    def own(self) -> bool:
        """Whether the model is not one of ours."""
        return self.kind not in MODELS

    @property
    def predicts_ratings(self) -> bool:
        """Whether the model by itself is one of ratings, and not of rankings."""
        return self.ratings or self.kind in RATING_MODELS


class FaultSettings(Frozen):
    """Shares of a round's clients that fail, each in one way.

    Attributes:
        drop: The share that never answers.
        late: The share that answers when the round is over.
        nan: The share that sends NaN.
        infinite: The share that sends infinity.
        wrong_size: Send a vector of another length.
        out_of_range: Send values far from what they were sent.
    """

    drop: float = Field(0.0, ge=0, le=1)
    late: float = Field(0.0, ge=0, le=1)
    nan: float = Field(0.0, ge=0, le=1)
    infinite: float = Field(0.0, ge=0, le=1)
    wrong_size: float = Field(0.0, ge=0, le=1)
    out_of_range: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _at_most_everybody(self) -> Self:
        total = sum(self.model_dump().values())
        if total > 1 + 1e-9:
            raise ValueError(f"shares of faults that add up to {total:.3g}: at most 1")
        return self


class NetworkSettings(Frozen):
    """How a server waits for real devices; a simulation has none to wait for, and does not read this.

    Attributes:
        min_nodes: Nodes to wait for before a round.
        patience: Seconds to wait for them; then those who are there train.
        round_timeout: Seconds devices have to answer an order.
        ask_timeout: Seconds a device that is new has to say what it can hold.
        empty_rounds: A round to which nobody answers does not count and is tried again. After this many in a row the
            run ends with an error, and can be resumed; None never ends it.
        push: Give every device the final model of its size when training is done, to recommend by on its own.
    """

    min_nodes: int = Field(1, ge=1, lt=2**31)
    patience: float = Field(120.0, ge=0)
    round_timeout: float = Field(600.0, ge=0)
    ask_timeout: float = Field(60.0, ge=0)
    empty_rounds: int | None = Field(10, ge=1, lt=2**31)
    push: bool = True


class FleetSettings(Frozen):
    """Who takes part, with what size.

    Attributes:
        capacities: Capacity scheme; users, ordered by id, are split into as many near-equal groups.
        shares: How large these groups are, in any unit (``[1, 99]``); each has one user at least. None: near-equal.
        group_seed: Draw the users of each group by chance, with this seed, instead of by id.
        group_draw: The generator: ``"torch"``, or ``"numpy"`` (``RandomState(seed).shuffle``, the authors' code).
        clients_per_round: K, how many clients are drawn per round, or all where there are fewer; None takes everybody.
        replacement: Draw clients with replacement, as the authors' code does.
        faults: Shares of clients that fail, in a simulation.
        network: How a server waits for real devices.
        pace: When the server takes a step.
        clock: How long devices take, in a simulation.
    """

    capacities: str = "1x-4x-16x"
    shares: tuple[Annotated[float, Field(gt=0, lt=1e12)], ...] | None = None
    group_seed: int | None = Field(None, ge=0, lt=2**62)
    group_draw: Literal["torch", "numpy"] = "torch"
    clients_per_round: int | None = Field(60, ge=1, lt=2**62)
    replacement: bool = False
    faults: FaultSettings = FaultSettings()
    network: NetworkSettings = NetworkSettings()
    pace: PaceSettings = PaceSettings()
    clock: ClockSettings = ClockSettings()

    @field_validator("capacities")
    @classmethod
    def _readable_scheme(cls, scheme: str) -> str:
        parse_scheme(scheme)  # which says what is wrong
        return scheme

    @model_validator(mode="after")
    def _a_share_each(self) -> Self:
        if self.shares is not None and len(self.shares) != len(parse_scheme(self.capacities)):
            raise ValueError(f"shares = {self.shares} for {self.capacities}: one for each capacity")
        return self

    def groups(self, num_clients: int) -> Tensor:
        """Which of the scheme's capacities each client has."""
        many = len(parse_scheme(self.capacities))
        return assign_groups(num_clients, many, self.shares, self.group_seed, self.group_draw)

    def effective(self, *, changed: bool = False) -> dict[str, Any]:
        """See the base class."""
        found = super().effective(changed=changed)
        for name in ("faults", "network", "pace", "clock"):  # tables of their own, with what somebody changed
            part: Frozen = getattr(self, name)
            found.pop(name, None)
            if values := part.effective(changed=True):
                found[name] = values
        return found


class RunSettings(Frozen):
    """How long, how judged, and how the simulation works.

    Attributes:
        seed: The seed of everything random; the same settings and seed give the same numbers on the same hardware.
        rounds: T, how many rounds there are.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        top: k of NDCG@k (rankings).
        references: Whether ``fairfold train`` puts EASE, iALS and item-kNN beside a model of rankings: tuned on
            held-out training data, computed once per data set.
        patience: Stop when the quality has not risen for that many evaluations; None never stops early.
        threshold: Stop when the quality reaches this.
        backend: ``"loop"`` (the page that reads like the paper) or ``"batched"`` (the same numbers, fast).
        device: Where the simulation runs: ``"cuda"``, ``"cpu"``, or ``"auto"``: a GPU if there is one and the settings
            can use it.
        user_storage: Where ``fairfold train`` keeps private vectors: ``"memory"``, ``"disk"`` (files in the run's
            folder, mapped into memory), or ``"auto"``: on disk where a table would take over a quarter of the memory.
        log_format: The form of ``run.log``: ``"text"``, or ``"json"``, an object per line, for programs that collect
            logs.
    """

    seed: int = Field(0, ge=0, lt=2**62)
    rounds: int = Field(60, ge=1, lt=2**31)
    evaluate_every: int = Field(10, ge=1, lt=2**62)
    top: int = Field(20, ge=1, lt=2**31)
    references: bool = True
    patience: int | None = Field(None, ge=1, lt=2**62)
    threshold: float | None = None
    backend: Literal["loop", "batched"] = "batched"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    user_storage: Literal["auto", "memory", "disk"] = "auto"
    log_format: Literal["text", "json"] = "text"
