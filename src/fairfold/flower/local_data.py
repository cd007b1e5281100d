"""A device's local data: interactions in its own CSV or SQLite file, which never leave the device.

Torch is imported when data is read: naming a file must cost nothing where the server only requests the capacity.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairfold.errors import InvalidData

if TYPE_CHECKING:
    from flwr.app import Context

    from fairfold.data import Dataset, Interactions
    from fairfold.data.images import ImageDataset
    from fairfold.data.partition import Partition

SQLITE_MAGIC = b"SQLite format 3\0"
Row = tuple[str, str, float | None]
Rated = dict[str, dict[int, Any]]  # by user, the items in order with their ratings, None where these do not count


@dataclass(frozen=True)
class LocalData:
    """The interactions of a device's users (one, on a phone).

    Attributes:
        client_ids: The users of ``train`` that are this device's; all if empty. A simulation may give every node the
            same numbering of users, so that its random streams are those of the simulator.
        user_ids: Their names on this device, in the order of ``client_ids``.
    """

    train: Interactions
    test: Interactions | None = None  # held out
    client_ids: list[int] = field(default_factory=list)
    user_ids: list[str] = field(default_factory=list)

    @property
    def users(self) -> list[int]:
        """The users of this device, as ``train`` numbers them."""
        return self.client_ids or list(range(self.train.num_users))

    @property
    def names(self) -> list[str]:
        """The users' names, by which their local state is stored."""
        return self.user_ids or [str(user) for user in self.users]

    def renumbered(self, numbers: dict[int, int]) -> LocalData:
        """A copy with other numbers of items."""
        import torch

        def renumber(part: Interactions) -> Interactions:
            items = torch.tensor([numbers.get(item, item) for item in part.items.tolist()], dtype=torch.int64)
            return part.from_pairs(part.users, items, part.num_users, part.num_items, part.ratings)

        return replace(self, train=renumber(self.train), test=None if self.test is None else renumber(self.test))

    def local_interactions(self) -> Interactions:
        """The training interactions of this device's users, who are numbered from 0."""
        import torch

        if not self.client_ids:
            return self.train
        parts = [self.train.of(user) for user in self.client_ids]
        owners = torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
        rated = self.train.ratings is not None
        ratings = torch.cat([self.train.ratings_of(user) for user in self.client_ids]) if rated else None
        return self.train.from_pairs(owners, torch.cat(parts), len(parts), self.train.num_items, ratings)

    def own_items(self) -> set[int]:
        """All items of this device's users, held-out ones included."""
        parts = [self.train] if self.test is None else [self.train, self.test]
        return {item for part in parts for user in self.users for item in part.of(user).tolist()}


@dataclass(frozen=True)
class LocalImages:
    """A device's images for training and evaluation, and their partition among clients (one, on a phone)."""

    images: ImageDataset
    partition: Partition


