"""Load runs (settings, data and newest checkpoint) for recommendations and exports; where a run's data lies."""

import csv
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import polars
import torch
from torch import Tensor

from fairfold.config import Settings, read_settings
from fairfold.config.tables import DeviceData
from fairfold.data import Dataset, Interactions
from fairfold.data.files import atomic_folder
from fairfold.data.images import ImageDataset
from fairfold.data.interactions import items_at, ranks_of
from fairfold.errors import InvalidSettings, InvalidState, did_you_mean
from fairfold.federation.algorithm import COUNTS, CompactScoring, Tunable
from fairfold.federation.architecture import ImageShape
from fairfold.federation.clients import Clients, serves_new_users
from fairfold.federation.federation import Federation, load_data, number_items
from fairfold.federation.plan import Plan
from fairfold.federation.scheduling import ClientSampler
from fairfold.federation.simulation import Progress
from fairfold.federation.updates import PublicStatistics, State
from fairfold.metrics.ranking import Scorer
from fairfold.runs import checkpoint
from fairfold.runs.folder import RunFolder, require_run, run_of
from fairfold.subspace.projection import Assignment
from fairfold.typing import Weights

DATA = "data"  # folder of a copy of the prepared data inside a run's folder
# Keys of a server's algorithm state: the aggregated statistics, and the number of each item in this run.
STATISTICS, NUMBERING, PLACE = "statistics", "numbering", "place"
CATALOG_FILE = "catalogue.txt"  # file of item names, a line each, in a server's folder beside its run


@dataclass(frozen=True)
class LoadedRun:
    """A trained run: its federation and its progress."""

    name: str  # for messages: its folder, if it has one
    federation: Federation
    progress: Progress
    data_facts: dict[str, Any] | None = None  # fingerprint of the data, where it is known already

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Fingerprint of the data."""
        return self.federation.data.fingerprint() if self.data_facts is None else self.data_facts

    @property
    def plan(self) -> Plan:
        """Plan of the run, resolved by the server's state."""
        return Tunable.of(self.federation.plan.algorithm).resolve(self.federation.plan, self.progress.state)

    @property
    def settings(self) -> Settings:
        """Settings of the run."""
        return self.plan.settings

    @property
    def interactions(self) -> Dataset:
        """Data of a recommender; refused for a run on images."""
        if isinstance(self.federation.data, ImageDataset):
            given = f"{self.name}, a run of model.kind={self.settings.model.kind!r} on images"
            remedy = "A network of images has nothing to recommend; see `fairfold export` for its device models."
            raise InvalidSettings(given, "a run of a recommender", remedy)
        return self.federation.data

    @property
    def last_round(self) -> int:
        """Number of the last round, which determines the subspaces of the devices."""
        return max(self.progress.state.round_number - 1, 0)

    @property
    def assignments(self) -> list[Assignment]:
        """Subspaces of the devices of each size."""
        return self.plan.assignments(self.last_round)

    def scorer(
        self, full: Weights, held: Sequence[Assignment] | None = None, histories: Interactions | None = None
    ) -> Scorer:
        """Make a function that scores all items by full tensors; with ``histories`` the users are these new ones."""
        held = self.assignments if held is None else held
        return self.plan.algorithm.scorer(self.plan, full, held, self.clients(histories))

    def clients(self, histories: Interactions | None) -> Clients:
        """Clients of the run, or new ones with these histories."""
        if histories is None:
            return self.federation.clients
        self._refuse_new_users()
        return Clients.new(self.plan, histories)

    def informative_items(self, items: Tensor, held: Sequence[Assignment] | None = None) -> Tensor:
        """Mask of the items that influence a user's scores: those in the training data that the model distinguishes."""
        algorithm = self.plan.algorithm
        held = self.assignments if held is None else held
        known = CompactScoring.of(algorithm).distinguishable_items(self.plan, held, items)
        return known & (self.interactions.train.counts_by_item[items] > 0) if algorithm.serves_new_users else known

    def history(self, given: str) -> Interactions:
        """Parse the history of one new user: see :func:`read_history`."""
        self._refuse_new_users()
        return read_history(given, self.interactions, rated=self.settings.predicts_ratings)

    def _refuse_new_users(self) -> None:
        if serves_new_users(self.plan.algorithm):
            return
        recipe = "ratings" if self.settings.predicts_ratings else "default"
        given = f"a new user for {self.name}, algorithm.kind={self.plan.algorithm.kind!r}, which trains users' vectors"
        needed = "an algorithm by which a user's vector follows from their history alone"
        remedy = f"`fairfold train --recipe {recipe}` has one. Or train on data with this user, and ask with --user."
        raise InvalidSettings(given, needed, remedy)


