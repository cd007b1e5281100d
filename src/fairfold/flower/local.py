"""What a device has: interactions in a file of its own, CSV or SQLite, read where they lie, and not sent.

Torch is imported when data is read: naming a file must cost nothing where a device is only asked for its capacity.
"""

from __future__ import annotations

import csv
import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fairfold.errors import InvalidData

if TYPE_CHECKING:
    from flwr.app import Context

    from fairfold.data import Dataset, Interactions
    from fairfold.data.clients import Clients
    from fairfold.data.images import ImageDataset

SQLITE_MAGIC = b"SQLite format 3\0"
Row = tuple[str, str, float | None]


@dataclass(frozen=True)
class LocalData:
    """One device's data.

    Attributes:
        train: What it learns from; users are those of this device (one, on a phone).
        test: What the model should have guessed, or None.
        clients: The users of ``train`` that are this device's; all if empty. A simulation may give every node the same
            numbering of users, so that its random streams are those of the simulator.
        user_ids: Their names on this device, in the order of ``clients``.
    """

    train: Interactions
    test: Interactions | None = None
    clients: list[int] = field(default_factory=list)
    user_ids: list[str] = field(default_factory=list)

    @property
    def users(self) -> list[int]:
        """The users of this device."""
        return self.clients or list(range(self.train.num_users))

    def renumbered(self, numbers: dict[int, int]) -> LocalData:
        """The same with the items' numbers of a run."""
        import torch

        def moved(part: Interactions) -> Interactions:
            items = torch.tensor([numbers.get(item, item) for item in part.items.tolist()], dtype=torch.int64)
            return part.from_pairs(part.users, items, part.num_users, part.num_items, part.ratings)

        test = None if self.test is None else moved(self.test)
        return LocalData(moved(self.train), test, self.clients, self.user_ids)

    def of_its_users(self) -> Interactions:
        """What this device's users have, numbered one after another."""
        import torch

        if not self.clients:
            return self.train
        parts = [self.train.of(user) for user in self.clients]
        owners = torch.cat([torch.full((len(part),), place) for place, part in enumerate(parts)])
        rated = self.train.ratings is not None
        ratings = torch.cat([self.train.ratings_of(user) for user in self.clients]) if rated else None
        return self.train.from_pairs(owners, torch.cat(parts), len(parts), self.train.num_items, ratings)

    def own_items(self) -> set[int]:
        """All items that this device's users have, or are asked to guess."""
        parts = [self.train] if self.test is None else [self.train, self.test]
        return {item for part in parts for user in self.users for item in part.of(user).tolist()}

    @property
    def names(self) -> list[str]:
        """What they are called where their vectors are kept."""
        return self.user_ids or [str(user) for user in self.users]


@dataclass(frozen=True)
class LocalImages:
    """One device's images, which it trains on and is judged by, and whose each is: one client's, on a phone."""

    images: ImageDataset
    clients: Clients


