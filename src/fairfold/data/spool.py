"""The rows of a source on disk in columnar form, so that they can be gone over more than once in little memory."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import polars

from fairfold.data import lines, readers
from fairfold.data.layouts import empty
from fairfold.data.options import Options
from fairfold.data.parquet import read_whole
from fairfold.data.sources import Source
from fairfold.data.tally import Tally
from fairfold.errors import InvalidData

# Whole numbers, so that duplicates and overlaps can be resolved by comparing them.
TRAIN, VALID, TEST = 0, 1, 2
SPLIT_CODES = {None: TRAIN, "train": TRAIN, "valid": VALID, "test": TEST}

UNRATED = "interactions without a rating, left out"
LOW = "interactions rated lower than asked, left out"


@dataclass(frozen=True)
class Spool:
    """The wanted rows of a source as Parquet parts, in the source's order.

    Attributes:
        parts: Files with the columns user, item, split and, where ratings are kept, rating.
        users: The users of these rows: id, number of rows, first row.
        counts: Users, items, interactions of the whole source; where it has ratings, how many are rated; where it has
            a split, how many are in each part. Where items have a publisher's dense numbering, ``items`` counts all
            its ids, ``items_touched`` those that occur.
        catalogue: Size of that numbering, or None.
    """

    parts: tuple[Path, ...]
    users: polars.DataFrame
    counts: dict[str, int]
    catalogue: int | None

    def scan(self) -> polars.LazyFrame:
        """All rows, lazily, with their number in ``row``."""
        return polars.scan_parquet(list(self.parts), row_index_name="row", glob=False)


def spool(
    source: Source,
    folder: Path,
    options: Options,
    *,
    repairs: Counter[str],
    block_size: int = lines.BLOCK,
    advance: lines.Advance | None = None,
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
            split = TRAIN if options.resplit else SPLIT_CODES[file.split]
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
