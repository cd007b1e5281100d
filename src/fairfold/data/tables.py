"""From rows with the publisher's ids to dense ids, one split and items in order of popularity."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy
import polars
from numpy.typing import NDArray

from fairfold.data.options import SPLIT, Options
from fairfold.data.seeds import numpy_generator
from fairfold.data.spool import TEST, TRAIN, VALID, Spool
from fairfold.errors import InvalidData

DUPLICATES = "duplicate pairs, the last one kept"
OVERLAP = "pairs in more than one split, kept in the earliest (train, valid, test)"
SINGLE = "users with one interaction, in train only"
TEST_ONLY = "users without train interactions (the publisher's split)"

Array = NDArray[Any]


@dataclass(frozen=True)
class Table:
    """Interactions sorted by user, then item, each pair once, with the publisher's id of every dense id."""

    users: Array  # uint32
    items: Array  # uint32
    ratings: Array | None  # float32
    splits: Array  # uint8: TRAIN, VALID, TEST
    user_ids: polars.Series
    item_ids: polars.Series


def build_table(spool: Spool, options: Options, *, published_split: bool, repairs: Counter[str]) -> Table:
    """Choose, clean, number and split the interactions of a source; repairs are counted."""
    if not spool.users.height:
        raise InvalidData(
            "no interactions are left",
            "at least one",
            "Leave out some of the conditions (core, top_users, min_rating), or lower them.",
        )
    if options.top_users is None:
        frame = spool.scan().collect(engine="streaming")
    else:
        frame = _heaviest(spool, options.top_users)
    table = _without_duplicates(frame, options, repairs)
    if options.core:
        table = _core(table, options.core)
    # Items nobody touched belong to a publisher's numbering, as long as nothing was left out.
    if spool.catalogue is not None and not options.core and len(table.user_ids) == spool.counts["users"]:
        table = _published_catalogue(table, spool.catalogue)
    if options.resplit or not published_split:
        kept = SPLIT if options.split is None else options.split
        table = _put_aside(table, kept, TEST, options.seed, 0)
        repairs[SINGLE] += int((numpy.bincount(table.users, minlength=len(table.user_ids)) == 1).sum())
    if options.valid:
        table = _put_aside(table, 1 - options.valid, VALID, options.seed, 1)
    in_train = numpy.bincount(table.users[table.splits == TRAIN], minlength=len(table.user_ids))
    repairs[TEST_ONLY] += int((in_train == 0).sum())
    return _by_popularity(table)


def _heaviest(spool: Spool, wanted: int) -> polars.DataFrame:
    """The rows of the users with most distinct items; ties go to the user who comes first.

    The number of rows of a user bounds that of distinct items, so only the users with most rows need be looked at: if
    the last one chosen has at least as many items as any user left unlooked at has rows, the choice is exact.
    """
    users = spool.users.rename({"id": "user"})
    first = "user" if users.schema["user"] == polars.Int64 else "row"
    users = users.sort("rows", first, descending=[True, False])
    looked_at = wanted = min(wanted, users.height)
    while True:
        looked_at = min(2 * looked_at, users.height)
        candidates = users.head(looked_at)
        frame = spool.scan().join(candidates.lazy(), on="user", how="semi").collect(engine="streaming")
        items = frame.group_by("user").agg(polars.col("item").n_unique().alias("items")).join(candidates, on="user")
        items = items.sort("items", first, descending=[True, False]).head(wanted)
        if looked_at == users.height or _is_certain(items, users["rows"][looked_at]):
            return frame.join(items, on="user", how="semi")


def _is_certain(chosen: polars.DataFrame, next_rows: int) -> bool:
    """Whether no user with at most ``next_rows`` rows belongs among those chosen."""
    fewest = chosen["items"][-1]
    if fewest != next_rows:
        return bool(fewest > next_rows)
    # At a tie the earlier user wins; those not looked at come later than any chosen one with the same number of rows.
    return bool((chosen.filter(polars.col("items") == fewest)["rows"] == fewest).all())