@dataclass(frozen=True)
class LocalFile:
    """A CSV or SQLite file with one interaction per row.

    Attributes:
        path: The file.
        item: Column of the item: its number in the catalogue, or its name in ``catalogue``.
        user: Column of the user; a file without it is one person's.
        rating: Column of the rating, for models that predict ratings.
        catalogue: Text file with the name of every item, a line each, in the order of the server's model.
        test: File of the same form with what is to be guessed.
        holdout: Share of the rows kept back to be guessed, where there is no such file. Which ones depends on user and
            item alone, so that what was kept back once is never trained on.
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
        """Read it for a catalogue of a given size."""
        rows = list(self._rows(Path(self.path), ratings))
        held_back = [] if self.test is None else list(self._rows(Path(self.test), ratings))
        if self.test is None and self.holdout > 0:
            held_back = [row for row in rows if _chance(row) < self.holdout]
            rows = [row for row in rows if _chance(row) >= self.holdout]
        if not rows:
            raise InvalidData(f"{self.path}, which holds no interactions", "at least one", "Check the file.")
        names = sorted({row[0] for row in rows})
        users = {name: number for number, name in enumerate(names)}
        held_back = [row for row in held_back if row[0] in users]  # a user without history cannot be served yet
        numbers = self._item_numbers(rows + held_back, num_items)
        train = _interactions(rows, users, numbers, num_items)
        test = _interactions(held_back, users, numbers, num_items) if held_back else None
        return LocalData(train, test, user_ids=names)

    def require_readable(self) -> None:
        """Refuse what is no such file, or lacks the column of the item; it may be empty yet."""
        next(self._rows(Path(self.path), ratings=False), None)

    def histories(self, num_items: int) -> dict[str, list[int]]:
        """What every user of the file has, by their names there; without torch."""
        rows = list(self._rows(Path(self.path), ratings=False))
        numbers, found = self._item_numbers(rows, num_items), dict[str, list[int]]()
        for user, item, _ in rows:
            found.setdefault(user, []).append(numbers[item])
        return found

    def _rows(self, path: Path, ratings: bool) -> Iterator[Row]:
        try:
            with path.open("rb") as file:
                is_database = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
            found = self._database(path, ratings) if is_database else self._text(path, ratings)
            for user, item, rating in found:
                if item is None or str(item).strip() == "":
                    raise InvalidData(f"{path}: a row without an item", "an item in every row", "Correct the file.")
                try:
                    number = None if rating is None else float(rating)
                except ValueError:
                    raise InvalidData(f"{path}: rating {rating!r}", "a number", "Correct the file.") from None
                yield str(user), str(item).strip(), number
        except (OSError, UnicodeDecodeError, csv.Error, sqlite3.Error) as error:
            raise InvalidData(f"{path}: {error}", "a CSV or SQLite file", "Check the file.") from None

    def _text(self, path: Path, ratings: bool) -> Iterator[tuple[str, str | None, str | None]]:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            separator = max(",;\t", key=first.count)
            file.seek(0)
            reader = csv.DictReader(file, delimiter=separator)
            columns = set(reader.fieldnames or [])
            self._require(path, columns, ratings)
            for row in reader:
                yield row.get(self.user) or "", row.get(self.item), row[self.rating] if ratings else None

    def _database(self, path: Path, ratings: bool) -> Iterator[tuple[str, str | None, str | None]]:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            tables = [name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = self.table or (tables[0] if len(tables) == 1 else "interactions")
            if table not in tables:
                raise InvalidData(f"{path}: tables {', '.join(tables)}", f"a table {table!r}", "Name it (table=...).")
            columns = {row[1] for row in base.execute(f"PRAGMA table_info({_quoted(table)})")}
            self._require(path, columns, ratings)
            user = _quoted(self.user) if self.user in columns else "''"
            rating = _quoted(self.rating) if ratings else "NULL"
            yield from base.execute(f"SELECT {user}, {_quoted(self.item)}, {rating} FROM {_quoted(table)}")

    def _require(self, path: Path, columns: set[str], ratings: bool) -> None:
        for name in [self.item, *([self.rating] if ratings else [])]:
            if name not in columns:
                given = ", ".join(sorted(columns)) or "none"
                remedy = "Rename it in the file; in Python, LocalFile(item=...) names another."
                raise InvalidData(f"{path}: columns {given}", f"a column {name!r}", remedy)

    def _item_numbers(self, rows: list[Row], num_items: int) -> dict[str, int]:
        wanted = {row[1] for row in rows}
        if self.catalogue is None:
            numbers = {name: int(name) if name.isdecimal() and len(name) < 19 else -1 for name in wanted}
        else:  # one pass that keeps only what this device has
            numbers = dict.fromkeys(wanted, -1)
            with Path(self.catalogue).open(encoding="utf-8") as lines:
                numbers |= {name: line for line, text in enumerate(lines) if (name := text.strip()) in wanted}
        strange = [name for name, number in numbers.items() if not 0 <= number < num_items]
        if strange:
            given = f"{self.path}: item {strange[0]!r} and {len(strange) - 1} more are not in the catalogue"
            needed = f"numbers from 0 to {num_items - 1}, or names listed in `catalogue`"
            raise InvalidData(given, needed, "Check the column, or bring the catalogue up to date.")
        return numbers


def share_of(data: Dataset, context: Context) -> LocalData:
    """A virtual node's part of a data set, for simulations: neighbouring users, as many for every node."""
    number, nodes = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    users = [user for user in range(data.num_users) if user * nodes // data.num_users == number]
    if not users:
        raise InvalidData(f"{data.num_users} users for {nodes} nodes", "a user for every node", "Start fewer nodes.")
    return LocalData(data.train, data.test, clients=users)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _chance(row: Row) -> float:
    digest = hashlib.sha256(f"{row[0]}\0{row[1]}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _interactions(rows: list[Row], users: dict[str, int], items: dict[str, int], num_items: int) -> Interactions:
    import torch

    from fairfold.data import Interactions

    given = [row[2] for row in rows]
    ratings = None if any(rating is None for rating in given) else torch.tensor(given, dtype=torch.float32)
    owners, chosen = torch.tensor([users[row[0]] for row in rows]), torch.tensor([items[row[1]] for row in rows])
    return Interactions.from_pairs(owners, chosen, len(users), num_items, ratings)