def load_run(path: Path, echo: checkpoint.Echo = lambda _: None, *, newest: bool = False) -> LoadedRun:
    """Load a run from its folder, or a fleet's run from the fleet's.

    With ``newest`` refused, else with a message, if newer checkpoints are damaged.
    """
    path = run_of(path)
    require_run(path)
    found = checkpoint.load_newest(RunFolder(path).checkpoints, echo, newest_only=newest)
    settings = read_settings(found.settings)
    if isinstance(settings.data, DeviceData):
        names = read_item_names(path, settings.data.items)
        federation = federation_without_clients(settings, found.progress.state, names)
        facts = found.data
    else:
        data = load_run_data(path, settings)
        facts = data.fingerprint()
        checkpoint.require_same_data(found, facts, path)
        federation = Federation.of(settings, data)
    checkpoint.require_same_shapes(found, federation.plan.architecture.shapes, path)
    federation.clients.local_state = found.progress.local_state
    return LoadedRun(str(path), federation, found.progress, facts)


def find_user(data: Dataset, wanted: str) -> int:
    """Find the number of a user, given by the id of the source file, or as ``#number``."""
    text = wanted.strip()
    if data.user_ids is not None and not text.startswith("#"):
        if text in data.user_ids:
            return data.user_ids.index(text)
        needed = f"an id of {data.name} (such as {', '.join(data.user_ids[:3])}), or #0 to #{data.num_users - 1}"
        raise InvalidSettings(f"user {wanted!r}{did_you_mean(text, data.user_ids)}", needed, "Check the id.")
    digits = text.removeprefix("#")
    if not digits.isdecimal() or int(digits) >= data.num_users:
        raise InvalidSettings(f"user {wanted!r}", f"#0 to #{data.num_users - 1}", "Check the number.")
    return int(digits)


def read_history(given: str | Path, data: Dataset, *, rated: bool = False) -> Interactions:
    """Read the history of one new user: item ids between commas, or a file with an id (or ``#number``) per line.

    It may be empty. If ``rated``, lines end with the rating. The file may be a CSV with a column ``item`` (``rating``).
    """
    path = Path(given)
    form = "one item id per line" + (", then its rating" if rated else "")
    try:
        listed = isinstance(given, str) and not rated and re.search(r",|^#?\d+$", given)
        if given == "":
            lines = []
        elif isinstance(given, str) and listed and not os.path.exists(given):  # Path.exists raises for long names
            lines = [name.strip() for name in given.split(",") if name.strip()]
        else:
            lines = _history_lines(path, rated=rated)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path}: {error}", "a readable text file", f"Write {form}.") from None
    names, ratings = _split_ratings(lines, data) if rated else (lines, None)
    known = {} if data.item_ids is None else {name: number for number, name in enumerate(data.item_ids)}
    items = [_item_number(name, known, data) for name in names]
    unknown = [name for name, item in zip(names, items, strict=True) if item is None]
    if unknown:
        given = f"{len(unknown)} of {len(items)} items, first {unknown[0]!r}"
        some = "#0" if data.item_ids is None else ", ".join(data.item_ids[:3])
        raise InvalidSettings(given, f"items of {data.name} (such as {some}), {form}", "Leave out the others.")
    found = torch.tensor([item for item in items if item is not None], dtype=torch.int64)
    return Interactions.from_pairs(torch.zeros_like(found), found, 1, data.num_items, ratings)


def _history_lines(path: Path, *, rated: bool) -> list[str]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    columns = [name.strip().strip('"') for name in lines[0].split(",")] if lines else []
    wanted = ["item", "rating"] if rated else ["item"]
    if not set(wanted) <= set(columns):
        return lines
    rows = csv.DictReader(lines, columns)
    next(rows)
    return [" ".join(str(row[name]).strip() for name in wanted) for row in rows]


def _split_ratings(lines: list[str], data: Dataset) -> tuple[list[str], Tensor]:
    """Split lines into items and ratings; refuse ratings out of the range of the data, if it is known."""
    known = data.train.ratings
    low, high = (0.0, math.inf) if known is None else (float(known.min()), float(known.max()))
    rated = list[tuple[str, float]]()
    for line in lines:
        parts = re.fullmatch(r"(.+?)[\s,]+(\d+\.?\d*)", line)
        if parts is None or not low <= float(parts[2]) <= high:
            needed = f"an item id and its rating, {low:g} to {high:g}, after a space, a tab or a comma"
            given = f"the line {line!r}, for a model of ratings"
            raise InvalidSettings(given, needed, "Write the rating of every item.")
        rated.append((parts[1], float(parts[2])))
    return [name for name, _ in rated], torch.tensor([rating for _, rating in rated])


def item_name(item: int, data: Dataset) -> str:
    """Id of an item in the source file, or ``#`` and its catalog number if it has none."""
    if data.item_ids is not None:
        return data.item_ids[item]
    return f"#{item if data.counted is None else int(items_at(torch.tensor([item]), data.counted.leading))}"


def _item_number(name: str, known: dict[str, int], data: Dataset) -> int | None:
    if not name.startswith("#") and known:
        return known.get(name)
    digits = name.removeprefix("#")
    if not digits.isdecimal() or int(digits) >= data.num_items:
        return None
    return int(digits) if data.counted is None else int(ranks_of(torch.tensor([int(digits)]), data.counted.leading))


