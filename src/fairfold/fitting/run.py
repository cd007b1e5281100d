"""``fairfold.fit``: interactions in any form, a model of every size."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fairfold.errors import InvalidSettings
from fairfold.fitting.model import Model
from fairfold.fitting.tables import Taken, known_options, numbered_ids, take
from fairfold.fitting.warm import going_on, joined
from fairfold.protocol.faults import Rejections
from fairfold.runs.checkpoint import data_facts
from fairfold.runs.opened import OpenRun
from fairfold.runs.progress import Display
from fairfold.settings import Settings
from fairfold.settings.files import load_settings, usual_recipe
from fairfold.settings.parts import SYNTHETIC
from fairfold.simulate.numbering import numbered
from fairfold.simulate.run import Progress, simulate
from fairfold.simulate.world import World, load_catalogued
from fairfold.trackers.callback import Callback

if TYPE_CHECKING:
    from fairfold.simulate.result import RoundReport

NAME = "interactions"
"""Of data that comes from no file."""


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
    """Fit a federation of devices of several sizes, by the recipe of ``fairfold train``, in memory.

    Args:
        interactions: A pandas or polars DataFrame, a scipy sparse matrix of users × items, an array or tensor of user,
            item and perhaps rating, a tuple of such columns, a torch Dataset of such rows, a data set of
            :func:`fairfold.data.load`, the path of a file or folder (CSV, TSV, Parquet, RecBole's ``.inter``), or a
            name of ``fairfold data list``.
        capacities: Sizes of the devices: ``"1x-4x-16x"`` are the whole model, a quarter and a sixteenth, each for a
            third of the users.
        recipe: ``"best"`` for rankings (the default), ``"ratings"`` or ``"paper"``.
        method: Which devices hold what, e.g. ``"fair"``.
        rounds: How many rounds to train; the recipe decides if not given.
        seed: Seed of everything random; the same seed gives the same model.
        settings: Other settings, by ``"table.key"`` (docs/settings.md), or a whole :class:`fairfold.Settings`.
        titles: Names of items, by their ids: a dict or a pandas Series.
        test: What to hold out, a table like ``interactions``: a split that was made elsewhere (by LensKit, say).
        start: A model to go on from, with interactions that are new, of known users or of others.
        progress: Whether to show how it goes.
        callbacks: Told at the start, after every round and at the end: objects of your own, or those that send figures
            to TensorBoard, MLflow or Weights & Biases (:mod:`fairfold.trackers`).
        **options: What ``fairfold data prepare`` takes: ``split`` (0.7; 1.0 holds nothing out), ``user_column``,
            ``item_column``, ``rating_column``, ``min_rating``, ``core``, ``top_users`` and others.

    Example:
        >>> import fairfold
        >>> readings = [(reader, book) for reader in range(20) for book in range(reader % 5, 40, 2)]
        >>> model = fairfold.fit(readings, capacities="1x-4x", rounds=2, progress=False)
        >>> items, scores = model.recommend(3, k=5)
        >>> len(items), len(scores)
        (5, 5)
    """
    known_options(options, beside=signature(fit).parameters)
    chosen = _settings(interactions, settings, start, recipe, {
        "fleet.capacities": capacities, "subspace.method": method, "run.rounds": rounds, "run.seed": seed,
    })  # fmt: skip
    if chosen.model.reads_images:
        raise InvalidSettings(f"model.kind={chosen.model.kind!r}", "a recommender", "Use `fairfold train` for images.")
    taken = _taken(interactions, chosen, options, titles, test)
    if start is not None:
        taken = joined(start, taken)
    kept, data = taken.data, numbered(taken.data, chosen)
    world = World.of(chosen, data)
    first = None if start is None else going_on(start, world)
    shown: list[Callback] = [*([Display(Console())] if progress else []), *callbacks]
    last: list[Progress] = []

    def watch(_report: RoundReport, now: Progress) -> None:
        last[:] = [now]

    begun = time.monotonic()
    result = simulate(chosen, watch, data=data, progress=first, callbacks=shown)
    ended = Progress(result.state, result.private, result.history, last[0].rejections if last else Rejections())
    world.people.private = result.private
    notes = tuple(f"{count:,} {what}." for what, count in taken.repairs.items())
    opened = OpenRun(Path(NAME), world, ended, data_facts(data))
    # Where items are counted the order comes with every reading; else it is kept with the data.
    kept = kept if chosen.subspace.counted else data
    return Model(opened, result, taken.numbers, kept, notes, time.monotonic() - begun)


def _settings(
    interactions: Any,
    given: Settings | Mapping[str, Any] | None,
    start: Model | None,
    recipe: str | None,
    options: Mapping[str, Any],
) -> Settings:
    """The settings of a recipe, of the model to go on from, or given whole, with what else is asked for."""
    changes = {key: value for key, value in options.items() if value is not None}
    if isinstance(given, Settings):
        return given.with_changes(changes)
    changes = dict(given or {}) | changes
    if start is not None and recipe is None:
        return start.opened.settings.with_changes(changes)
    if not any(key == "data" or key.startswith("data.") for key in changes):
        changes["data.name"] = str(interactions) if isinstance(interactions, str | Path) else NAME
    return load_settings(None, changes, usual_recipe(changes) if recipe is None else recipe)


def _taken(interactions: Any, settings: Settings, options: Mapping[str, Any], titles: Any, test: Any) -> Taken:
    if isinstance(interactions, str) and interactions == SYNTHETIC:
        data, _ = load_catalogued(settings)
        return Taken(data, numbered_ids(data), {})
    rated = {"ratings": True} if settings.predicts_ratings else {}
    return take(interactions, rated | dict(options), titles, test)
