"""Build tables of interactions from sources: dense ids, splits, items in order of popularity."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import polars
from numpy.typing import NDArray

from fairfold.data.files import Advance, read_parquet
from fairfold.data.formats import NEWEST, USERS, Options, empty_file
from fairfold.data.readers import IdCounter, read
from fairfold.data.sampling import numpy_generator
from fairfold.errors import InvalidData

if TYPE_CHECKING:
    from fairfold.data.preparing import Source

SPLITS = ("train", "valid", "test")
TRAIN, VALID, TEST, HISTORY = range(4)  # splits as numbers, the earliest first, by which overlaps are resolved
HELD_OUT_USERS = 0.1  # share of the users who do not train, where users are held out
UNRATED = "interactions without a rating, left out"
LOW = "interactions rated lower than asked, left out"
DUPLICATES = "duplicate pairs, the last one kept"
OVERLAP = "pairs in more than one split, kept in the earliest (train, valid, test)"
SINGLE = "users with one interaction, in train only"
TEST_ONLY = "users without train interactions (the publisher's split)"
Array = NDArray[Any]


@dataclass(frozen=True)
class Spool:
    """Rows of a source on disk as Parquet parts, in the source's order, so that they can be read repeatedly."""

    parts: tuple[Path, ...]  # with the columns user, item, split and, where they are kept, rating and time
    users: polars.DataFrame  # id, number of rows, first row
    counts: dict[str, int]  # of the whole source, before any filter
    catalog_size: int | None  # size of a publisher's dense numbering, of which `items_touched` occur

    def scan(self) -> polars.LazyFrame:
        """Scan all rows lazily, with their number in ``row``."""
        return polars.scan_parquet(list(self.parts), row_index_name="row", glob=False)


def spool_rows(
    source: "Source", folder: Path, options: Options, *, repairs: Counter[str], block_size: int, advance: Advance
) -> Spool:
    """Read a source once, block by block, and write its rows as Parquet parts."""
    rated = all(file.file_format.rating is not None for file in source.files)
    if not rated and (options.ratings or options.min_rating is not None):
        remedy = "Name it with --rating-column, or rank items, which needs none (e.g. --recipe fair)."
        raise InvalidData("interactions without ratings", "a rating column", remedy)
    if options.by_time and any(file.file_format.time is None for file in source.files):
        given = f"split = {options.split!r} for {source.name}, which has no times"
        remedy = "Name their column with --time-column, or hold out at random (split = 'random')."
        raise InvalidData(given, "a column of times", remedy)
    parts: list[tuple[Path, polars.Schema]] = []
    all_users, all_items, users = IdCounter(), IdCounter(), IdCounter()
    counts = Counter[str]()
    kept = 0
    for file in source.files:
        before = counts["interactions"]
        for frame in read(file.path, file.file_format, repairs=repairs, block_size=block_size, advance=advance):
            all_users.add(frame["user"], counts["interactions"])
            all_items.add(frame["item"], counts["interactions"])
            counts["interactions"] += frame.height
            if rated:
                counts["rated"] += frame["rating"].count()
            part = _select_rated(frame, options, repairs)
            users.add(part["user"], kept)
            kept += part.height
            split = TRAIN if options.resplit or file.split is None else SPLITS.index(file.split)
            path = folder / f"rows-{len(parts):06d}.parquet"
            part = part.with_columns(split=polars.lit(split, polars.UInt8))
            part.write_parquet(path, compression="lz4", statistics=False)
            parts.append((path, part.schema))
        if counts["interactions"] == before:
            raise empty_file(file.path)
        if file.split is not None:
            counts[file.split] += counts["interactions"] - before
    _give_one_type(parts)
    items = all_items.total()
    catalog_size = _published_size(items["id"]) if source.files[0].file_format.kind == "lines" else None
    found = {"users": all_users.total().height, "items": items.height, **counts}
    if catalog_size is not None:
        found |= {"items": catalog_size, "items_touched": items.height}
    return Spool(tuple(path for path, _ in parts), users.total(), found, catalog_size)


def _select_rated(frame: polars.DataFrame, options: Options, repairs: Counter[str]) -> polars.DataFrame:
    kept = ["user", "item", *(["time"] if options.by_time else [])]
    if not options.ratings and options.min_rating is None:
        return frame.select(kept)
    rated = frame.filter(polars.col("rating").is_not_null())
    repairs[UNRATED] += frame.height - rated.height
    if options.ratings:
        return rated
    high = rated.filter(polars.col("rating") >= options.min_rating)
    repairs[LOW] += rated.height - high.height
    return high.select(kept)


def _published_size(ids: polars.Series) -> int | None:
    """Size of the catalog 0 … largest id if the ids are a dense numbering (most of them occur), else None."""
    if ids.dtype != polars.Int64:
        return None
    first, last = int(ids.min()), int(ids.max())  # type: ignore[arg-type]
    return last + 1 if first >= 0 and last < 2 * len(ids) else None