def load_run_data(run: Path, settings: Settings) -> Dataset | ImageDataset:
    """Load the data of a run: the copy in its folder, or else the source that its settings name."""
    from fairfold.data.store import read_dataset

    if not (run / DATA).is_dir():
        return load_data(settings)[0]
    data = read_dataset(run / DATA)
    # The copy has the order of the items, unless clients count them.
    return number_items(data, settings) if settings.subspace.counts_items else data


def save_run_data(run: Path, data: Dataset) -> None:
    """Write a copy of a run's data into its folder, for :func:`load_run_data`."""
    from fairfold.data.store import write_manifest, write_table
    from fairfold.data.tables import HISTORY, TEST, TRAIN, Table

    new = data.held_out_users  # numbered behind the others
    parts, kinds, first = [data.train, data.test], [TRAIN, TEST], [0, 0]  # and the number of the first user
    if new is not None:
        parts, kinds = [*parts, new.train, new.test], [*kinds, HISTORY, TEST]
        first += [data.num_users, data.num_users]
    users = torch.cat([number + part.users for number, part in zip(first, parts, strict=True)]).numpy()
    items = torch.cat([part.items for part in parts]).numpy()
    splits = numpy.repeat(numpy.array(kinds, dtype=numpy.uint8), [len(part) for part in parts])
    order = numpy.lexsort((items, users))
    ratings = None
    if data.train.ratings is not None and data.test.ratings is not None:
        ratings = torch.cat([data.train.ratings, data.test.ratings]).numpy()[order]
    ids = data.user_ids or list(map(str, range(data.num_users)))
    more = [] if new is None else new.user_ids or []
    user_ids = polars.Series([*ids, *more], dtype=polars.String)
    item_ids = polars.Series(data.item_ids or list(map(str, range(data.num_items))), dtype=polars.String)
    titles = None if data.titles is None else polars.DataFrame({"id": item_ids, "title": data.titles})
    sorted_users = users[order].astype(numpy.uint32)
    table = Table(sorted_users, items[order].astype(numpy.uint32), ratings, splits[order], user_ids, item_ids)
    with atomic_folder(run / DATA) as folder:
        counts = write_table(folder, table, titles)
        about = {
            "name": data.name,
            "kind": "interactions",
            "split": data.split or "as fitted",
            "source": [],
            "options": {},
        }
        write_manifest(folder, about | {"counts": counts, "repairs": dict(data.repairs)})


def with_device_data(settings: Settings, num_items: int) -> Settings:
    """Set the data of the settings to data on devices; networks of images keep theirs."""
    if settings.model.reads_images or num_items < 1:  # the plan refuses a catalog without items
        return settings
    return settings.model_copy(update={"data": DeviceData(items=num_items)})


def plan_from_state(settings: Settings, items: int, state: State, image_shape: ImageShape | None = None) -> Plan:
    """Make the plan of a run from the statistics in the server's state."""
    statistics = dict(state.algorithm_state.get(STATISTICS, {}))
    return Plan.of(settings, PublicStatistics(items, statistics=statistics), image_shape)


def catalog_order(state: State) -> Tensor | None:
    """Catalog numbers of the items, in the order of the run's numbers; None where these are the same."""
    place = state.algorithm_state.get(NUMBERING, {}).get(PLACE)
    return None if place is None else place.argsort()


def read_item_names(run: Path, items: int) -> list[str] | None:
    """Read the names of the items of a server's run; None where they have only numbers."""
    path = run.absolute().parent / CATALOG_FILE
    if not path.is_file():
        return None
    names = path.read_text(encoding="utf-8").splitlines()
    if len(names) != items:
        given = f"{path}, which has {len(names):,} names"
        raise InvalidState(given, f"those of the {items:,} items of {run}", "Put back the catalogue of this server.")
    return names


def federation_without_clients(settings: Settings, state: State, names: Sequence[str] | None = None) -> Federation:
    """Make the federation of a run on devices, as its server knows it: the plan and the popularity of the items."""
    assert isinstance(settings.data, DeviceData)
    items = settings.data.items
    plan = plan_from_state(settings, items, state)
    empty = Interactions(0, items, torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    counts = state.algorithm_state.get(STATISTICS, {}).get(COUNTS)
    popularity = torch.ones(items, dtype=torch.int64) if counts is None else counts.long()
    empty.__dict__["counts_by_item"] = popularity  # aggregated by the clients, in the place of their interactions
    order = catalog_order(state)
    if order is not None:
        names = [str(number) if names is None else names[number] for number in order.tolist()]
    data = Dataset("devices", empty, empty, item_ids=None if names is None else list(names))
    none = torch.empty(0, dtype=torch.int64)
    return Federation(plan, ClientSampler(plan, none, none), Clients(plan, empty, {}), data)
