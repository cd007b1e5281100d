"""Leave one out by time: of every user the newest item is the test, the one before it validation.

The field's split for federated recommendation. The readers of :mod:`fairfold.data` keep no times, so MovieLens's files
are read here, for this alone.
"""

from functools import cache
from pathlib import Path

import polars
import torch
from torch import Tensor

from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.known import resolve
from fairfold.errors import InvalidData

FILES = {"u.data": "\t", "*.rating": "\t", "ratings.dat": "::", "ratings.csv": ","}
"""Files of user, item, rating and time, and what stands between these."""


@cache
def newest_left_out(name: str) -> Dataset:
    """A MovieLens set, split by time; users with fewer than three items are left out."""
    frame = _read(resolve(name)).sort("user", "time", "row").unique(["user", "item"], keep="last", maintain_order=True)
    frame = frame.filter(polars.len().over("user") >= 3)
    users, items = (frame[role].rank("dense").cast(polars.Int64) - 1 for role in ("user", "item"))
    from_end = frame.select(polars.len().over("user") - 1 - polars.int_range(polars.len()).over("user"))
    who, what = torch.from_numpy(users.to_numpy().copy()), torch.from_numpy(items.to_numpy().copy())
    back = torch.from_numpy(from_end.to_series().cast(polars.Int64).to_numpy().copy())
    sizes = int(who.max()) + 1, int(what.max()) + 1
    what = _by_popularity(what, back >= 2, sizes[1])

    def part(chosen: Tensor) -> Interactions:
        return Interactions.from_pairs(who[chosen], what[chosen], *sizes)

    ids = [[str(number) for number in range(size)] for size in sizes]
    return Dataset(
        name=f"{name}, newest left out", train=part(back >= 2), test=part(back == 0), valid=part(back == 1),
        user_ids=ids[0], item_ids=ids[1], titles=None,
    )  # fmt: skip


def _read(path: Path) -> polars.DataFrame:
    """All rows of a set, with the order in which they stand."""
    for pattern, between in FILES.items():
        found = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        if found:
            lines = [
                line.split(between)[:4] for file in found for line in file.read_text(encoding="latin-1").splitlines()
            ]
            rows = [[int(word) for word in (line[0], line[1], line[3])] for line in lines if line[0].isdecimal()]
            return polars.DataFrame(rows, schema=["user", "item", "time"], orient="row").with_row_index("row")
    needed = "files of user, item, rating and time: " + ", ".join(FILES)
    raise InvalidData(f"{path}", needed, "Use ml-100k or ml-1m.")


def _by_popularity(items: Tensor, train: Tensor, count: int) -> Tensor:
    order = torch.bincount(items[train], minlength=count).argsort(descending=True, stable=True)
    place = torch.empty(count, dtype=torch.int64)
    place[order] = torch.arange(count)
    return place[items]