def _give_one_type(parts: list[tuple[Path, polars.Schema]]) -> None:
    """Make the ids of all parts text if those of any part are."""
    as_text = [role for role in ("user", "item") if len({schema[role] for _, schema in parts}) > 1]
    for path, schema in parts:
        change = [role for role in as_text if schema[role] != polars.String]
        if change:
            frame = read_parquet(path, memory_map=False).with_columns(polars.col(change).cast(polars.String))
            frame.write_parquet(path, compression="lz4", statistics=False)


@dataclass(frozen=True)
class Table:
    """Interactions with dense ids, sorted by user and item, without duplicates, and the original ids."""

    users: Array  # uint32
    items: Array  # uint32
    ratings: Array | None  # float32
    splits: Array  # uint8: TRAIN, VALID, TEST, HISTORY
    user_ids: polars.Series
    item_ids: polars.Series
    times: Array | None = None  # later ones larger: places in time, where that decides what is held out


def build_table(spool: Spool, options: Options, *, published_split: bool, repairs: Counter[str]) -> Table:
    """Filter, deduplicate, number and split the interactions of a source; repairs are counted."""
    if not spool.users.height:
        remedy = "Leave out some of the conditions (core, top_users, min_rating), or lower them."
        raise InvalidData("no interactions are left", "at least one", remedy)
    wanted = options.top_users
    frame = spool.scan().collect(engine="streaming") if wanted is None else _heaviest(spool, wanted)
    table = _without_duplicates(frame, options, repairs)
    if options.core:
        table = _keep_core(table, options.core)
    # Items without interactions belong to a publisher's numbering, as long as nothing was left out.
    if spool.catalog_size is not None and not options.core and len(table.user_ids) == spool.counts["users"]:
        items = table.item_ids.to_numpy()[table.items].astype(numpy.uint32)
        table = replace(table, items=items, item_ids=polars.Series("item", numpy.arange(spool.catalog_size)))
    if options.resplit or not published_split:
        by_users = options.split == USERS
        table = _hold_out_users(table, options.seed) if by_users else table
        source = HISTORY if by_users else TRAIN
        table = _hold_out(table, options.share, TEST, options.seed, 0, one=options.split == NEWEST, source=source)
        repairs[SINGLE] += int((numpy.bincount(table.users, minlength=len(table.user_ids)) == 1).sum())
    if options.valid:
        table = _hold_out(table, 1 - options.valid, VALID, options.seed, 1)
    in_train = numpy.bincount(table.users[numpy.isin(table.splits, (TRAIN, HISTORY))], minlength=len(table.user_ids))
    repairs[TEST_ONLY] += int((in_train == 0).sum())
    return _by_popularity(table)


def _heaviest(spool: Spool, wanted: int) -> polars.DataFrame:
    """Rows of the users with most distinct items; ties go to the user who comes first.

    A user's number of rows bounds that of distinct items, so only the users with most rows are examined: if the last
    one selected has at least as many items as any user not examined has rows, the selection is exact.
    """
    users = spool.users.rename({"id": "user"})
    first = "user" if users.schema["user"] == polars.Int64 else "row"
    users = users.sort("rows", first, descending=[True, False])
    examined = wanted = min(wanted, users.height)
    while True:
        examined = min(2 * examined, users.height)
        candidates = users.head(examined)
        frame = spool.scan().join(candidates.lazy(), on="user", how="semi").collect(engine="streaming")
        items = frame.group_by("user").agg(polars.col("item").n_unique().alias("items")).join(candidates, on="user")
        items = items.sort("items", first, descending=[True, False]).head(wanted)
        if examined == users.height or _is_certain(items, users["rows"][examined]):
            return frame.join(items, on="user", how="semi")


def _is_certain(selected: polars.DataFrame, next_rows: int) -> bool:
    """True if no user with at most ``next_rows`` rows belongs among those selected."""
    fewest = selected["items"][-1]
    if fewest != next_rows:
        return bool(fewest > next_rows)
    # At a tie the earlier user wins; users not examined come later than any selected one with as many rows.
    return bool((selected.filter(polars.col("items") == fewest)["rows"] == fewest).all())


def _dense_numbers(frame: polars.DataFrame, role: str) -> tuple[polars.DataFrame, polars.Series]:
    """Replace ids by dense numbers: in numeric order if they are numbers, else in order of first appearance."""
    ids = frame.group_by(role).agg(polars.col("row").min())
    ids = ids.sort(role if ids.schema[role] == polars.Int64 else "row").select(role)
    numbers = ids.with_columns(polars.int_range(polars.len(), dtype=polars.UInt32).alias("number"))
    coded = frame.join(numbers, on=role, how="left").drop(role).rename({"number": role})
    return coded, ids[role]


