"""Settings of a federation: frozen, checked before any work, the same as the content of a TOML file."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.federation.defaults import (
    IMAGE_DEFAULTS,
    IMAGE_MODELS,
    LEAST_SQUARES_DEFAULTS,
    MODELS,
    OWN_MODEL,
    RATING_DEFAULTS,
    RATING_MODELS,
    SERVER_STEP_KEYS,
    SOLVED_MODELS,
)
from fairfold.federation.setting_tables import FaultSettings, Frozen, ImageSettings, WorldSettings
from fairfold.subspace import parse_scheme


class Settings(Frozen):
    """Everything that decides a run.

    Attributes:
        data: What to train on: ``"synthetic"``, the name of a known data set, or a folder or file of one's own.
        top_users: Keep only the users with most interactions; None keeps all.
        resplit: Pool the publisher's train and test sets and split anew, 70 % of each user to train on.
        world: The synthetic world, where ``data`` is that.
        seed: Of everything random; the same settings and seed give the same numbers on the same hardware.
        images: Who holds which images, where the model reads images.
        model: ``"mf"``, ``"neumf"`` (rankings), ``"mf-ratings"`` (ratings: biases and tastes, by least squares alone),
            ``"neumf-mlp"`` (ratings), ``"mlp"`` or ``"lenet"`` (images), or a recommender of one's own, by where it can
            be imported from (``"package.module:Class"``, see :class:`fairfold.models.Recommender`). The third and the
            images' have defaults of their own, ``RATING_DEFAULTS`` and ``IMAGE_DEFAULTS``.
        ratings: Whether a model of one's own predicts ratings; else it ranks. Of the others it is known.
        factors: d, numbers an item in each of its tables.
        item_bias: One number more an item, added to its score and 0 at first. Devices of all capacities hold it whole,
            beside their tables: n numbers more to hold, receive and send. Of a capacity in bytes the table gets what
            that leaves, a share such as 16x is one of the table (``"mf"`` with gradient steps).
        initial_spread: Standard deviation of the tables before training; None takes the model's own.
        method: ``"fair"`` (FAIR-HET), ``"fair_hom"`` (everybody at the smallest size), ``"full_trn"`` (only devices
            that hold the full model), ``"fedavg"`` (everybody holds it), ``"fedhm"`` (low rank), ``"heterofl"``
            (leading columns), ``"inconsistent"`` (an independent hash a client), ``"central"`` (no federation: all
            data in one place).
        capacities: Capacity scheme; users, ordered by id, are split into as many near-equal groups.
        shares: How large these groups are, in any unit (``[1, 99]``); each has one user at least. None: near-equal.
        group_seed: Draw the users of each group by chance, with this seed, instead of by id.
        size_rule: How capacities become sizes: ``"fitted"``, or the paper's powers of two, ``"paper"``.
        rank_rule: FedHM's rank at a capacity: ``"budget"``, the largest whose two factors fit, or ``"share"``, that
            share of the columns, which goes over the budget by the small factor.
        mapping: ``"element"``, ``"chunk"`` or ``"ranked"``.
        popularity: Where the order of ``"ranked"`` comes from: ``"catalogue"``, its numbers are a public order;
            ``"counts"``, they mean nothing, and devices count before the first round, as sums under masks
            (docs/beyond.md); ``"none"``, there is no order, and ``"ranked"`` falls back to ``"element"``, or to
            ``"chunk"`` with least squares.
        tail_share: The tail that unpopular items share has one length for all devices, this share of the smallest
            size; all else is owned by popular items. None: each size is half owned, half shared (ranked only).
        support: An item owns slots only if at least this many users have it: no device holds more than that needs,
            whatever its capacity (ranked only; 0: no limit).
        reference_factors: Capacities are shares of a table of this many factors instead of ``factors``, so that longer
            rows can be had for the same bytes; None: of the table itself.
        chunk: Z, how many neighbouring coordinates share one hash (docs/decisions/chunk.md); the element mapping has 1.
        sign: Random signs.
        rehash: A new hash every round, as in the paper's Algorithm 1, or one for the whole run.
        start: Where a hashed network of images starts: ``"full"``, at random in the full space, so that the smallest
            device, which gets means of many such numbers, starts close to zero; or ``"subspace"``, at random in the
            subspace of the smallest device, so that every size starts with numbers as large as they should be.
        compress: ``"tables"``: item tables; ``"all"``: every tensor of the model, each in a subspace of its own;
            ``"model"``: all tensors as one vector, so that weights of any layer share slots with those of any other
            (images only).
        user_vectors: ``"private"``: stay on the device; ``"uploaded"``: sent and averaged, as the authors' code does.
        user_storage: Where ``fairfold train`` keeps private vectors: ``"memory"``, ``"disk"`` (files in the run's
            folder, mapped into memory), or ``"auto"``: on disk where a table would take over a quarter of the memory.
        broadcast: The server sends θ to all and each device projects it as it streams by, instead of sending ψ.
        rounds: T.
        clients_per_round: K; None takes everybody.
        replacement: Draw clients with replacement, as the authors' code does.
        weighting: Clients count by their number of samples (``"data"``, the paper), alike (``"equal"``), or by a power
            of that number in between (0.5; 1 is ``"data"`` and 0 ``"equal"``).
        solver: What a device computes: ``"gradient"`` (E epochs of gradient steps), ``"closed_form"`` (the user's
            vector solved exactly, one step on the whole catalogue) or ``"least_squares"`` (the user's vector solved
            exactly, the items by the server from sums of them; docs/beyond.md). The last two are for ``"mf"`` with
            private vectors; other models take the first where nothing is said. The last has defaults of its own,
            ``LEAST_SQUARES_DEFAULTS``, and no use for optimisers.
        objective: What gradient steps make small where items are ranked: ``"bpr"`` (an item the user touched scores
            above each one drawn for it), ``"softmax"`` (it is the one to choose among these) or ``"squared"`` (squared
            error over the whole catalogue, of which those drawn are a sample); docs/beyond.md.
        local_epochs: E.
        batch_size: Samples a step.
        shuffle: New order of the samples every epoch.
        negatives: Items the user did not touch, drawn for each one they did.
        regulariser: Weight of the squared norm of the vectors a sample uses (rankings).
        local_optimiser: ``"sgd"``, ``"adagrad"`` or ``"adam"``, fresh every round.
        local_step: Its step size.
        prox: μ of FedProx: ½μ‖S(ψ − ψ_sent)‖² is added to the loss.
        unobserved_weight: What an item the user did not touch counts, against 1 for one they did (closed form, and
            gradient steps on ``objective="squared"``).
        ridge: Pull of the user's vector towards zero (closed form); with least squares that of users' and items' alike,
            in units of the mean eigenvalue of what is inverted; for ratings that of the items' tastes, in
            imagined ratings.
        damping: Imagined ratings without any bias that draw the biases of users and items to zero (``"mf-ratings"``).
        alike: Number the items so that those which share a row have similar mean ratings (``"mf-ratings"``, ranked).
            Needs sums of ratings beside the counts, so it is left out where ``popularity`` is not ``"catalogue"``.
        streamed: The server's rows stream by: a device also receives as many rows of the full table as its own has,
            others every round, speaks of these, and keeps those of its own items (``"mf-ratings"``; docs/beyond.md).
        aggregation: ``"paper"``: θ ← Σ pᵢ Sᵢψᵢ′. ``"delta"``: θ ← θ + what the optimiser makes of Σ pᵢ Sᵢ(ψᵢ′ − ψᵢ).
        server_optimiser: For the delta rule: ``"sgd"``, ``"momentum"``, ``"adam"``, ``"yogi"`` or ``"adagrad"``.
        server_step: Its step size, η.
        step_per: What a step is for: a ``"round"``, so that the clients' mean change is what counts, however many they
            are; or a ``"client"``, η times the clients of a round, so that as many visits go as far in fewer rounds
            (docs/beyond.md).
        faults: Shares of clients that fail.
        largest_change: A reply in which a number differs by more than this from what was sent is refused.
        backend: ``"loop"`` (the page that reads like the paper) or ``"batched"`` (the same numbers, fast).
        device: Where the simulation runs: ``"cuda"``, ``"cpu"``, or ``"auto"``: a GPU if there is one and the settings
            can use it.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        top: k of NDCG@k.
        patience: Stop when the quality has not risen for that many evaluations; None never stops early.
        threshold: Stop when the quality reaches this.
    """

    data: str = "synthetic"
    top_users: int | None = Field(None, ge=1)
    resplit: bool = False
    world: WorldSettings = WorldSettings()
    seed: int = Field(0, ge=0, lt=2**62)
    images: ImageSettings = ImageSettings()
    model: str = "mf"
    ratings: bool = False
    factors: int = Field(8, ge=1)
    item_bias: bool = False
    initial_spread: float | None = Field(0.1, gt=0)
    method: Literal["fair", "fair_hom", "full_trn", "fedavg", "fedhm", "heterofl", "inconsistent", "central"] = "fair"
    capacities: str = "1x-4x-16x"
    shares: tuple[float, ...] | None = None
    group_seed: int | None = Field(None, ge=0)
    size_rule: Literal["fitted", "paper"] = "fitted"
    rank_rule: Literal["budget", "share"] = "budget"
    mapping: Literal["element", "chunk", "ranked"] = "ranked"
    popularity: Literal["catalogue", "counts", "none"] = "catalogue"
    tail_share: float | None = Field(None, gt=0, lt=1)
    support: int = Field(0, ge=0)
    reference_factors: int | None = Field(None, ge=1)
    chunk: int = Field(8, ge=1)
    sign: bool = True
    rehash: bool = False
    start: Literal["full", "subspace"] = "full"
    compress: Literal["tables", "all", "model"] = "tables"
    user_vectors: Literal["private", "uploaded"] = "private"
    user_storage: Literal["auto", "memory", "disk"] = "auto"
    broadcast: bool = False
    rounds: int = Field(60, ge=1)
    clients_per_round: int | None = Field(60, ge=1)
    replacement: bool = False
    weighting: Literal["data", "equal"] | Annotated[float, Field(ge=0, le=1)] = "equal"
    solver: Literal["gradient", "closed_form", "least_squares"] = "closed_form"
    objective: Literal["bpr", "softmax", "squared"] = "bpr"
    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(512, ge=1)
    shuffle: bool = True
    negatives: int = Field(1, ge=1)
    regulariser: float = Field(1e-6, ge=0)
    local_optimiser: Literal["sgd", "adagrad", "adam"] = "sgd"
    local_step: float = Field(1.0, gt=0)
    prox: float = Field(0.0, ge=0)
    unobserved_weight: float = Field(0.5, gt=0, le=1)
    ridge: float = Field(1.0, ge=0)
    damping: float = Field(5.0, gt=0)
    alike: bool = False
    streamed: bool = False
    aggregation: Literal["paper", "delta"] = "delta"
    server_optimiser: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = "adam"
    server_step: float = Field(0.03, gt=0)
    step_per: Literal["round", "client"] = "round"
    faults: FaultSettings = FaultSettings()
    largest_change: float = Field(1e4, gt=0)
    backend: Literal["loop", "batched"] = "batched"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    evaluate_every: int = Field(10, ge=1)
    top: int = Field(20, ge=1)
    patience: int | None = Field(None, ge=1)
    threshold: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_model(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("model") in IMAGE_MODELS:
            return IMAGE_DEFAULTS | dict(values)
        popularity = values.get("popularity", "catalogue")
        if values.get("model", "mf") not in SOLVED_MODELS:
            values = {"solver": "gradient"} | dict(values)
        if values.get("model") == "mf-ratings":
            values = RATING_DEFAULTS | {"alike": popularity == "catalogue"} | dict(values)
        if values.get("solver") == "least_squares":
            own = LEAST_SQUARES_DEFAULTS | dict(values)
            values = {"chunk": own["factors"]} | own
        if popularity == "none" and values.get("mapping", "ranked") == "ranked":
            whole_rows = values.get("solver") == "least_squares"
            values = dict(values) | {"mapping": "chunk" if whole_rows else "element"}
        return values

    @field_validator("model")
    @classmethod
    def _known_model(cls, name: str) -> str:
        if name not in MODELS and not OWN_MODEL.fullmatch(name):
            raise ValueError(f"not one of {', '.join(map(repr, MODELS))}, and not 'package.module:Class'")
        return name

    @field_validator("capacities")
    @classmethod
    def _readable_scheme(cls, scheme: str) -> str:
        try:
            parse_scheme(scheme)
        except FairfoldError as error:
            raise ValueError(str(error)) from None
        return scheme

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.reads_images:
            self._fits_images()
        elif self.compress == "model":
            raise ValueError("compress='model' is for models of images: use 'tables' or 'all'")
        elif self.start == "subspace":
            raise ValueError("start='subspace' is for models of images: tables start small anyway")
        if self.shares is not None and (
            len(self.shares) != len(parse_scheme(self.capacities)) or not all(share > 0 for share in self.shares)
        ):
            raise ValueError(f"shares = {self.shares} for {self.capacities}: one above 0 for each capacity")
        if self.solver != "gradient":
            served = ("mf", "mf-ratings") if self.solver == "least_squares" else ("mf",)
            if self.model not in served or self.user_vectors != "private":
                words = " or ".join(map(repr, served))
                raise ValueError(f"solver={self.solver!r} needs model={words} and user_vectors='private'")
            if self.method not in ("fair", "fair_hom", "full_trn", "fedavg", "central"):
                raise ValueError(f"solver={self.solver!r} does not serve method={self.method!r}: use solver='gradient'")
        if self.objective != "bpr" and (self.solver != "gradient" or self.reads_images or self.predicts_ratings):
            raise ValueError(
                f"objective={self.objective!r} is for gradient steps that rank items: use solver='gradient' and "
                "model='mf', 'neumf' or one of one's own"
            )
        if self.item_bias and (self.model != "mf" or self.solver != "gradient"):
            raise ValueError(
                f"item_bias=true needs model='mf' and solver='gradient', not {self.model!r} and {self.solver!r} "
                "(a model of one's own makes a table of one column, which is compressed like the others)"
            )
        if self.solver == "least_squares":
            self._fits_least_squares()
        if (self.support or self.reference_factors) and self.model not in ("mf", "mf-ratings", "neumf"):
            raise ValueError(
                "support and reference_factors are for model='mf', 'mf-ratings' and 'neumf', whose tables have rows of "
                "that many factors"
            )
        if self.ratings and not self.own_model:
            raise ValueError(f"ratings=true is for models of one's own: what model={self.model!r} predicts is known")
        if self.own_model and self.method == "heterofl":
            raise ValueError("method='heterofl' has to know which layers read a table's columns: use a built-in model")
        if self.popularity == "counts":
            self._fits_counts()
        if self.model == "mf-ratings":
            self._fits_ratings()
        elif self.alike or self.streamed:
            raise ValueError("alike=true and streamed=true need model='mf-ratings'")
        if self.step_per == "client" and (self.aggregation != "delta" or self.clients_per_round is None):
            raise ValueError("step_per='client' needs aggregation='delta' and a number of clients_per_round")
        if self.method == "fedhm" and self.aggregation == "delta":
            raise ValueError("method='fedhm' averages models: use aggregation='paper'")
        return self

    def _fits_least_squares(self) -> None:
        if self.mapping == "element" or self.chunk != self.factors or self.sign:
            raise ValueError(
                "solver='least_squares' folds whole rows: use mapping='ranked' or 'chunk', chunk=factors and sign=false"
            )
        if self.rehash or self.aggregation != "delta" or self.compress != "tables":
            raise ValueError("solver='least_squares' needs rehash=false, aggregation='delta' and compress='tables'")
        given = [key for key in SERVER_STEP_KEYS if getattr(self, key) != type(self).model_fields[key].default]
        if given:
            raise ValueError(
                f"{' and '.join(given)} with solver='least_squares', where the server solves and takes no steps: leave "
                f"{'them' if len(given) > 1 else 'it'} out, or use solver='closed_form' or 'gradient'"
            )

    def _fits_ratings(self) -> None:
        if self.solver != "least_squares":
            raise ValueError("model='mf-ratings' needs solver='least_squares'; 'neumf-mlp' has gradient steps")
        if self.factors < 2 or not self.ridge:
            raise ValueError("model='mf-ratings' needs factors >= 2 (a bias, a taste) and a ridge above 0")
        if self.weighting != "data":
            raise ValueError("model='mf-ratings' counts every rating alike: use weighting='data'")
        if self.alike and self.mapping != "ranked":
            raise ValueError("alike=true is about the tail that unpopular items share: use mapping='ranked'")

    def _fits_counts(self) -> None:
        if self.mapping != "ranked" or self.method in ("fedhm", "heterofl"):
            raise ValueError(
                "popularity='counts' is for methods with subspaces of mapping='ranked': nothing else needs it"
            )
        if self.alike:
            raise ValueError(
                "popularity='counts' sums counts alone, and alike=true asks for sums of ratings: use alike=false"
            )

    def _fits_images(self) -> None:
        if self.data == "synthetic":
            raise ValueError(f"model={self.model!r} reads images: name them with data, e.g. data='mnist'")
        if self.solver != "gradient":
            raise ValueError(f"model={self.model!r} needs solver='gradient'")
        if self.compress == "tables":
            raise ValueError(f"model={self.model!r} has no item tables: use compress='all' or 'model'")
        if self.method == "central":
            raise ValueError(
                f"method='central' does not serve model={self.model!r}: one device that holds all images is central "
                "training (method='fedavg', images.devices=1, clients_per_round=1)"
            )
        if self.mapping == "ranked":
            raise ValueError(f"weights of model={self.model!r} have no order of popularity: use mapping='chunk'")
        if self.method in ("fedhm", "heterofl") and self.compress != "all":
            raise ValueError(f"method={self.method!r} works layer by layer: use compress='all'")

    def weight(self, samples: float) -> float:
        """What a client with so many samples counts, pᵢ before all are divided by their sum."""
        power = {"data": 1.0, "equal": 0.0}.get(self.weighting, self.weighting)  # type: ignore[arg-type]
        return float(samples**power)

    @property
    def reads_images(self) -> bool:
        """Whether the model is one of images, and not a recommender."""
        return self.model in IMAGE_MODELS

    @property
    def own_model(self) -> bool:
        """Whether the model is not one of ours."""
        return ":" in self.model

    @property
    def metric(self) -> str:
        """Name of the quality."""
        if self.reads_images:
            return "accuracy"
        return "MSE" if self.predicts_ratings else f"NDCG@{self.top}"

    @property
    def predicts_ratings(self) -> bool:
        """Whether the model is one of ratings, and not of rankings."""
        return self.ratings or self.model in RATING_MODELS

    @property
    def smaller_is_better(self) -> bool:
        """Whether the quality is an error."""
        return self.metric == "MSE"


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from the content of a TOML file; errors name the key, and the nearest known one."""
    try:
        return Settings.model_validate(dict(values))
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        raise InvalidSettings("; ".join(problems), "known keys with values in range", "Mend these.") from None


def _explain(problem: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path) or "settings"
    if problem["type"] != "extra_forbidden":
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        return f"{name} = {problem['input']!r}: {message}" if path and path != ["faults"] else message
    tables: dict[str, type[Frozen]] = {"world": WorldSettings, "images": ImageSettings, "faults": FaultSettings}
    model: type[Frozen] = tables.get(path[0], Settings) if len(path) > 1 else Settings
    near = difflib.get_close_matches(path[-1], model.model_fields, n=1)
    return f"unknown key {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
