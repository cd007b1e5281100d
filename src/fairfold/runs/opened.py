"""A run opened again: its settings, its data and its newest checkpoint, for recommendations and exports."""

import csv
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairfold.data import Dataset, Interactions
from fairfold.data.counted import items_at, ranks_of
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidSettings, nearest
from fairfold.metrics.ranking import Scorer
from fairfold.projections import Assignment
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.runs import checkpoint
from fairfold.runs.federated import names_beside, world_of
from fairfold.runs.folder import RunFolder
from fairfold.runs.own_data import data_of
from fairfold.runs.read import require_run
from fairfold.settings import Settings, read_settings
from fairfold.settings.parts import DeviceData
from fairfold.simulate.run import Progress
from fairfold.simulate.world import World
from fairfold.values import Weights


@dataclass(frozen=True)
class OpenRun:
    """What a run has learned, beside what it learned from."""

    path: Path  # of its folder
    world: World  # its plan, its people with their private vectors, its data
    progress: Progress  # the checkpoint
    facts: dict[str, Any]  # of the data

    @property
    def plan(self) -> Plan:
        """What its server and devices agreed on, by what was found out since."""
        return self.world.plan.algorithm.settled(self.world.plan, self.progress.state)

    @property
    def settings(self) -> Settings:
        """As run."""
        return self.plan.settings

    @property
    def interactions(self) -> Dataset:
        """The data of a recommender; refused where the run is none."""
        if isinstance(self.world.data, ImageDataset):
            raise InvalidSettings(
                f"{self.path}, a run of model.kind={self.settings.model.kind!r} on images",
                "a run of a recommender",
                "A network that reads images has nothing to recommend; see `fairfold export` for its device models.",
            )
        return self.world.data

    @property
    def last_round(self) -> int:
        """The number of the last round, by whose hash devices hold what they hold."""
        return max(self.progress.state.round_number - 1, 0)

    @property
    def assignments(self) -> list[Assignment]:
        """What the devices of each size hold."""
        return self.plan.assignments(self.last_round)

    def scorer(
        self, full: Weights, held: Sequence[Assignment] | None = None, histories: Interactions | None = None
    ) -> Scorer:
        """Scores of all items by a model: the server's tensors, or those that what a device holds stands for.

        With ``histories`` the users are others, who did not take part, and are asked for by their number there.
        """
        held = self.assignments if held is None else held
        return self.plan.algorithm.scorer(self.plan, full, held, self.people(histories))

    def people(self, histories: Interactions | None) -> People:
        """Those who took part, or others."""
        if histories is None:
            return self.world.people
        self._refuse_new_users()
        return People(self.plan, histories, {})

    def telling(self, items: Tensor, held: Sequence[Assignment] | None = None) -> Tensor:
        """Which of a user's items say anything about the user: where vectors follow from histories, not all do.

        An item that nobody had in training says nothing, nor one that the model cannot tell from others. Arguments as
        for :meth:`scorer`.
        """
        algorithm = self.plan.algorithm
        known = algorithm.tells_apart(self.plan, self.assignments if held is None else held, items)
        return known & (self.interactions.train.counts_by_item[items] > 0) if algorithm.from_history else known

    def history(self, given: str) -> Interactions:
        """The history of one new user: items, or a file of the form that this run's model needs."""
        self._refuse_new_users()
        return read_history(given, self.interactions, rated=self.settings.predicts_ratings)

    def _refuse_new_users(self) -> None:
        if self.plan.algorithm.from_history:
            return
        recipe = "ratings" if self.settings.predicts_ratings else "best"
        raise InvalidSettings(
            f"a new user for {self.path}, algorithm.kind={self.plan.algorithm.kind!r}, which trains users' vectors",
            "an algorithm by which a user's vector follows from their history alone",
            f"`fairfold train --recipe {recipe}` has one. Or train anew on data with this user, and ask with --user.",
        )


def open_run(path: Path, say: Callable[[str], None] = lambda _: None, *, newest: bool = False) -> OpenRun:
    """Open a run's folder; refused where it holds no whole checkpoint, or the data is no longer what it was.

    Where an older checkpoint is taken because newer ones are damaged that is said, or with ``newest`` refused.
    """
    require_run(path)
    found = checkpoint.require(RunFolder(path).checkpoints, say, newest_only=newest)
    settings = read_settings(found.settings)
    if isinstance(settings.data, DeviceData):
        names = names_beside(path, settings.data.items)
        world, facts = world_of(settings, found.progress.state, names), found.data
    else:
        data = data_of(path, settings)
        facts = checkpoint.data_facts(data)
        checkpoint.refuse_other_data(found, facts, path)
        world = World.of(settings, data)
    checkpoint.refuse_other_shapes(found, world.plan.architecture.shapes, path)
    world.people.private = found.progress.private
    return OpenRun(path, world, found.progress, facts)


