"""``fairfold.fit``: a model of every size from interactions in any form, also from an earlier model.

A model goes on with new interactions by its ids: tables with a row per item, networks and users' vectors are taken
over, new rows are initialized. Remembered updates start empty, and all clients send theirs again: an algorithm of one
sum over clients gives the model of old and new interactions together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from rich.console import Console
from torch import Tensor

from fairfold.config import Settings
from fairfold.config.files import default_recipe, load_settings
from fairfold.config.tables import SYNTHETIC
from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings, did_you_mean
from fairfold.estimator.inputs import InputData, has_integer_ids, parse_options, read_interactions
from fairfold.federation.evaluation import Callback, GroupReport, Result
from fairfold.federation.federation import Federation, load_unnumbered
from fairfold.federation.randomness import Rejections
from fairfold.federation.simulation import Progress, simulate
from fairfold.runs.loaded import LoadedRun
from fairfold.runs.progress import Display

if TYPE_CHECKING:
    from fairfold.estimator.model import Model

NAME = "interactions"
"""Name of data that comes from no file."""


@dataclass(frozen=True)
class Fitted:
    """What training gives a model.

    Attributes:
        run: The trained run: plan, data, state of the server and local state.
        result: Quality by size, baselines, and a report per round.
        integer_ids: Whether the caller's ids of users and of items are integers; else they are text.
        stored_data: The data as it is written to disk: before clients count its items, where they do.
        seconds: How long the rounds took.
    """

    run: LoadedRun
    result: Result
    integer_ids: tuple[bool, bool]
    stored_data: Dataset
    seconds: float = 0.0


def finished_run(run: LoadedRun, stored: Mapping[str, Any]) -> Fitted:
    """What training gave, from a loaded run and the result that is stored in its folder."""
    data = run.interactions
    server = stored["server"]
    result = Result(
        run.settings,
        stored["metric"],
        run.progress.state,
        run.progress.local_state,
        run.progress.history,
        [GroupReport(**group) for group in stored["groups"]],
        server["quality"],
        server["baselines"],
        data.num_users,
        stored["rejections"],
        data.counted,
        stored["notes"],
        stored["privacy"],
        {name: (of[0], of[1]) for name, of in server["differences"].items()},
    )
    return Fitted(run, result, has_integer_ids(data), data, stored["seconds"])


class Parameters:
    """What a model is to be trained by; ``sklearn.base.clone`` makes another one of the same parameters."""

    PARAMETERS: ClassVar = ("capacities", "recipe", "method", "rounds", "seed", "settings")

    def __init__(
        self,
        capacities: str | None = None,
        *,
        recipe: str | None = None,
        method: str | None = None,
        rounds: int | None = None,
        seed: int | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
    ) -> None:
        self.capacities = capacities
        self.recipe = recipe
        self.method = method
        self.rounds = rounds
        self.seed = seed
        self.settings = settings

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002  # scikit-learn gives it
        """The parameters by name; ``deep`` changes nothing, since none of them is an estimator."""
        return {name: getattr(self, name) for name in self.PARAMETERS}

    def set_params(self, **parameters: Any) -> Self:
        """Change parameters of the next ``fit``, and return this model."""
        for name, value in parameters.items():
            if name not in self.PARAMETERS:
                given = f"parameter {name!r}{did_you_mean(name, self.PARAMETERS)}"
                remedy = "Give others by settings={'table.key': value}."
                raise InvalidSettings(given, f"one of {', '.join(self.PARAMETERS)}", remedy)
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items() if value is not None)
        return f"fairfold.Model({given})"


def fit(
    interactions: Any,
    capacities: str | None = None,
    *,
    recipe: str | None = None,
    method: str | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    titles: Any = None,
    test: Any = None,
    start: Model | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Model:
    """Train a federation of devices of several sizes in memory, by the recipes of ``fairfold train``.

    Args:
        interactions: A pandas or polars DataFrame, a scipy sparse matrix of users × items, an array or tensor of user,
            item and perhaps rating, a tuple of such columns, a torch Dataset of such rows, a data set of
            :func:`fairfold.data.load`, the path of a file or folder (CSV, TSV, Parquet, RecBole's ``.inter``), or a
            name of ``fairfold data list``.
        capacities: Sizes of the devices: ``"1x-4x-16x"`` are the whole model, a quarter and a sixteenth, each for a
            third of the users.
        recipe: ``"default"`` for rankings (the default), ``"fair"``, ``"ratings"``, ``"paper"`` or ``"authors"``; see
            ``fairfold recipes``.
        method: Which devices hold what, e.g. ``"fair"``.
        rounds: How many rounds to train; the recipe decides if not given.
        seed: Seed of everything random; the same seed gives the same model.
        settings: Other settings, by ``"table.key"`` (docs/settings.md), or a whole :class:`fairfold.Settings`.
        titles: Names of items, by their ids: a dict or a pandas Series.
        test: Interactions to hold out, a table like ``interactions``: a split from elsewhere (by LensKit, say).
        start: A model to go on from; ``interactions`` are then new ones, of known users or of others.
        progress: Whether to show a progress display.
        callbacks: Called at the start, after every round and at the end: your own, or trackers for TensorBoard, MLflow
            or Weights & Biases (:mod:`fairfold.runs.trackers`).
        **options: Options of ``fairfold data prepare``: ``split`` (0.7; 1.0 holds nothing out), ``split_seed``,
            ``user_column``, ``item_column``, ``rating_column``, ``min_rating``, ``core``, ``top_users`` and others.

    Example:
        >>> import fairfold
        >>> readings = [(reader, book) for reader in range(20) for book in range(reader % 5, 40, 2)]
        >>> model = fairfold.fit(readings, capacities="1x-4x", rounds=2, progress=False)
        >>> items, scores = model.recommend(3, k=5)
        >>> len(items), len(scores)
        (5, 5)
    """
    from fairfold.estimator.model import Model

    given: dict[str, Any] = {"recipe": recipe, "method": method, "rounds": rounds, "seed": seed, "settings": settings}
    named = {"titles": titles, "test": test, "progress": progress, "callbacks": callbacks}
    if start is None:
        return Model(capacities, **given).fit(interactions, **named, **options)
    model = Model(**start.get_params()).set_params(**{name: of for name, of in given.items() if of is not None})
    model.capacities = capacities or model.capacities
    own = given | {"capacities": capacities}
    return model._adopt(train(own, interactions, start=start.fitted, **named, **options))


def train(
    parameters: Mapping[str, Any],
    interactions: Any,
    *,
    start: Fitted | None = None,
    titles: Any = None,
    test: Any = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Fitted:
    """Train by the parameters of a :class:`Model`, perhaps from where another one ended; see :func:`fit`."""
    if "split_seed" in options:  # the run has a seed as well
        options["seed"] = options.pop("split_seed")
    parse_options(options, beside=[*signature(fit).parameters, "split_seed"])
    chosen = _settings(interactions, start, **parameters)
    if chosen.model.reads_images:
        raise InvalidSettings(f"model.kind={chosen.model.kind!r}", "a recommender", "Use `fairfold train` for images.")
    given = _read(interactions, chosen, options, titles, test)
    if start is not None:
        given = join_interactions(start, given)
    federation = Federation.with_numbered_items(chosen, given.data)
    first = None if start is None else warm_start(start, federation)
    console = Console(quiet=not progress)
    for line in given.data.notes():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    shown: list[Callback] = [*([Display(Console())] if progress else []), *callbacks]
    begun = time.monotonic()
    result = simulate(federation=federation, progress=first, callbacks=shown)
    rejections = Rejections(Counter(result.rejections))
    ended = Progress(result.state, result.local_state, result.history, rejections)
    federation.clients.local_state = result.local_state
    for line in result.warnings:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    run = LoadedRun(NAME, federation, ended)
    # Items that clients count are numbered whenever data is read.
    stored = given.data if chosen.subspace.counts_items else federation.interactions
    return Fitted(run, result, given.integer_ids, stored, time.monotonic() - begun)


def _settings(
    interactions: Any,
    start: Fitted | None,
    *,
    capacities: str | None,
    recipe: str | None,
    method: str | None,
    rounds: int | None,
    seed: int | None,
    settings: Settings | Mapping[str, Any] | None,
) -> Settings:
    """Settings of a recipe, of the model to go on from, or given whole, with changes."""
    keys = {"fleet.capacities": capacities, "subspace.method": method, "run.rounds": rounds, "run.seed": seed}
    changes = {key: value for key, value in keys.items() if value is not None}
    if isinstance(settings, Settings):
        return settings.with_changes(changes)
    changes = dict(settings or {}) | changes
    if start is not None and recipe is None:
        return start.run.settings.with_changes(changes)
    if not any(key == "data" or key.startswith("data.") for key in changes):
        changes["data.name"] = str(interactions) if isinstance(interactions, str | Path) else NAME
    return load_settings(None, changes, default_recipe(changes) if recipe is None else recipe)


def _read(interactions: Any, settings: Settings, options: Mapping[str, Any], titles: Any, test: Any) -> InputData:
    if isinstance(interactions, str) and interactions == SYNTHETIC:
        data, _ = load_unnumbered(settings)
        return InputData(data, has_integer_ids(data))
    rated = {"ratings": True} if settings.predicts_ratings else {}
    return read_interactions(interactions, rated | dict(options), titles, test)


def join_interactions(start: Fitted, new: InputData) -> InputData:
    """Old and new interactions as one data set; what is in the training part is not held out."""
    old, added = start.stored_data, new.data
    if old.held_out_users is not None or added.held_out_users is not None:
        remedy = "Fit with split=0.7 or 'newest' to go on later, or fit anew with all interactions."
        raise InvalidSettings("more interactions where users are held out", "a split of every user", remedy)
    if (old.train.ratings is None) != (added.train.ratings is None):
        given = "interactions with ratings and without" if new.data.train.ratings is None else "ratings and none before"
        raise InvalidSettings(given, "the same of old and new ones", "Give both with ratings, or both without.")
    users = {user: number for number, user in enumerate(_user_ids(old))}
    items = {item: number for number, item in enumerate(_item_ids(old))}
    user_numbers = torch.tensor([users.setdefault(user, len(users)) for user in _user_ids(added)], dtype=torch.int64)
    item_numbers = torch.tensor([items.setdefault(item, len(items)) for item in _item_ids(added)], dtype=torch.int64)

    def join(first: Interactions, second: Interactions) -> Interactions:
        both_users = torch.cat([first.users, user_numbers[second.users]])
        both_items = torch.cat([first.items, item_numbers[second.items]])
        ratings = [part.ratings for part in (first, second) if part.ratings is not None]  # an empty part has none
        rated = torch.cat(ratings) if ratings else None
        return Interactions.from_pairs(both_users, both_items, len(users), len(items), rated)

    train = join(old.train, added.train)
    test = join(old.test, added.test)
    trained = train.users * len(items) + train.items
    test = test.where(~torch.isin(test.users * len(items) + test.items, trained))
    titles = None
    if old.titles is not None or added.titles is not None:
        named = dict(zip(items, old.titles or [], strict=False))
        named |= {item: title for item, title in zip(_item_ids(added), added.titles or [], strict=False) if title}
        titles = [named.get(item, "") for item in items]
    integer = (start.integer_ids[0] and new.integer_ids[0], start.integer_ids[1] and new.integer_ids[1])
    split = "; then ".join(dict.fromkeys(part.split for part in (old, added) if part.split))
    repairs = Counter(old.repairs) + Counter(added.repairs)
    data = Dataset(old.name, train, test, None, list(users), list(items), titles, split, repairs=repairs)
    return InputData(data, integer)


def _user_ids(data: Dataset) -> list[str]:
    return [str(user) for user in range(data.num_users)] if data.user_ids is None else data.user_ids


def _item_ids(data: Dataset) -> list[str]:
    return [str(item) for item in range(data.num_items)] if data.item_ids is None else data.item_ids


def warm_start(start: Fitted, federation: Federation) -> Progress:
    """The progress of a federation before its first round that goes on from a model."""
    state = federation.initial()
    now, before = federation.interactions, start.run.interactions
    items = _numbers(_item_ids(before), _item_ids(now))
    tables = federation.plan.architecture.tables
    for name, vector in state.full.items():
        old = start.run.progress.state.full.get(name)
        rows, width = tables[name] if len(tables.get(name, ())) == 2 else (0, 0)
        if old is None:
            continue
        if name not in tables and old.shape == vector.shape:
            vector.copy_(old)
        elif rows == now.num_items and old.numel() == before.num_items * width:
            vector.view(rows, width)[items] = old.view(-1, width).to(vector.dtype)
    algorithm = federation.plan.algorithm
    local_state = federation.clients.local_state
    if start.run.plan.algorithm.kind == algorithm.kind and not algorithm.serves_new_users:
        users = _numbers(_user_ids(before), _user_ids(now))
        learned = start.run.progress.local_state
        for name in federation.plan.architecture.user_vectors.keys() & learned.keys():
            local_state[name][users] = learned[name].to(local_state[name].dtype)
    return Progress(state, local_state, [], Rejections())


def _numbers(old: list[str], new: list[str]) -> Tensor:
    """The number of each old id among the new ones."""
    numbers = {text: number for number, text in enumerate(new)}
    return torch.tensor([numbers[text] for text in old], dtype=torch.int64)
