"""A fitted model of every size: recommendations, evaluation, saving and display."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.estimator.display import figure, result_html, result_rows
from fairfold.estimator.inputs import IdIndex, has_integer_ids, parse_options, to_frame
from fairfold.estimator.recommendations import Recommendations, import_pandas, qrels_frame, run_frame, top_items
from fairfold.federation.evaluation import Evaluator, GroupReport, Result
from fairfold.federation.federation import Federation, popularity_baseline
from fairfold.federation.simulation import stop_reason
from fairfold.runs import checkpoint
from fairfold.runs.baselines import strong_baselines
from fairfold.runs.data import save_run_data
from fairfold.runs.device_model import DeviceModel, device_model, device_quality, write_device_model
from fairfold.runs.folder import RunFolder, read_result
from fairfold.runs.loaded import LoadedRun, item_name, load_run
from fairfold.subspace import Capacity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = 10
FALLBACK = "The model cannot use these items: the most popular ones are recommended."
NO_HISTORY = "Without a history the most popular items are recommended."


@dataclass(frozen=True, repr=False)
class Model:
    """A model of every size, fitted by :func:`fairfold.fit`.

    Attributes:
        run: The trained run: plan, data, state of the server and local state.
        result: Quality by size, baselines, and a report per round.
        integer_ids: Whether the caller's ids of users and of items are integers; else they are text.
        stored_data: The data as it is written to disk: before clients count its items, where they do.
        notes: What was repaired or left out of the interactions.
        seconds: How long the rounds took.
    """

    run: LoadedRun
    result: Result
    integer_ids: tuple[bool, bool]
    stored_data: Dataset
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def data(self) -> Dataset:
        """The training and held-out interactions."""
        return self.run.interactions

    def recommend(
        self, user: Any = None, k: int = TOP, *, history: Any = None, users: Any = None, capacity: str | None = None
    ) -> Recommendations:
        """The best ``k`` items for a user, without those the user has: ``items, scores = model.recommend(user)``.

        Args:
            user: An id of the interactions; or a list of item ids, the history of a user who is new.
            k: How many items.
            history: The same as such a list; for a model of ratings a dict of items and ratings.
            users: Several ids, for arrays of a row per user.
            capacity: Use the model that a device of this size holds (``"16x"``, ``"40MB"``); else the server's.
        """
        if history is None and hasattr(user, "__iter__") and not isinstance(user, str | bytes):
            history, user = user, None
        if sum(given is not None for given in (user, history, users)) != 1:
            given = "none or several of user, history and users"
            raise InvalidSettings(given, "one of them", "Name one of them: model.recommend(17).")
        size = None if capacity is None else Capacity.parse(capacity)
        new = None if history is None else self._history(history)
        asked = [user] if user is not None else [] if users is None else list(users)
        numbers = [0] if new is not None else [self._users[one] for one in asked]
        best = top_items(self.run, numbers, k, new=new, capacity=size)
        found = self._recommendations(best.items, best.scores, single=users is None)
        note = FALLBACK if any(best.history_sizes) else NO_HISTORY
        return replace(found, note=note) if best.is_fallback else found

    def similar(self, item: Any, k: int = TOP) -> Recommendations:
        """The items most like one: recommendations to a user with this item alone, or the nearest vectors."""
        number = self._items[item]
        run = self.run
        if run.plan.algorithm.serves_new_users and not run.settings.predicts_ratings:
            return self.recommend(history=[item], k=k)
        num_items = self.data.num_items
        tables = {name: shape for name, shape in run.plan.architecture.tables.items() if shape[0] == num_items}
        vectors = torch.cat([run.progress.state.full[name].view(shape) for name, shape in tables.items()], dim=1)
        scores = torch.nn.functional.cosine_similarity(vectors, vectors[number : number + 1], dim=1)
        scores[number] = -torch.inf
        values, items = scores.topk(min(k, num_items - 1))
        return self._recommendations(items[None], values[None], single=True)

    @cached_property
    def _users(self) -> IdIndex:
        ids = self.data.user_ids or map(str, range(self.data.num_users))
        return IdIndex("user", ids, "Give the items of a new user: model.recommend(history=[...]).")

    @cached_property
    def _items(self) -> IdIndex:
        ids = (item_name(number, self.data).removeprefix("#") for number in range(self.data.num_items))
        return IdIndex("item", self.data.item_ids or ids, "Give an item of the data.")

    def _history(self, given: Any) -> Interactions:
        rated = self.run.settings.predicts_ratings
        if rated and not hasattr(given, "items"):
            raise InvalidData("a history without ratings", "a dict of items and ratings", "Give {item: rating, ...}.")
        ids = list(given)
        items = torch.tensor([self._items[item] for item in ids], dtype=torch.int64)
        return self._pairs(items, torch.tensor([float(given[item]) for item in ids]) if rated else None)

    def _pairs(self, items: torch.Tensor, ratings: torch.Tensor | None = None) -> Interactions:
        return Interactions.from_pairs(torch.zeros_like(items), items, 1, self.data.num_items, ratings)

    def _recommendations(self, items: torch.Tensor, scores: torch.Tensor, *, single: bool) -> Recommendations:
        """Recommendations by the caller's ids; of as many items as every user has left."""
        integer = self.integer_ids[1]
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

    def evaluate(self, test: Any = None, *, k: int | None = None, baselines: bool = False) -> dict[str, Any]:
        """Quality of the server's model and of every size's, for all users where a size's model can serve them.

        Args:
            test: Interactions in place of the held-out ones, in any form that :func:`fairfold.fit` takes but a path.
                Unknown users and items, and interactions of the training data, are left out and counted.
            k: The k of NDCG@k; that of the run if not given.
            baselines: Also EASE, iALS and item-kNN, tuned on the same data (minutes on large data).
        """
        federation = self.run.federation
        left_out: dict[str, int] = {}
        settings = self.run.settings.with_changes({} if k is None else {"run.top": k})
        if test is not None:
            found, left_out["left_out"] = self._parse_test(test)
            federation = replace(federation, data=replace(self.data, test=found))
        if k is not None:
            federation = Federation.of(settings, federation.interactions)
            federation.clients.local_state = self.run.progress.local_state
        if not len(federation.interactions.test):
            remedy = "Fit with split=0.7, or give interactions to find: model.evaluate(test)."
            raise InvalidData("a model without held-out interactions", "interactions to find", remedy)
        beside: Any = {} if settings.predicts_ratings else popularity_baseline(federation.data)
        beside |= strong_baselines(federation) if baselines and not settings.predicts_ratings else {}
        evaluator = Evaluator(federation, beside)
        state = self.run.progress.state
        assignments = self.run.assignments
        quality = evaluator.quality(state, assignments)
        for_all = evaluator.quality_for_all_users(state, assignments)
        sizes = [own if one is None else one for own, one in zip(quality.groups, for_all, strict=True)]
        names = [str(capacity) for capacity in self.run.plan.capacities]
        return {
            "metric": evaluator.metric,
            "server": quality.server,
            "sizes": dict(zip(names, sizes, strict=True)),
            "baselines": evaluator.baselines(evaluator.all_users),
        } | left_out

    def _parse_test(self, given: Any) -> tuple[Interactions, int]:
        if isinstance(given, str | Path):
            raise InvalidData(f"test = {str(given)!r}", "interactions, not a path", "Read the file, e.g. with polars.")
        data = self.data
        frame = to_frame(given, parse_options({}))
        user_numbers, item_numbers = self._users.numbers, self._items.numbers
        pairs = [
            (user_numbers.get(str(user)), item_numbers.get(str(item)), *rating)
            for user, item, *rating in frame.iter_rows()
        ]
        known = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
        users, items, *ratings = (torch.tensor([pair[place] for pair in known]) for place in range(frame.width))
        rated = ratings[0] if ratings and self.run.settings.predicts_ratings else None
        test = Interactions.from_pairs(users.long(), items.long(), data.num_users, data.num_items, rated)
        trained = data.train.users * data.num_items + data.train.items
        test = test.where(~torch.isin(test.users * data.num_items + test.items, trained))
        if not len(test):
            given = f"a test of {len(pairs):,} interactions, {len(known):,} of them of known users and items"
            raise InvalidData(given, "one that the model was not trained on", "Give others, or fit with split=0.7.")
        return test, len(pairs) - len(test)

    def to_run(self, k: int | None = None, *, capacity: str | None = None) -> Any:
        """The best ``k`` items of every user with held-out items, as a DataFrame for evaluation programs.

        A pandas DataFrame of ``user_id``, ``item_id``, ``rank`` and ``score``: LensKit's columns, those of ``ranx`` by
        name, and a TREC run. Beside :meth:`to_qrels` any of them gives figures of its own.
        """
        asked = [user for user in range(self.data.num_users) if len(self.data.test.of(user))]
        size = None if capacity is None else Capacity.parse(capacity)
        best = top_items(self.run, asked, self.run.settings.run.top if k is None else k, capacity=size)
        return run_frame(self.data, self.integer_ids, asked, best)

    def to_qrels(self) -> Any:
        """Held-out interactions as a pandas DataFrame of ``user_id``, ``item_id`` and ``rating`` (1 if unrated)."""
        return qrels_frame(self.data, self.integer_ids)

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
            save_run_data(folder.path, self.stored_data)
            checkpoint.save(folder.checkpoints, run.progress, settings, run.facts, self.seconds)
            stopped = stop_reason(self.result.history, settings) or "stopped"
            folder.finish(self.result, self.seconds, stopped, run.facts)
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
        result = self.result
        sizes = ", ".join(f"{row['devices']} {row[result.metric]:.4f}" for row in result_rows(result, "sizes")[:-1])
        beside = ", ".join(f"{name} {value:.4f}" for name, value in result.baselines.items())
        return (
            f"<fairfold.Model of {self._size}, {result.settings.algorithm.kind}, "
            f"{result.metric}: {sizes}{f'; {beside}' if beside else ''}>"
        )

    def _repr_html_(self) -> str:
        return result_html(self.result, f"fairfold model of {self._size}", self.notes)

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
    return Model(run, result, has_integer_ids(data), data, (), stored["seconds"])