def find_user(data: Dataset, wanted: str) -> int:
    """The number of a user, given by the id of the source file, or as ``#number``."""
    text = wanted.strip()
    if data.user_ids is not None and not text.startswith("#"):
        try:
            return data.user_ids.index(text)
        except ValueError:
            some = ", ".join(data.user_ids[:3])
            raise InvalidSettings(
                f"user {wanted!r}{nearest(text, data.user_ids)}",
                f"an id of {data.name} (such as {some}), or #0 to #{data.num_users - 1}",
                "Check the id.",
            ) from None
    digits = text.removeprefix("#")
    if not digits.isdecimal() or int(digits) >= data.num_users:
        raise InvalidSettings(f"user {wanted!r}", f"#0 to #{data.num_users - 1}", "Check the number.")
    return int(digits)


def read_history(given: str | Path, data: Dataset, *, rated: bool = False) -> Interactions:
    """The history of one new user from a file of item ids, one per line, as the source file has them (or ``#number``).

    Where it is ``rated`` every line ends with the user's rating, after a space, a tab or a comma. The file may be a CSV
    with a column ``item`` (and ``rating``); what names no file are the ids themselves, between commas.
    """
    path, form = Path(given), "one item id per line" + (", then its rating" if rated else "")
    try:
        listed = isinstance(given, str) and not rated and re.search(r",|^#?\d+$", given)
        if isinstance(given, str) and listed and not os.path.exists(given):  # which takes a name of any length
            lines = [word.strip() for word in given.split(",") if word.strip()]
        else:
            lines = _lines(path, rated=rated)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path}: {error}", "a readable text file", f"Write {form}.") from None
    words, ratings = lines, None
    if rated:
        words, ratings = _rated(lines, data)
    known = {} if data.item_ids is None else {word: number for number, word in enumerate(data.item_ids)}
    items = [_item(word, known, data) for word in words]
    unknown = [word for word, item in zip(words, items, strict=True) if item is None]
    if not items or unknown:
        given = f"{len(unknown)} of {len(items)} items, first {unknown[0]!r}" if items else f"{path}, which is empty"
        some = "#0" if data.item_ids is None else ", ".join(data.item_ids[:3])
        raise InvalidSettings(given, f"items of {data.name} (such as {some}), {form}", "Leave out the others.")
    found = torch.tensor([item for item in items if item is not None])
    return Interactions.from_pairs(torch.zeros_like(found), found, 1, data.num_items, ratings)


def _lines(path: Path, *, rated: bool) -> list[str]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    columns = [name.strip().strip('"') for name in lines[0].split(",")] if lines else []
    wanted = ["item", "rating"] if rated else ["item"]
    if not set(wanted) <= set(columns):
        return lines
    rows = csv.DictReader(lines, columns)
    next(rows)
    return [" ".join(str(row[name]).strip() for name in wanted) for row in rows]


def _rated(lines: list[str], data: Dataset) -> tuple[list[str], Tensor]:
    """Items and ratings; refused where one has none within the range of the data."""
    low, high = 0.0, math.inf  # where ratings lie on devices their range is not known here
    if data.train.ratings is not None:
        low, high = float(data.train.ratings.min()), float(data.train.ratings.max())
    words, ratings = list[str](), list[float]()
    for line in lines:
        parts = re.fullmatch(r"(.+?)[\s,]+(\d+\.?\d*)", line)
        if parts is None or not low <= float(parts[2]) <= high:
            raise InvalidSettings(
                f"the line {line!r}, for a model of ratings",
                f"an item id and its rating, {low:g} to {high:g}, after a space, a tab or a comma",
                "Say of every item what the user thinks of it.",
            )
        words.append(parts[1])
        ratings.append(float(parts[2]))
    return words, torch.tensor(ratings)


def item_name(item: int, data: Dataset) -> str:
    """The id of an item in the source file, or where that has none ``#number``, the catalogue's own."""
    if data.item_ids is not None:
        return data.item_ids[item]
    return f"#{item if data.counted is None else int(items_at(torch.tensor([item]), data.counted.leading))}"


def _item(word: str, known: dict[str, int], data: Dataset) -> int | None:
    if not word.startswith("#") and known:
        return known.get(word)
    digits = word.removeprefix("#")
    if not digits.isdecimal() or int(digits) >= data.num_items:
        return None
    return int(digits) if data.counted is None else int(ranks_of(torch.tensor([int(digits)]), data.counted.leading))