def _without_duplicates(frame: polars.DataFrame, options: Options, repairs: Counter[str]) -> Table:
    frame, user_ids = _dense_numbers(frame, "user")
    frame, item_ids = _dense_numbers(frame, "item")
    if options.by_time:  # of equal times the later row is the newer one
        frame = frame.sort("time", "row", nulls_last=False).drop("row").with_row_index("row")
    frame = frame.sort("user", "item", "split", "row")
    users, items, splits = (frame[name].to_numpy() for name in ("user", "item", "split"))
    same_pair = (users[1:] == users[:-1]) & (items[1:] == items[:-1])
    same_split = splits[1:] == splits[:-1]
    # Of equal rows the last stays; of a pair in two splits the earliest split stays, which sorts first.
    keep = numpy.ones(len(users), dtype=bool)
    keep[:-1] &= ~(same_pair & same_split)
    repairs[DUPLICATES] += int((same_pair & same_split).sum())
    first_of_pair = numpy.flatnonzero(numpy.concatenate(([True], ~same_pair)))
    repeats = numpy.diff(numpy.append(first_of_pair, len(users)))
    later = splits != numpy.repeat(splits[first_of_pair], repeats)
    repairs[OVERLAP] += int((keep & later).sum())
    keep &= ~later
    ratings = frame["rating"].to_numpy()[keep] if options.ratings else None
    times = frame["row"].to_numpy()[keep] if options.by_time else None
    return Table(users[keep], items[keep], ratings, splits[keep], user_ids, item_ids, times)


def _keep_rows(table: Table, keep: Array) -> Table:
    ratings, times = (None if column is None else column[keep] for column in (table.ratings, table.times))
    users, items, splits = (column[keep] for column in (table.users, table.items, table.splits))
    return replace(table, users=users, items=items, splits=splits, ratings=ratings, times=times)


def _keep_core(table: Table, core: int) -> Table:
    while True:
        users = numpy.bincount(table.users, minlength=len(table.user_ids))
        items = numpy.bincount(table.items, minlength=len(table.item_ids))
        keep = (users[table.users] >= core) & (items[table.items] >= core)
        if keep.all():
            break
        table = _keep_rows(table, keep)
    if not len(table.users):
        raise InvalidData(f"core = {core} leaves nothing", "a core that some users have", "Ask for a smaller core.")
    users_left, users = numpy.unique(table.users, return_inverse=True)
    items_left, items = numpy.unique(table.items, return_inverse=True)
    user_ids, item_ids = table.user_ids.gather(users_left), table.item_ids.gather(items_left)
    numbers = {"users": users.astype(numpy.uint32), "items": items.astype(numpy.uint32)}
    return replace(table, user_ids=user_ids, item_ids=item_ids, **numbers)


def _hold_out_users(table: Table, seed: int) -> Table:
    """Draw users who do not train, of those with two interactions at least: all of their rows become histories."""
    counts = numpy.bincount(table.users, minlength=len(table.user_ids))
    can = numpy.flatnonzero(counts > 1)
    wanted = max(1, round(HELD_OUT_USERS * len(counts)))
    if len(can) < wanted or len(counts) < 2:
        given = f"split = {USERS!r} of {len(counts):,} users, {len(can):,} of them with two interactions or more"
        remedy = "Hold out interactions of every user (split = 'random')."
        raise InvalidData(given, f"{wanted:,} of these, and others to train on", remedy)
    drawn = can[numpy.argsort(numpy_generator(seed, 2).random(len(can)), kind="stable")[:wanted]]
    splits = numpy.where(numpy.isin(table.users, drawn), HISTORY, table.splits).astype(numpy.uint8)
    return replace(table, splits=splits)


def _hold_out(table: Table, share: float, split: int, *seeds: int, one: bool = False, source: int = TRAIN) -> Table:
    """Keep a share of every user's training rows, or all but ``one``, but one at least; the others go to a split.

    What is kept is the oldest part where times are known, else drawn at random.
    """
    train = numpy.flatnonzero(table.splits == source)
    users = table.users[train]  # ascending
    counts = numpy.bincount(users, minlength=len(table.user_ids))
    wanted = numpy.maximum(1, counts - 1 if one else numpy.floor(share * counts + 0.5)).astype(numpy.int64)
    # One key, user above random number, sorts faster than two; stable, so that ties are the same on every machine.
    draws = numpy_generator(*seeds).integers(0, 1 << 32, len(users), dtype=numpy.uint64)
    draws = draws if table.times is None else table.times[train].astype(numpy.uint64)
    order = numpy.argsort((users.astype(numpy.uint64) << numpy.uint64(32)) | draws, kind="stable")
    ranks = numpy.arange(len(users)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    splits = table.splits.copy()
    splits[train[order[ranks >= numpy.repeat(wanted, counts)]]] = split
    return replace(table, splits=splits)


def _by_popularity(table: Table) -> Table:
    """Number the items by falling number of training interactions; ties keep their order."""
    popularity = numpy.bincount(table.items[table.splits == TRAIN], minlength=len(table.item_ids))
    order = numpy.argsort(-popularity, kind="stable")
    numbers = numpy.empty(len(order), dtype=numpy.uint32)
    numbers[order] = numpy.arange(len(order), dtype=numpy.uint32)
    table = replace(table, items=numbers[table.items], item_ids=table.item_ids.gather(order))
    return _keep_rows(table, numpy.lexsort((table.items, table.users)))
