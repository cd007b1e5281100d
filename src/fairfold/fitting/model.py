"""A fitted model: what it recommends, how good it is at every size, and the folder it is kept in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidData, InvalidSettings, nearest
from fairfold.fitting.frames import as_qrels, as_run
from fairfold.fitting.show import as_html, as_rows, figure
from fairfold.fitting.suggest import Suggestions, best_items, pandas
from fairfold.fitting.tables import frame_of, known_options, numbered_ids
from fairfold.runs import checkpoint
from fairfold.runs.device import DeviceModel, device_model, quality, write_device_model
from fairfold.runs.folder import RunFolder
from fairfold.runs.opened import OpenRun, item_name, open_run
from fairfold.runs.own_data import keep_data
from fairfold.runs.read import read_result
from fairfold.runs.references import strong_references
from fairfold.simulate.result import GroupReport, Judge, Result
from fairfold.simulate.run import stop_reason
from fairfold.simulate.world import World, popularity_of
from fairfold.subspace import Capacity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = 10


@dataclass(frozen=True, repr=False)
class Model:
    """A model of every size, fitted by :func:`fairfold.fit`.

    Attributes:
        opened: The run: its plan, data, and what the server and the devices hold.
        result: How it ended: quality by size, references, rounds.
        numbers: Whether the caller's ids of users and of items are whole numbers; else they are text.
        kept: The data as it is written to disk: before devices count its items, where they do.
        notes: What was repaired or left out of the interactions.
        seconds: How long the rounds took.
    """

    opened: OpenRun
    result: Result
    numbers: tuple[bool, bool]
    kept: Dataset
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def data(self) -> Dataset:
        """What it was fitted on, and what was held out."""
        return self.opened.interactions

    # -- recommendations -----------------------------------------------------------------------------------------------

    def recommend(
        self,
        user: Any = None,
        k: int = TOP,
        *,
        history: Any = None,
        users: Any = None,
        capacity: str | None = None,
    ) -> Suggestions:
        """The best ``k`` items for a user, without those the user has: ``items, scores = model.recommend(user)``.

        Args:
            user: An id of the interactions; or a list of item ids, the history of a user who is new.
            k: How many items.
            history: The same as such a list; for a model of ratings a dict of items and ratings.
            users: Several ids, for arrays of a row per user.
            capacity: Use the model that a device of this size holds (``"16x"``, ``"40MB"``); else the server's.
        """
        listed = not isinstance(user, str | bytes) and hasattr(user, "__iter__")
        history, user = (user, None) if listed and history is None else (history, user)
        if sum(given is not None for given in (user, history, users)) != 1:
            given = "none or several of user, history and users"
            raise InvalidSettings(given, "one of them", "Say whom to recommend to: model.recommend(17).")
        size = None if capacity is None else Capacity.parse(capacity)
        new = None if history is None else self._history(history)
        asked = [user] if user is not None else [] if users is None else list(users)
        numbers = [0] if new is not None else [self._number("user", one) for one in asked]
        best = best_items(self.opened, numbers, k, new=new, capacity=size)
        note = "None of these items says what the user likes: this is the order of popularity." if best.popular else ""
        found = self._named(best.items, best.scores, alone=users is None)
        return replace(found, note=note)

    def similar(self, item: Any, k: int = TOP) -> Suggestions:
        """The items most like one: those that a user with this item alone would get, or the nearest vectors."""
        number, opened = self._number("item", item), self.opened
        if opened.plan.algorithm.from_history and not opened.settings.predicts_ratings:
            history = self._pairs(torch.tensor([number]))
            best = best_items(opened, [0], k, new=history)
            note = "The model knows nothing of this item: the most popular ones." if best.popular else ""
            return replace(self._named(best.items, best.scores, alone=True), note=note)
        many = self.data.num_items
        tables = {name: shape for name, shape in opened.plan.architecture.tables.items() if shape[0] == many}
        vectors = torch.cat([opened.progress.state.full[name].view(shape) for name, shape in tables.items()], dim=1)
        scores = torch.nn.functional.cosine_similarity(vectors, vectors[number : number + 1], dim=1)
        scores[number] = -torch.inf
        values, items = scores.topk(min(k, many - 1))
        return self._named(items[None], values[None], alone=True)

    def _number(self, role: str, given: Any) -> int:
        """The number of an id of the caller's."""
        known = self._numbers(role)
        text = str(given.item() if hasattr(given, "item") else given)
        if text not in known:
            some = ", ".join(list(known)[:3])
            remedy = "A new user is asked for by their items: model.recommend(history=[...])."
            remedy = remedy if role == "user" else "Give an item that they have."
            raise InvalidData(
                f"{role} {given!r}{nearest(text, known)}", f"one of the interactions (such as {some})", remedy
            )
        return known[text]

    def _numbers(self, role: str) -> dict[str, int]:
        ids = self.data.user_ids if role == "user" else self.data.item_ids
        many = self.data.num_users if role == "user" else self.data.num_items
        if ids is None and role == "item":
            ids = [item_name(number, self.data).removeprefix("#") for number in range(many)]
        key = f"_{role}_numbers"  # made once: a dictionary of the whole catalogue
        if key not in self.__dict__:
            words = map(str, range(many)) if ids is None else ids
            object.__setattr__(self, key, {word: number for number, word in enumerate(words)})
        found: dict[str, int] = self.__dict__[key]
        return found

    def _history(self, given: Any) -> Interactions:
        rated = self.opened.settings.predicts_ratings
        if rated and not hasattr(given, "items"):
            raise InvalidData("a history without ratings", "a dict of items and ratings", "Give {item: rating, ...}.")
        words = list(given)
        items = torch.tensor([self._number("item", word) for word in words], dtype=torch.int64)
        if not len(items):
            raise InvalidData("an empty history", "at least one item", "Give the items that the user has.")
        return self._pairs(items, torch.tensor([float(given[word]) for word in words]) if rated else None)

    def _pairs(self, items: torch.Tensor, ratings: torch.Tensor | None = None) -> Interactions:
        return Interactions.from_pairs(torch.zeros_like(items), items, 1, self.data.num_items, ratings)

    def _named(self, items: torch.Tensor, scores: torch.Tensor, *, alone: bool) -> Suggestions:
        """Items by the caller's ids; of one user those that there are."""
        word, whole = partial(item_name, data=self.data), self.numbers[1]
        fewest = int((items >= 0).sum(1).min())  # where a user has nearly everything
        items, scores = items[:, :fewest], scores[:, :fewest]
        names = [[word(one).removeprefix("#" if whole else "") for one in row] for row in items.tolist()]
        ids: Any = numpy.array([[int(name) if whole else name for name in row] for row in names])
        titles, values = None, scores.numpy()
        if self.data.titles is not None:
            titles = numpy.array([[self.data.titles[one] for one in row] for row in items.tolist()])
        if alone:
            return Suggestions(ids[0], values[0], None if titles is None else titles[0])
        return Suggestions(ids, values, titles)

    # -- how good it is ------------------------------------------------------------------------------------------------

    def evaluate(self, test: Any = None, *, k: int | None = None, references: bool = False) -> dict[str, Any]:
        """Quality of the server's model and of every size's, for all users where that has a meaning.

        Args:
            test: What to find instead of what was held out, in any form that :func:`fairfold.fit` takes but a path.
                Users and items that the model does not know are left out and counted as such, and so is what it was
                trained on, which it does not recommend again.
            k: The k of NDCG@k; that of the run if not given.
            references: Also EASE, iALS and item-kNN, tuned on the same data (minutes on large data).
        """
        world, told = self.opened.world, dict[str, Any]()
        settings = self.opened.settings.with_changes({} if k is None else {"run.top": k})
        if test is not None:
            found, told["left_out"] = self._test(test)
            world = replace(world, data=replace(self.data, test=found))
        if k is not None:
            world = World.of(settings, world.interactions)
            world.people.private = self.opened.progress.private
        if not len(world.interactions.test):
            remedy = "Fit with split=0.7, or give interactions to find: model.evaluate(test)."
            raise InvalidData("a model of which nothing was held out", "interactions to find", remedy)
        beside: Any = {} if settings.predicts_ratings else popularity_of(world.data)
        beside |= strong_references(world) if references and not settings.predicts_ratings else {}
        judge, state = Judge(world, beside), self.opened.progress.state
        assignments = self.opened.assignments
        seen = judge.quality(state, assignments)
        everybody = judge.for_everybody(state, assignments)
        sizes = [of if one is None else one for of, one in zip(seen.groups, everybody, strict=True)]
        names = [str(capacity) for capacity in self.opened.plan.capacities]
        return {
            "metric": judge.metric,
            "server": seen.server,
            "sizes": dict(zip(names, sizes, strict=True)),
            "references": judge.references(judge.everybody),
        } | told

    def _test(self, given: Any) -> tuple[Interactions, int]:
        if isinstance(given, str | Path):
            raise InvalidData(f"test = {str(given)!r}", "interactions, not a path", "Read the file, e.g. with polars.")
        frame, data = frame_of(given, known_options({})), self.data
        pairs = [
            (self._numbers("user").get(str(user)), self._numbers("item").get(str(item)), *rating)
            for user, item, *rating in frame.iter_rows()
        ]
        known = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
        columns = [torch.tensor([pair[place] for pair in known]) for place in range(frame.width)]
        users, items, *ratings = columns
        rated = ratings[0] if ratings and self.opened.settings.predicts_ratings else None
        test = Interactions.from_pairs(users.long(), items.long(), data.num_users, data.num_items, rated)
        trained = data.train.users * data.num_items + data.train.items
        test = test.where(~torch.isin(test.users * data.num_items + test.items, trained))
        if not len(test):
            given = f"a test of {len(pairs):,} interactions, {len(known):,} of them of users and items that are known"
            raise InvalidData(given, "one that the model was not trained on", "Give others, or fit with split=0.7.")
        return test, len(pairs) - len(test)

    def to_run(self, k: int | None = None, *, capacity: str | None = None) -> Any:
        """The best ``k`` items of everybody with something held out, as programs that evaluate take them.

        A pandas DataFrame of ``user_id``, ``item_id``, ``rank`` and ``score``: LensKit's columns, those of ``ranx`` by
        name, and a TREC run. Beside :meth:`to_qrels` any of them gives figures of its own.
        """
        test, k = self.data.test, self.opened.settings.run.top if k is None else k
        asked = [user for user in range(self.data.num_users) if len(test.of(user))]
        best = best_items(self.opened, asked, k, capacity=None if capacity is None else Capacity.parse(capacity))
        return as_run(self.data, self.numbers, asked, best)

    def to_qrels(self) -> Any:
        """What was held out, as a pandas DataFrame of ``user_id``, ``item_id`` and ``rating`` (1 without ratings)."""
        return as_qrels(self.data, self.numbers)

    # -- keeping and showing -------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write a folder that :func:`fairfold.load`, ``fairfold recommend``, ``export`` and ``report`` read.

        It holds the interactions as well: a user's recommendations follow from them.
        """
        opened, settings, place = self.opened, self.opened.settings, Path(path)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise InvalidSettings(f"save to {place}", "a new or empty folder", "Name another, or remove it.")
        folder = RunFolder.create(settings, place)
        with folder.locked():
            folder.begin(settings, opened.progress.history)
            keep_data(folder.path, self.kept)
            checkpoint.save(folder.checkpoints, opened.progress, settings, opened.facts, self.seconds)
            stopped = stop_reason(self.result.history, settings) or "stopped"
            folder.finish(self.result, self.seconds, stopped, opened.facts)
        return folder.path

    def export(self, capacity: str, path: str | Path | None = None) -> DeviceModel:
        """The model of a device of some size (``"16x"``, ``"40MB"``), also as a file where a path is given.

        Read it anywhere with :func:`fairfold.runs.device.read_device_model`.
        """
        device = device_model(self.opened, Capacity.parse(capacity))
        if path is not None:
            write_device_model(self.opened, device, Path(path), quality(self.opened, device))
        return device

    def save_pretrained(self, folder: str | Path, capacity: str = "1x", *, title: str = "") -> Path:
        """Write a folder to share: the model of one size with a card, in the form of the Hugging Face hub.

        No user's data is in it. :func:`fairfold.from_pretrained` reads it.
        """
        from fairfold.fitting.hub import save_pretrained

        return save_pretrained(self, folder, capacity, title=title)

    def to_pandas(self, what: str = "sizes") -> Any:
        """A pandas DataFrame of the ``"sizes"``, a row each with the server and references, or of the ``"rounds"``."""
        return pandas().DataFrame(as_rows(self.result, what))

    def plot(self, path: str | Path | None = None) -> Figure:
        """Bytes held against quality: every size, the server's model, and references as lines."""
        return figure(self.result, None if path is None else Path(path))

    def __repr__(self) -> str:
        result, data = self.result, self.data
        what = f"{data.num_users:,} users × {data.num_items:,} items"
        sizes = ", ".join(f"{row['devices']} {row[result.metric]:.4f}" for row in as_rows(result, "sizes")[:-1])
        beside = ", ".join(f"{name} {value:.4f}" for name, value in result.references.items())
        return (
            f"<fairfold.Model of {what}, {result.settings.algorithm.kind}, "
            f"{result.metric}: {sizes}{f'; {beside}' if beside else ''}>"
        )

    def _repr_html_(self) -> str:
        size = f"{self.data.num_users:,} users × {self.data.num_items:,} items"
        return as_html(self.result, f"fairfold model of {size}", self.notes)


def load(path: str | Path) -> Model:
    """A model that was saved, or the run of ``fairfold train`` in a folder.

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
    opened = open_run(Path(path))
    told = read_result(Path(path))
    if "groups" not in told:
        raise InvalidData(f"{path}, a run that is not finished", "a run to its end", "Go on with it: --resume.")
    state, data = opened.progress.state, opened.interactions
    server = told["server"]
    result = Result(
        opened.settings, told["metric"], state, opened.progress.private, opened.progress.history,
        [GroupReport(**group) for group in told["groups"]], server["quality"], server["references"], data.num_users,
        told["rejections"], data.counted, told["told"], told["privacy"],
        {name: (of[0], of[1]) for name, of in server["differences"].items()},
    )  # fmt: skip
    return Model(opened, result, numbered_ids(data), data, (), told["seconds"])