@dataclass(frozen=True)
class LocalFile:
    """A CSV or SQLite file with one interaction per row.

    Attributes:
        item: Column of the item: its number in the catalogue, or its name in ``catalogue``.
        user: Column of the user; a file without it is one user's.
        rating: Column of the rating, for models that predict ratings.
        catalogue: Text file with the name of every item, a line each, in the order of the server's model.
        test: File of the same form with held-out interactions.
        holdout: Share of the rows to hold out, where there is no ``test``: by user and item alone, so that a row that
            was held out once is never trained on.
        table: Table of a SQLite file; its only one if not given.
    """

    path: str | Path
    item: str = "item"
    user: str = "user"
    rating: str = "rating"
    catalogue: str | Path | None = None
    test: str | Path | None = None
    holdout: float = 0.0
    table: str | None = None

    def load(self, num_items: int, *, ratings: bool = False) -> LocalData:
        """Read the file for a catalogue of a given size."""
        rows, held_out, numbers = self.read(num_items, ratings=ratings)
        names = sorted({row[0] for row in rows})
        users = {name: number for number, name in enumerate(names)}
        train = _interactions(rows, users, numbers, num_items)
        test = _interactions(held_out, users, numbers, num_items) if held_out else None
        return LocalData(train, test, user_ids=names)

    def read(self, num_items: int, *, ratings: bool = False) -> tuple[list[Row], list[Row], dict[str, int]]:
        """Rows to train on, held-out rows of the same users, and the number of every item; without torch."""
        rows = list(self._rows(Path(self.path), ratings))
        held_out = [] if self.test is None else list(self._rows(Path(self.test), ratings))
        if self.test is None and self.holdout > 0:
            held_out = [row for row in rows if _uniform(row) < self.holdout]
            rows = [row for row in rows if _uniform(row) >= self.holdout]
        if not rows:
            raise InvalidData(f"{self.path}, which holds no interactions", "at least one", "Check the file.")
        users = {row[0] for row in rows}
        held_out = [row for row in held_out if row[0] in users]  # users without history have no recommendations yet
        return rows, held_out, self._item_numbers(rows + held_out, num_items)

    def require_readable(self) -> None:
        """Refuse a file of another kind, or without the column of the item; it may be empty yet."""
        next(self._rows(Path(self.path), ratings=False), None)

    def parts(self, num_items: int, *, ratings: bool = False) -> tuple[Rated, Rated]:
        """What every user has to train on, and held out, users in the order of their names; without torch."""
        rows, held_out, numbers = self.read(num_items, ratings=ratings)
        return _by_user(rows, numbers), _by_user(held_out, numbers)

    def histories(self, num_items: int, *, ratings: bool = False) -> Rated:
        """All that every user has, without torch."""
        rows = list(self._rows(Path(self.path), ratings))
        return _by_user(rows, self._item_numbers(rows, num_items))

    def _rows(self, path: Path, ratings: bool) -> Iterator[Row]:
        try:
            with path.open("rb") as file:
                is_database = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
            rows = self._database_rows(path, ratings) if is_database else self._csv_rows(path, ratings)
            for user, item, rating in rows:
                if item is None or str(item).strip() == "":
                    raise InvalidData(f"{path}: a row without an item", "an item in every row", "Correct the file.")
                number = None
                if ratings:
                    try:
                        number = float("" if rating is None else rating)
                        if not abs(number) < inf:
                            raise ValueError
                    except ValueError:
                        raise InvalidData(f"{path}: rating {rating!r}", "a number", "Correct the file.") from None
                yield str(user).strip(), str(item).strip(), number
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise InvalidData(f"{path}: {error}", "a CSV or SQLite file", "Check the file.") from None

    def _csv_rows(self, path: Path, ratings: bool) -> Iterator[tuple[str, str | None, str | None]]:
        with path.open(newline="", encoding="utf-8-sig") as file:
            separator = max(",;\t", key=file.readline().count)
            file.seek(0)
            reader = csv.DictReader(file, delimiter=separator)
            if not reader.fieldnames:
                remedy = (
                    "Fill it, or name another: `fairfold node enrol TOKEN --server ADDRESS --data FILE --capacity 16x`."
                )
                raise InvalidData(f"{path}, which is empty", f"a line with the column {self.item!r}", remedy)
            self._require_columns(path, set(reader.fieldnames), ratings)
            for row in reader:
                yield row.get(self.user) or "", row.get(self.item), row[self.rating] if ratings else None

    def _database_rows(self, path: Path, ratings: bool) -> Iterator[tuple[str, str | None, str | None]]:
        import sqlite3  # here: a file of text needs a megabyte less

        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
                table = self.table or (tables[0] if len(tables) == 1 else "interactions")
                if table not in tables:
                    raise InvalidData(
                        f"{path}: tables {', '.join(tables)}", f"a table {table!r}", "Name it (table=...)."
                    )
                columns = {row[1] for row in database.execute(f"PRAGMA table_info({_quoted(table)})")}
                self._require_columns(path, columns, ratings)
                user = _quoted(self.user) if self.user in columns else "''"
                rating = _quoted(self.rating) if ratings else "NULL"
                yield from database.execute(f"SELECT {user}, {_quoted(self.item)}, {rating} FROM {_quoted(table)}")
        except sqlite3.Error as error:
            raise InvalidData(f"{path}: {error}", "a CSV or SQLite file", "Check the file.") from None

    def _require_columns(self, path: Path, columns: set[str], ratings: bool) -> None:
        for name in [self.item, self.rating] if ratings else [self.item]:
            if name not in columns:
                given = ", ".join(sorted(columns)) or "none"
                remedy = "Rename it in the file; in Python, LocalFile(item=...) names another."
                raise InvalidData(f"{path}: columns {given}", f"a column {name!r}", remedy)

    def _item_numbers(self, rows: list[Row], num_items: int) -> dict[str, int]:
        wanted = {row[1] for row in rows}
        if self.catalogue is None:
            numbers = {name: int(name) if name.isdecimal() and len(name) < 19 else -1 for name in wanted}
        else:  # one pass that stores only this device's items
            numbers = dict.fromkeys(wanted, -1)
            with Path(self.catalogue).open(encoding="utf-8") as lines:
                numbers |= {name: line for line, text in enumerate(lines) if (name := text.strip()) in wanted}
        unknown = [name for name, number in numbers.items() if not 0 <= number < num_items]
        if unknown:
            given = f"{self.path}: item {unknown[0]!r} and {len(unknown) - 1} more are not in the catalogue"
            needed = f"numbers from 0 to {num_items - 1}, or names listed in `catalogue`"
            raise InvalidData(given, needed, "Check the column, or bring the catalogue up to date.")
        return numbers


