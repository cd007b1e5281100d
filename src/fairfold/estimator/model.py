"""A fitted model of every size: recommendations, evaluation, saving and display."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy
import torch

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.estimator.display import figure, result_html, result_rows
from fairfold.estimator.fitting import Fitted, Parameters, finished_run, train
from fairfold.estimator.inputs import IdIndex, history_items
from fairfold.estimator.recommendations import (
    Recommendations,
    import_pandas,
    nearest_items,
    qrels_frame,
    run_frame,
    score_changes,
    top_items,
)
from fairfold.federation.evaluation import Result
from fairfold.federation.simulation import stop_reason
from fairfold.runs import checkpoint
from fairfold.runs.device_model import DeviceModel, device_model, device_quality, write_device_model
from fairfold.runs.folder import RunFolder, read_result
from fairfold.runs.loaded import LoadedRun, item_name, load_run, save_run_data
from fairfold.subspace import Capacity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

TOP = 10
FALLBACK = "The model cannot use these items: the most popular ones are recommended."
NO_HISTORY = "Without a history the most popular items are recommended."


class Model(Parameters):
    """A recommender of every size: ``Model("1x-16x").fit(interactions)``, or :func:`fairfold.fit`.

    ``get_params``, ``set_params`` and ``sklearn.base.clone`` work, and ``fit`` returns the model itself.

    Args:
        capacities: Sizes of the devices: ``"1x-4x-16x"`` are the whole model, a quarter and a sixteenth.
        recipe: A name of ``fairfold recipes``.
        method: Which devices hold what, e.g. ``"fair"``.
        rounds: How many rounds to train; the recipe decides if not given.
        seed: Seed of everything random; the same seed gives the same model.
        settings: Other settings, by ``"table.key"``, or a whole :class:`fairfold.Settings`.

    Example:
        >>> import fairfold
        >>> readings = [(reader, book) for reader in range(20) for book in range(reader % 5, 40, 2)]
        >>> model = fairfold.Model("1x-4x", rounds=2).fit(readings, progress=False)
        >>> model.get_params()["capacities"]
        '1x-4x'
    """

    _fitted: Fitted | None = None

    def fit(self, interactions: Any, **options: Any) -> Self:
        """Train on interactions and return this model; arguments as for :func:`fairfold.fit`, without the parameters.

        Args:
            interactions: In any form that :func:`fairfold.fit` takes.
            **options: ``titles``, ``test``, ``progress``, ``callbacks``, and options of reading and splitting.
        """
        return self._adopt(train(self.get_params(), interactions, **options))

    def partial_fit(self, interactions: Any, **options: Any) -> Self:
        """Go on from this model with new interactions, of known users or of new ones, and return it.

        The first call is ``fit``. Arguments as for :meth:`fit`.
        """
        return self._adopt(train(self.get_params(), interactions, start=self._fitted, **options))

    def _adopt(self, fitted: Fitted) -> Self:
        self._fitted = fitted
        for name in ("user_index", "item_index"):
            self.__dict__.pop(name, None)
        return self

    @property
    def fitted(self) -> Fitted:
        """What training gave; an error before."""
        if self._fitted is None:
            raise InvalidSettings("a model that is not fitted", "a fitted one", "Call model.fit(interactions) first.")
        return self._fitted

    @property
    def run(self) -> LoadedRun:
        """The trained run: plan, data, state of the server and local state."""
        return self.fitted.run

    @property
    def result(self) -> Result:
        """Quality by size, baselines, and a report per round."""
        return self.fitted.result

    @property
    def data(self) -> Dataset:
        """The training and held-out interactions."""
        return self.run.interactions

    @property
    def notes(self) -> list[str]:
        """What a reader should know: what was repaired or left out of the interactions, and of the run."""
        return self.result.notes

    def recommend(
        self,
        user: Any = None,
        k: int = TOP,
        *,
        history: Any = None,
        users: Any = None,
        capacity: str | None = None,
        unknown: str = "skip",
    ) -> Recommendations:
        """The best ``k`` items for a user, without those the user has: ``items, scores = model.recommend(user)``.

        Args:
            user: An id of the interactions; or a list of item ids, the history of a user who is new.
            k: How many items.
            history: The same as such a list; for a model of ratings a dict of items and ratings.
            users: Several ids, for arrays of a row per user.
            capacity: Use the model that a device of this size holds (``"16x"``, ``"40MB"``); else the server's.
            unknown: What to do with items of a history that are not of the data: ``"skip"``, with a warning, or
                ``"error"``.
        """
        if history is None and hasattr(user, "__iter__") and not isinstance(user, str | bytes):
            history, user = user, None
        if sum(given is not None for given in (user, history, users)) != 1:
            given = "none or several of user, history and users"
            raise InvalidSettings(given, "one of them", "Name one of them: model.recommend(17).")
        size = None if capacity is None else Capacity.parse(capacity)
        new = None if history is None else self._history(history, unknown)
        asked = [user] if user is not None else [] if users is None else list(users)
        numbers = [0] if new is not None else [self.user_index[one] for one in asked]
        best = top_items(self.run, numbers, k, new=new, capacity=size)
        found = self._recommendations(best.items, best.scores, single=users is None)
        note = FALLBACK if any(best.history_sizes) else NO_HISTORY
        return replace(found, note=note) if best.is_fallback else found

    def similar(self, item: Any, k: int = TOP) -> Recommendations:
        """The items most like one: recommendations to a user with this item alone, or the nearest vectors."""
        number = self.item_index[item]
        run = self.run
        if run.plan.algorithm.serves_new_users and not run.settings.predicts_ratings:
            return self.recommend(history=[item], k=k)
        items, scores = nearest_items(run, number, k)
        return self._recommendations(items[None], scores[None], single=True)

    @cached_property
    def user_index(self) -> IdIndex:
        """The numbers of users by the caller's ids."""
        ids = self.data.user_ids or map(str, range(self.data.num_users))
        return IdIndex("user", ids, "Give the items of a new user: model.recommend(history=[...]).")

    @cached_property
    def item_index(self) -> IdIndex:
        """The numbers of items by the caller's ids."""
        ids = (item_name(number, self.data).removeprefix("#") for number in range(self.data.num_items))
        return IdIndex("item", self.data.item_ids or ids, "Give an item of the data.")

    def _history(self, given: Any, unknown: str) -> Interactions:
        """The history of a new user; items that are not of the data are skipped with a warning, or refused."""
        rated = self.run.settings.predicts_ratings
        items, ratings = history_items(given, self.item_index, self.user_index, rated=rated, unknown=unknown)
        return self._pairs(items, ratings)

    def _pairs(self, items: torch.Tensor, ratings: torch.Tensor | None = None) -> Interactions:
        return Interactions.from_pairs(torch.zeros_like(items), items, 1, self.data.num_items, ratings)

    def _recommendations(self, items: torch.Tensor, scores: torch.Tensor, *, single: bool) -> Recommendations:
        """Recommendations by the caller's ids; of as many items as every user has left."""
        integer = self.fitted.integer_ids[1]
        name = partial(item_name, data=self.data)
        fewest = int((items >= 0).sum(1).min())
        items, scores = items[:, :fewest], scores[:, :fewest]
        names = [[name(item).removeprefix("#" if integer else "") for item in row] for row in items.tolist()]
        ids: Any = numpy.array([[int(text) if integer else text for text in row] for row in names])
        titles = None
        if self.data.titles is not None:
            titles = numpy.array([[self.data.titles[item] for item in row] for row in items.tolist()])
        if single:
            return Recommendations(ids[0], scores[0].numpy(), None if titles is None else titles[0])
        return Recommendations(ids, scores.numpy(), titles)

    def explain(self, user: Any, item: Any, k: int = TOP) -> Recommendations:
        """Which of a user's items brought an item: ``items, changes = model.explain(user, item)``.

        The change of an item is what the recommended item's score would lose without it, the largest first.

        Args:
            user: An id of the interactions; or a list of item ids, the history of a user who is new.
            item: The id of the item to explain.
            k: How many of the user's items to show.
        """
        number = self.item_index[item]
        listed = hasattr(user, "__iter__") and not isinstance(user, str | bytes)
        one = self._history(user, "skip") if listed else self._pairs(self.data.train.of(self.user_index[user]))
        items, changes = score_changes(self.run, one, number, k)
        return self._recommendations(items[None], changes[None], single=True)

    def evaluate(self, test: Any = None, metrics: str | Sequence[str] | None = None, *, baselines: bool = False) -> Any:
        """Quality of the server's model and of every size's: a pandas DataFrame of a row per model.

        Each metric has half of its 95 % interval over users beside it (``ndcg@10 ±``). A size is evaluated for all
        users where its model can serve them, else for those who hold it.

        Args:
            test: Interactions in place of the held-out ones, in any form that :func:`fairfold.fit` takes but a path.
                Unknown users and items, and interactions of the training data, are left out with a warning.
            metrics: ``"ndcg@10"``, ``"recall@20"``, ``"precision@10"``, ``"hit@10"``, ``"mrr"``, ``"map"``,
                ``"coverage@10"``, ``"novelty@10"`` (:mod:`fairfold.metrics.ranking`); ``"mse"``, ``"rmse"`` and
                ``"mae"`` of a model of ratings. The run's own metric if none are given.
            baselines: Also EASE, iALS and item-kNN, tuned on the same data (minutes on large data).
        """
        from fairfold.estimator.evaluation import evaluate

        return evaluate(self, test, metrics, baselines=baselines)

    def compare(self, other: Model, metrics: str | Sequence[str] | None = None) -> Any:
        """Compare with another model on the same held-out interactions, by a paired test over users.

        A pandas DataFrame of a row per metric: both values, their difference with half of its 95 % interval, and the
        p-value of a paired randomization test. Both are the servers' models.
        """
        from fairfold.estimator.evaluation import compare

        return compare(self, other, metrics)

    def to_run(self, k: int | None = None, *, capacity: str | None = None) -> Any:
        """The best ``k`` items of every user with held-out items, as a DataFrame for evaluation programs.

        A pandas DataFrame of ``user_id``, ``item_id``, ``rank`` and ``score``: LensKit's columns, those of ``ranx`` by
        name, and a TREC run. Beside :meth:`to_qrels` any of them gives figures of its own.
        """
        data = self.data.evaluated
        asked = data.test.counts_by_user.nonzero().flatten().tolist()
        size = None if capacity is None else Capacity.parse(capacity)
        new = None if data is self.data else data.train
        best = top_items(self.run, asked, self.run.settings.run.top if k is None else k, new=new, capacity=size)
        return run_frame(data, self.fitted.integer_ids, asked, best)

    def to_qrels(self) -> Any:
        """Held-out interactions as a pandas DataFrame of ``user_id``, ``item_id`` and ``rating`` (1 if unrated)."""
        return qrels_frame(self.data.evaluated, self.fitted.integer_ids)

    def save(self, path: str | Path) -> Path:
        """Write a folder that :func:`fairfold.load`, ``fairfold recommend``, ``export`` and ``report`` read.

        It holds the interactions as well: a user's recommendations follow from them.
        """
        run = self.run
        settings = run.settings
        place = Path(path)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise InvalidSettings(f"save to {place}", "a new or empty folder", "Name another, or remove it.")
        folder = RunFolder.create(settings, place)
        with folder.locked():
            folder.begin(settings, run.progress.history)
            save_run_data(folder.path, self.fitted.stored_data)
            checkpoint.save(folder.checkpoints, run.progress, settings, run.facts, self.fitted.seconds)
            stopped = stop_reason(self.result.history, settings) or "stopped"
            folder.finish(self.result, self.fitted.seconds, stopped, run.facts)
        return folder.path

    def export(self, capacity: str, path: str | Path | None = None) -> DeviceModel:
        """The model of a device of some size (``"16x"``, ``"40MB"``), also written to a file where a path is given."""
        device = device_model(self.run, Capacity.parse(capacity))
        if path is not None:
            write_device_model(self.run, device, Path(path), device_quality(self.run, device))
        return device

    def save_pretrained(self, folder: str | Path, capacity: str = "1x", *, title: str = "") -> Path:
        """Write a folder to share: the model of one size with a card, in the form of the Hugging Face hub.

        No user's data is in it. :func:`fairfold.from_pretrained` reads it.
        """
        from fairfold.estimator.hub import save_pretrained

        return save_pretrained(self, folder, capacity, title=title)

    def to_pandas(self, what: str = "sizes") -> Any:
        """A pandas DataFrame of the ``"sizes"``, a row each with the server, or of the ``"rounds"``."""
        return import_pandas().DataFrame(result_rows(self.result, what))

    def plot(self, path: str | Path | None = None) -> Figure:
        """A plot of bytes held against quality: every size, the server's model, and baselines as lines."""
        return figure(self.result, None if path is None else Path(path))

    def __repr__(self) -> str:
        if self._fitted is None:
            return super().__repr__()
        result = self.result
        sizes = ", ".join(f"{row['devices']} {row[result.metric]:.4f}" for row in result_rows(result, "sizes")[:-1])
        beside = ", ".join(f"{name} {value:.4f}" for name, value in result.baselines.items())
        return (
            f"<fairfold.Model of {self._size}, {result.settings.algorithm.kind}, "
            f"{result.metric}: {sizes}{f'; {beside}' if beside else ''}>"
        )

    def _repr_html_(self) -> str:
        return result_html(self.result, f"fairfold model of {self._size}")

    @property
    def _size(self) -> str:
        return f"{self.data.num_users:,} users × {self.data.num_items:,} items"


def load(path: str | Path) -> Model:
    """Load a saved model, or a run of ``fairfold train``, from its folder.

    Example:
        >>> import fairfold, tempfile
        >>> readings = [(reader, book) for reader in range(20) for book in range(reader % 5, 40, 2)]
        >>> model = fairfold.fit(readings, capacities="1x", rounds=2, progress=False)
        >>> folder = model.save(tempfile.mkdtemp() + "/model")
        >>> list(fairfold.load(folder).recommend(3, k=5).items) == list(model.recommend(3, k=5).items)
        True
    """
    if (Path(path) / "config.json").is_file():
        raise InvalidData(
            f"{path}, a shared model", "the folder of a run", "Read it by fairfold.from_pretrained(path)."
        )
    run = load_run(Path(path))
    stored = read_result(Path(path))
    if "groups" not in stored:
        raise InvalidData(f"{path}, a run that is not finished", "a finished run", "Go on with it: --resume.")
    model = Model(settings=run.settings)
    model._fitted = finished_run(run, stored)
    return model
