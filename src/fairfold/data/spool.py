"""The rows of a source on disk in columnar form, so that they can be gone over more than once in little memory."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy
import polars
from numpy.typing import NDArray

from fairfold.data import readers
from fairfold.data.files import Advance
from fairfold.data.layouts import empty
from fairfold.data.options import Options
from fairfold.data.parquet import read_whole
from fairfold.data.sources import SPLITS, Source
from fairfold.errors import InvalidData

# Whole numbers, so that duplicates and overlaps can be resolved by comparing them.
TRAIN, VALID, TEST = range(3)

UNRATED = "interactions without a rating, left out"
LOW = "interactions rated lower than asked, left out"


@dataclass(frozen=True)
class Spool:
    """The wanted rows of a source as Parquet parts, in the source's order.

    ``counts`` are of the whole source: users, items, interactions; where it has ratings, how many are rated; where it
    has a split, how many are in each part. Where items have a publisher's dense numbering, ``items`` counts all its
    ids, ``items_touched`` those that occur.
    """

    parts: tuple[Path, ...]  # with the columns user, item, split and, where ratings are kept, rating
    users: polars.DataFrame  # of these rows: id, number of rows, first row
    counts: dict[str, int]
    catalogue: int | None  # size of a publisher's dense numbering

    def scan(self) -> polars.LazyFrame:
        """All rows, lazily, with their number in ``row``."""
        return polars.scan_parquet(list(self.parts), row_index_name="row", glob=False)


def spool(
    source: Source,
    folder: Path,
    options: Options,
    *,
    repairs: Counter[str],
    block_size: int,
    advance: Advance,
) -> Spool:
    """Read a source once, block by block, into Parquet parts in a folder."""
    rated = all(file.layout.rating is not None for file in source.files)
    if not rated and (options.ratings or options.min_rating is not None):
        raise InvalidData(
            "interactions without ratings", "a rating column", "Name it with --rating-column, or leave ratings out."
        )
    parts: list[tuple[Path, polars.Schema]] = []
    all_users, all_items, users = Tally(), Tally(), Tally()
    counts = Counter[str]()
    kept = 0
    for file in source.files:
        before = counts["interactions"]
        for frame in readers.read(file.path, file.layout, repairs=repairs, block_size=block_size, advance=advance):
            all_users.add(frame["user"], counts["interactions"])
            all_items.add(frame["item"], counts["interactions"])
            counts["interactions"] += frame.height
            if rated:
                counts["rated"] += frame["rating"].count()
            part = _wanted(frame, options, repairs)
            users.add(part["user"], kept)
            kept += part.height
            split = TRAIN if options.resplit or file.split is None else SPLITS.index(file.split)
            path = folder / f"rows-{len(parts):06d}.parquet"
            part = part.with_columns(split=polars.lit(split, polars.UInt8))
            part.write_parquet(path, compression="lz4", statistics=False)
            parts.append((path, part.schema))
        if counts["interactions"] == before:
            raise empty(file.path)
        if file.split is not None:
            counts[file.split] += counts["interactions"] - before
    _give_one_type(parts)
    items = all_items.total()
    catalogue = _published_size(items["id"]) if source.files[0].layout.kind == "lines" else None
    found = {"users": all_users.total().height, "items": items.height, **counts}
    if catalogue is not None:
        found |= {"items": catalogue, "items_touched": items.height}
    return Spool(tuple(path for path, _ in parts), users.total(), found, catalogue)


def _wanted(frame: polars.DataFrame, options: Options, repairs: Counter[str]) -> polars.DataFrame:
    """The rows, and of the ratings what is asked for."""
    if not options.ratings and options.min_rating is None:
        return frame.select("user", "item")
    rated = frame.filter(polars.col("rating").is_not_null())
    repairs[UNRATED] += frame.height - rated.height
    if options.ratings:
        return rated
    high = rated.filter(polars.col("rating") >= options.min_rating)
    repairs[LOW] += rated.height - high.height
    return high.select("user", "item")


def _published_size(ids: polars.Series) -> int | None:
    """Size of the catalogue 0 … largest id where the ids are a dense numbering (most of them occur), else None."""
    if ids.dtype != polars.Int64:
        return None
    first, last = int(ids.min()), int(ids.max())  # type: ignore[arg-type]
    return last + 1 if first >= 0 and last < 2 * len(ids) else None


def _give_one_type(parts: list[tuple[Path, polars.Schema]]) -> None:
    """Where one block holds an id that is not a number, the ids of all blocks become text."""
    as_text = [role for role in ("user", "item") if len({schema[role] for _, schema in parts}) > 1]
    for path, schema in parts:
        change = [role for role in as_text if schema[role] != polars.String]
        if change:
            frame = read_whole(path, memory_map=False).with_columns(polars.col(change).cast(polars.String))
            frame.write_parquet(path, compression="lz4", statistics=False)


class Tally:
    """How often each id was seen, and in which row first.

    Small whole numbers are counted in an array. For other ids blocks are counted on their own and added up once they
    outgrow the total. (The engine's own streaming aggregation keeps partial counts of ids that are far apart, and so
    grows with the rows.)
    """

    LARGEST = 1 << 24  # ids below it are counted in an array
    SMALLEST = 1 << 22  # counts of blocks held before they are added up

    def __init__(self) -> None:
        self._counts = numpy.zeros(0, dtype=numpy.int64)
        self._first = numpy.zeros(0, dtype=numpy.int64)
        self._parts: list[polars.DataFrame] = []
        self._merged = 0

    def add(self, ids: polars.Series, first_row: int) -> None:
        """Count the ids of a block, whose first row has the number ``first_row``."""
        if not len(ids):
            return
        if ids.dtype == polars.Int64:
            numbers = ids.to_numpy()
            if numbers.min() >= 0 and numbers.max() < self.LARGEST:
                self._add_numbers(numbers, first_row)
                return
        frame = ids.alias("id").to_frame().with_row_index("row", first_row)
        counts = frame.group_by("id").agg(polars.len().cast(polars.Int64).alias("rows"), polars.col("row").min())
        self._parts.append(counts.select("id", "rows", polars.col("row").cast(polars.Int64)))
        if sum(part.height for part in self._parts) > max(self.SMALLEST, 2 * self._merged):
            self._merge()

    def _add_numbers(self, ids: NDArray[numpy.int64], first_row: int) -> None:
        largest = int(ids.max())
        if largest >= len(self._counts):
            more = numpy.zeros(max(largest + 1, 2 * len(self._counts)) - len(self._counts), dtype=numpy.int64)
            self._counts, self._first = numpy.append(self._counts, more), numpy.append(self._first, more)
        new = numpy.flatnonzero(self._counts[ids] == 0)[::-1]
        self._first[ids[new]] = first_row + new  # backwards, so that the first of several rows is written last
        numpy.add.at(self._counts, ids, 1)

    def _merge(self) -> None:
        if len({part.schema["id"] for part in self._parts}) > 1:
            self._parts = [part.with_columns(polars.col("id").cast(polars.String)) for part in self._parts]
        whole = polars.concat(self._parts).group_by("id").agg(polars.col("rows").sum(), polars.col("row").min())
        self._parts, self._merged = [whole], whole.height

    def total(self) -> polars.DataFrame:
        """Every id with its number of rows (``rows``) and its first one (``row``)."""
        seen = numpy.flatnonzero(self._counts)
        self._parts.append(polars.DataFrame({"id": seen, "rows": self._counts[seen], "row": self._first[seen]}))
        self._counts, self._first = self._counts[:0], self._first[:0]
        if len(self._parts) > 1 and not self._parts[-1].height:
            self._parts.pop()
        self._merge()
        return self._parts[0]