def read_item_names(catalogue: Path, num_items: int) -> list[str]:
    """The name of every item of a model, from the catalogue that the device got when it enrolled."""
    names = catalogue.read_text(encoding="utf-8").splitlines()
    if len(names) != num_items:
        given = f"{catalogue} with {len(names):,} names, for a model of {num_items:,} items"
        remedy = (
            "Enrol again, in a new folder: `fairfold node enrol TOKEN --server ADDRESS --data FILE --capacity 16x "
            "--folder NEW` fetches it."
        )
        raise InvalidData(given, "the catalogue of the model's server", remedy)
    return names


def node_partition(data: Dataset, context: Context) -> LocalData:
    """A virtual node's share of a data set, for simulations: consecutive users, as many for every node."""
    number, nodes = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    users = [user for user in range(data.num_users) if user * nodes // data.num_users == number]
    if not users:
        raise InvalidData(f"{data.num_users} users for {nodes} nodes", "a user for every node", "Start fewer nodes.")
    return LocalData(data.train, data.test, client_ids=users)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _by_user(rows: list[Row], numbers: dict[str, int]) -> Rated:
    found: Rated = {}
    for user, item, rating in rows:
        found.setdefault(user, {})[numbers[item]] = rating
    return {user: dict(sorted(found[user].items())) for user in sorted(found)}


def _uniform(row: Row) -> float:
    """A number in [0, 1) by the hash of user and item."""
    return int.from_bytes(hashlib.sha256(f"{row[0]}\0{row[1]}".encode()).digest()[:8], "big") / 2**64


def _interactions(rows: list[Row], users: dict[str, int], items: dict[str, int], num_items: int) -> Interactions:
    import torch

    from fairfold.data import Interactions

    given = [row[2] for row in rows]
    ratings = None if any(rating is None for rating in given) else torch.tensor(given, dtype=torch.float32)
    owners = torch.tensor([users[row[0]] for row in rows])
    chosen = torch.tensor([items[row[1]] for row in rows])
    return Interactions.from_pairs(owners, chosen, len(users), num_items, ratings)