def _dense(frame: polars.DataFrame, role: str) -> tuple[polars.DataFrame, polars.Series]:
    """Replace ids by dense numbers: in numeric order where they are numbers, else in order of first appearance."""
    ids = frame.group_by(role).agg(polars.col("row").min())
    ids = ids.sort(role if ids.schema[role] == polars.Int64 else "row").select(role)
    numbers = ids.with_columns(polars.int_range(polars.len(), dtype=polars.UInt32).alias("number"))
    coded = frame.join(numbers, on=role, how="left").drop(role).rename({"number": role})
    return coded, ids[role]


def _without_duplicates(frame: polars.DataFrame, options: Options, repairs: Counter[str]) -> Table:
    frame, user_ids = _dense(frame, "user")
    frame, item_ids = _dense(frame, "item")
    frame = frame.sort("user", "item", "split", "row").drop("row")
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
    return Table(users[keep], items[keep], ratings, splits[keep], user_ids, item_ids)


def _choose(table: Table, keep: Array) -> Table:
    ratings = None if table.ratings is None else table.ratings[keep]
    return replace(table, users=table.users[keep], items=table.items[keep], splits=table.splits[keep], ratings=ratings)


def _core(table: Table, core: int) -> Table:
    while True:
        users = numpy.bincount(table.users, minlength=len(table.user_ids))
        items = numpy.bincount(table.items, minlength=len(table.item_ids))
        keep = (users[table.users] >= core) & (items[table.items] >= core)
        if keep.all():
            break
        table = _choose(table, keep)
    if not len(table.users):
        raise InvalidData(f"core = {core} leaves nothing", "a core that some users have", "Ask for a smaller core.")
    users_left, users_now = numpy.unique(table.users, return_inverse=True)
    items_left, items_now = numpy.unique(table.items, return_inverse=True)
    return replace(
        table,
        users=users_now.astype(numpy.uint32),
        items=items_now.astype(numpy.uint32),
        user_ids=table.user_ids.gather(users_left),
        item_ids=table.item_ids.gather(items_left),
    )


def _published_catalogue(table: Table, size: int) -> Table:
    """Widen the catalogue to all ids of a publisher's dense numbering."""
    items = table.item_ids.to_numpy()[table.items].astype(numpy.uint32)
    return replace(table, items=items, item_ids=polars.Series("item", numpy.arange(size)))


def _train_mask(users: Array, num_users: int, share: float, random: numpy.random.Generator) -> Array:
    """A random ``share`` of every user's rows, rounded, at least one; ``users`` ascends."""
    counts = numpy.bincount(users, minlength=num_users)
    wanted = numpy.maximum(1, numpy.floor(share * counts + 0.5)).astype(numpy.int64)
    # One key, user above random number, sorts faster than two; stable, so that ties fall alike on every machine.
    draws = random.integers(0, 1 << 32, len(users), dtype=numpy.uint64)
    order = numpy.argsort((users.astype(numpy.uint64) << numpy.uint64(32)) | draws, kind="stable")
    starts = numpy.cumsum(counts) - counts
    ranks = numpy.arange(len(users)) - numpy.repeat(starts, counts)
    mask = numpy.empty(len(users), dtype=bool)
    mask[order] = ranks < numpy.repeat(wanted, counts)
    return mask


def _put_aside(table: Table, kept: float, part: int, *words: int) -> Table:
    """Keep a random share of every user's train rows there, and put the others in another part of the split."""
    train = numpy.flatnonzero(table.splits == TRAIN)
    mask = _train_mask(table.users[train], len(table.user_ids), kept, numpy_generator(*words))
    splits = table.splits.copy()
    splits[train[~mask]] = part
    return replace(table, splits=splits)


def _by_popularity(table: Table) -> Table:
    """Number the items by falling number of train interactions; ties keep their order."""
    popularity = numpy.bincount(table.items[table.splits == TRAIN], minlength=len(table.item_ids))
    order = numpy.argsort(-popularity, kind="stable")
    numbers = numpy.empty(len(order), dtype=numpy.uint32)
    numbers[order] = numpy.arange(len(order), dtype=numpy.uint32)
    items = numbers[table.items]
    rows = numpy.lexsort((items, table.users))
    table = _choose(replace(table, items=items), rows)
    return replace(table, item_ids=table.item_ids.gather(order))
