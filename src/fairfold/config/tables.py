"""The tables ``[data]``, ``[model]`` and ``[run]``, and the base of all: frozen, checked, without inactive keys."""

import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fairfold.errors import did_you_mean
from fairfold.federation.plugins import registered

NONE = "none"
"""How a TOML file writes None: ``clients_per_round = "none"`` takes all clients."""

INACTIVE = "inactive_key"
"""Type of the validation error for a key that has no effect beside the others."""


class FrozenSettings(BaseModel):
    """A table of settings: immutable, without unknown keys and without inactive ones.

    Attributes:
        ACTIVE_WHEN: Keys that have an effect only under some values of another key: that key, and those values.
        DEFAULTS: Defaults of the other tables that go with this one, by table and key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    ACTIVE_WHEN: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {}
    DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:  # noqa: ARG003
        """``DEFAULTS``, and what depends on the tables that were given, which may not be valid."""
        return cls.DEFAULTS

    @model_validator(mode="before")
    @classmethod
    def _parse_none(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        nullable = {key for key, field in cls.model_fields.items() if NoneType in get_args(field.annotation)}
        return {key: None if value == NONE and key in nullable else value for key, value in values.items()}

    @model_validator(mode="after")
    def _refuse_inactive_keys(self) -> Self:
        for key in type(self).model_fields:
            if key in self.model_fields_set and self.is_inactive(key):
                raise PydanticCustomError(INACTIVE, "inactive key{why}", {"key": key, "why": self.why_inactive(key)})
        return self

    def is_inactive(self, key: str) -> bool:
        """Whether a key has no effect beside the others."""
        if key not in self.ACTIVE_WHEN:
            return False
        other, values = self.ACTIVE_WHEN[key]
        return self.is_inactive(other) or getattr(self, other) not in values

    def why_inactive(self, key: str) -> str:
        """The end of the error message of an inactive key: the key that it depends on."""
        other, values = self.ACTIVE_WHEN[key]
        return f" with {other}={getattr(self, other)!r}: it needs {' or '.join(map(repr, values))}"

    def effective(self, *, changed: bool = False) -> dict[str, Any]:
        """Active keys with JSON-compatible values; with ``changed`` only those that differ from their defaults."""
        values = self.model_dump(mode="json", exclude_defaults=changed)
        return {key: value for key, value in values.items() if not self.is_inactive(key)}


CUSTOM_MODEL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""How a model outside fairfold is named: ``package.module:Class``."""

SYNTHETIC = "synthetic"


