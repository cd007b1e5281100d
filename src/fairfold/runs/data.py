"""The data of a run: a copy in its folder, a source named by its settings, or data that stays on devices."""

from collections.abc import Sequence
from pathlib import Path

import numpy
import polars
import torch
from torch import Tensor

from fairfold.config import Settings
from fairfold.config.tables import DeviceData
from fairfold.data import Dataset, Interactions
from fairfold.data.files import atomic_folder
from fairfold.data.images import ImageDataset
from fairfold.errors import InvalidState
from fairfold.federation.algorithm import COUNTS
from fairfold.federation.architecture import ImageShape
from fairfold.federation.clients import Clients
from fairfold.federation.federation import Federation, load_data, number_items
from fairfold.federation.plan import Plan
from fairfold.federation.scheduling import ClientSampler
from fairfold.federation.updates import PublicStatistics, State

DATA = "data"  # folder of a copy of the prepared data inside a run's folder
# Keys of a server's algorithm state: the aggregated statistics, and the number of each item in this run.
STATISTICS, NUMBERING, PLACE = "statistics", "numbering", "place"
CATALOG_FILE = "catalogue.txt"  # file of item names, a line each, in a server's folder beside its run


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
        write_manifest(folder, about | {"counts": counts, "repairs": {}})


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
