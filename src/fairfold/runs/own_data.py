"""The data of a run within its own folder, where it came from no file that could be read again."""

from pathlib import Path

import numpy
import polars
import torch

from fairfold.data import Dataset
from fairfold.data.files import atomic_folder
from fairfold.data.images import ImageDataset
from fairfold.settings import Settings
from fairfold.simulate.numbering import numbered
from fairfold.simulate.world import load_data

DATA = "data"
"""The folder with the data of a run, prepared, inside the run's own."""


def data_of(run: Path, settings: Settings) -> Dataset | ImageDataset:
    """What a run was trained on: what its folder holds, or else what its settings name."""
    from fairfold.data.store import read_dataset

    if not (run / DATA).is_dir():
        return load_data(settings)[0]
    data = read_dataset(run / DATA)
    # The order of the items is kept with them, but for one that devices count.
    return numbered(data, settings) if settings.subspace.counted else data


def keep_data(run: Path, data: Dataset) -> None:
    """Write the data of a run into its folder, from which :func:`data_of` reads the same."""
    from fairfold.data.store import write_manifest, write_table
    from fairfold.data.tables import Table

    parts = (data.train, data.test)
    users = torch.cat([part.users for part in parts]).numpy()
    items = torch.cat([part.items for part in parts]).numpy()
    splits = numpy.repeat(numpy.array([0, 2], dtype=numpy.uint8), [len(part) for part in parts])  # train, test
    order = numpy.lexsort((items, users))
    ratings = None
    if data.train.ratings is not None and data.test.ratings is not None:
        ratings = torch.cat([data.train.ratings, data.test.ratings]).numpy()[order]
    ids = [
        polars.Series(known if known is not None else [str(number) for number in range(many)], dtype=polars.String)
        for known, many in ((data.user_ids, data.num_users), (data.item_ids, data.num_items))
    ]
    titles = None if data.titles is None else polars.DataFrame({"id": ids[1], "title": data.titles})
    shapes = users[order].astype(numpy.uint32), items[order].astype(numpy.uint32)
    table = Table(*shapes, ratings, splits[order], *ids)
    with atomic_folder(run / DATA) as folder:
        counts = write_table(folder, table, titles)
        about = {"name": data.name, "kind": "interactions", "split": "as fitted", "source": [], "options": {}}
        write_manifest(folder, about | {"counts": counts, "repairs": {}})