class SyntheticData(FrozenSettings):
    """Synthetic interactions: planted tastes over a catalogue whose popularity follows a power law.

    Attributes:
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
        """Name of the data set."""
        return SYNTHETIC


class InteractionData(FrozenSettings):
    """Interactions of users with items, perhaps with ratings.

    Attributes:
        name: The name of a known data set, or a folder or file of your own.
        top_users: Keep only the users with most interactions; None keeps all.
        resplit: Pool the publisher's train and test sets and split again.
        split: What is held out, where the publisher's split is not kept: ``"random"`` three tenths of each user,
            ``"newest"`` the newest interaction of each user, ``"newest-share"`` the newest three tenths, ``"users"`` a
            tenth of the users, who do not train and are ranked for from seven tenths of their interactions.
        split_seed: Another number draws another random split.
        core: Keep users and items with at least this many interactions, until all have them.
        min_rating: Keep what is rated this high or higher, as likes; None keeps everything.
        user_column: Name of the column of users, or its place, counted from 1; None finds it by itself.
        item_column: Name or place of the column of items, likewise.
        rating_column: Name or place of the column of ratings, likewise.
        time_column: Name or place of the column of times, likewise.
        separator: What stands between the fields of a line; None finds it by itself.
    """

    kind: Literal["interactions"] = "interactions"
    name: str
    top_users: int | None = Field(None, ge=1, lt=2**62)
    resplit: bool = False
    split: Literal["random", "newest", "newest-share", "users"] = "random"
    split_seed: int = Field(0, ge=0, lt=2**62)
    core: int = Field(0, ge=0, lt=2**62)
    min_rating: float | None = None
    user_column: str | int | None = None
    item_column: str | int | None = None
    rating_column: str | int | None = None
    time_column: str | int | None = None
    separator: str | None = None

    ACTIVE_WHEN: ClassVar = {"split_seed": ("split", ("random", "users"))}
    READING: ClassVar = (
        "split", "split_seed", "core", "min_rating", "user_column", "item_column", "rating_column", "time_column",
        "separator",
    )  # fmt: skip

    def effective(self, *, changed: bool = False) -> dict[str, Any]:
        values = super().effective(changed=changed)
        fields = type(self).model_fields
        return {key: of for key, of in values.items() if key not in self.READING or of != fields[key].default}

    @property
    def options(self) -> dict[str, Any]:
        """Options of :func:`fairfold.data.prepare`."""
        options = {key: getattr(self, key) for key in ("top_users", "resplit", *self.READING)}
        options["seed"] = options.pop("split_seed")
        return {key: value for key, value in options.items() if value not in (None, False, 0, "random")}


class ImageData(FrozenSettings):
    """Images, how they are divided among clients, and how they are normalized.

    Attributes:
        name: The name of a known data set, or a folder of your own.
        split: ``"dirichlet"``: every label's images in shares drawn from a Dirichlet distribution; ``"writer"``: a
            device per writer, where the data names them.
        clients: Number of devices; one that is left without an image does not exist.
        concentration: Parameter of the distribution. Small values leave a device few labels.
        seed: The seed of the shares; None takes the run's.
        mean: Subtracted from every pixel, which is a number from 0 to 1. A public constant, as no client can compute
            the mean of all.
        deviation: What the result is divided by.
    """

    ACTIVE_WHEN: ClassVar = dict.fromkeys(("clients", "concentration", "seed"), ("split", ("dirichlet",)))

    kind: Literal["images"] = "images"
    name: str
    split: Literal["dirichlet", "writer"] = "dirichlet"
    clients: int = Field(30, ge=1)
    concentration: float = Field(0.5, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**62)
    mean: float = Field(0.0, ge=0, le=1)
    deviation: float = Field(1.0, gt=0)


class DeviceData(FrozenSettings):
    """Interactions that lie on real devices, each with its own: the data of a run over a network.

    Attributes:
        items: Size of the catalogue.
    """

    kind: Literal["devices"] = "devices"
    items: int = Field(ge=1, lt=2**40)

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self.kind


DataSettings = SyntheticData | InteractionData | ImageData | DeviceData
DATA: dict[str, type[FrozenSettings]] = {
    "synthetic": SyntheticData, "interactions": InteractionData, "images": ImageData, "devices": DeviceData,
}  # fmt: skip

RANKING_MODELS, RATING_MODELS, IMAGE_MODELS = ("mf", "neumf"), ("neumf-mlp",), ("mlp", "lenet")
MODELS = (*RANKING_MODELS, *RATING_MODELS, *IMAGE_MODELS)


class ModelSettings(FrozenSettings):
    """``[model]``: the kind of model and its size.

    Attributes:
        kind: ``"mf"``, ``"neumf"`` (rankings), ``"neumf-mlp"`` (ratings), ``"mlp"`` or ``"lenet"`` (images), the name
            of a registered model, or a recommender of your own by where it can be imported from
            (``"package.module:Class"``, see :class:`fairfold.models.Recommender`).
        factors: d, numbers per item in each of its tables.
        depth: Layers of NeuMF's network, each half as wide as what it reads; its tables are that much wider.
        dropout: Share of the inputs of each of NeuMF's layers that a training step leaves out. With it, clients train
            in plain PyTorch, one after the other.
        item_bias: One more number per item, added to its score and 0 at first. Devices of all capacities hold it whole,
            beside their tables: n numbers more to hold, receive and send. Of a capacity in bytes the table gets what
            that leaves, a share such as 16x is one of the table.
        ratings: Whether a model of your own predicts ratings; otherwise it ranks. Built-in models decide it themselves.
    """

    kind: str = "mf"
    factors: int = Field(8, ge=1, lt=2**31)
    depth: int = Field(1, ge=1, le=8)
    dropout: float = Field(0.0, ge=0, lt=1)
    item_bias: bool = False
    ratings: bool = False

    @field_validator("kind")
    @classmethod
    def _require_known_model(cls, name: str) -> str:
        known = (*MODELS, *registered("model"))
        if name not in known and not CUSTOM_MODEL.fullmatch(name):
            near = did_you_mean(name, known)
            raise ValueError(f"not one of {', '.join(map(repr, known))}, and not 'package.module:Class'{near}")
        return name

    def is_inactive(self, key: str) -> bool:
        if key == "factors":
            return self.reads_images
        if key in ("depth", "dropout"):
            return self.kind != "neumf"
        if key == "item_bias":
            return self.kind != "mf"
        return key == "ratings" and not self.is_custom

    def why_inactive(self, key: str) -> str:  # noqa: ARG002
        return f" with kind={self.kind!r}"

    @property
    def reads_images(self) -> bool:
        """Whether the model is one of images, and not a recommender."""
        return self.kind in IMAGE_MODELS

    @property
    def is_custom(self) -> bool:
        """Whether the model is not one of ours."""
        return self.kind not in MODELS

    @property
    def predicts_ratings(self) -> bool:
        """Whether the model by itself is one of ratings, and not of rankings."""
        return self.ratings or self.kind in RATING_MODELS


class RunSettings(FrozenSettings):
    """How long a run takes, how it is evaluated, and how the simulation works.

    Attributes:
        seed: The seed of everything random; the same settings and seed give the same numbers on the same hardware.
        rounds: T, how many rounds there are.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        top: k of NDCG@k (rankings).
        baselines: Whether ``fairfold train`` puts EASE, iALS and item-kNN beside a model of rankings: tuned on
            held-out training data, computed once per data set.
        patience: Stop when the quality has not risen for that many evaluations; None never stops early.
        threshold: Stop when the quality reaches this.
        backend: ``"sequential"`` (the page that reads like the paper) or ``"batched"`` (the same numbers, fast).
        device: Where the simulation runs: ``"cuda"``, ``"cpu"``, or ``"auto"``: a GPU if there is one and the settings
            can use it.
        user_storage: Where ``fairfold train`` keeps private vectors: ``"memory"``, ``"disk"`` (files in the run's
            folder, mapped into memory), or ``"auto"``: on disk where a table would take over a quarter of the memory.
        table_storage: Where the server keeps item tables: in ``"memory"``, or on ``"disk"``, where a round costs what
            its clients hold and touch (gradient steps and the delta rule, docs/runs.md).
        log_format: The form of ``run.log``: ``"text"``, or ``"json"``, an object per line, for programs that collect
            logs.
    """

    seed: int = Field(0, ge=0, lt=2**62)
    rounds: int = Field(60, ge=1, lt=2**31)
    evaluate_every: int = Field(10, ge=1, lt=2**62)
    top: int = Field(20, ge=1, lt=2**31)
    baselines: bool = True
    patience: int | None = Field(None, ge=1, lt=2**62)
    threshold: float | None = None
    backend: Literal["sequential", "batched"] = "batched"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    user_storage: Literal["auto", "memory", "disk"] = "auto"
    table_storage: Literal["memory", "disk"] = "memory"
    log_format: Literal["text", "json"] = "text"
