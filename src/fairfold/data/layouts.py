"""How one file of interactions is laid out, and how to tell from its name and first lines."""

import codecs
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fairfold.data import lines
from fairfold.data.json_lines import first_object
from fairfold.data.options import Options
from fairfold.errors import InvalidData, nearest

Kind = Literal["lines", "delimited", "json", "parquet"]

TABLE = Path("the table")
"""What messages call a table in memory, which has no file; what to do is then said in Python."""

# Names under which publishers and people keep the three columns, compared without case, blanks, `_` and `-`.
NAMES = {
    "user": (
        "userid", "user", "reviewerid", "uid", "customerid", "memberid", "u", "visitorid", "viewerid", "playerid",
        "listenerid", "readerid", "buyerid", "shopperid", "clientid", "accountid", "personid", "patronid", "steamid",
        "username", "visitor", "viewer", "customer", "member", "reviewer", "player", "listener", "reader", "person",
    ),
    "item": (
        "itemid", "item", "movieid", "bookid", "isbn", "parentasin", "asin", "productid", "iid", "trackid", "songid",
        "businessid", "venueid", "i", "animeid", "gameid", "artistid", "albumid", "recipeid", "restaurantid", "hotelid",
        "placeid", "locationid", "poiid", "videoid", "articleid", "newsid", "appid", "showid", "contentid", "jokeid",
        "stockcode", "sku", "anime", "game", "artist", "album", "movie", "book", "product", "track", "song", "recipe",
        "restaurant", "hotel", "video", "article", "show", "app",
    ),
    "rating": ("rating", "bookrating", "overall", "stars", "score", "ratings"),
}  # fmt: skip
NO_ITEMS = re.compile(r"(order|session|transaction|event|review|row|log|time|device|country|city|category|store).*id")
"""Columns of ids that are those of something else."""
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar", "::": "double colon", " ": "blank"}


@dataclass(frozen=True)
class Layout:
    """How one file is laid out; columns are names, or positions in delimited text."""

    kind: Kind  # "lines" are `user item item …`
    user: str | int = 0
    item: str | int = 1
    rating: str | int | None = None
    width: int = 0  # number of columns of a delimited file
    separator: str = ","
    header: bool = False  # whether the first line names the columns
    # `"` where fields may be quoted; "strip" where all are, but not by the rules of CSV (Book-Crossing).
    quote: str | None = None
    encoding: str = "utf-8"  # the one the publisher states
    scale: tuple[float, float] | None = None  # lowest and highest rating that can be right
    unrated: float | None = None  # the rating that stands for "no rating given"


def detect(path: Path, wanted: Options | None = None) -> Layout:
    """Tell the layout of a file from its name and its first lines; what the caller wants goes before both."""
    wanted = wanted or Options()
    layout = _detect(path, wanted)
    return layout if wanted.scale is None else replace(layout, scale=wanted.scale)


def _detect(path: Path, wanted: Options) -> Layout:
    name = path.name.lower().removesuffix(".gz")
    if not path.exists():
        raise lines.no_such_file(path)
    if name.endswith((".parquet", ".pq")):
        from fairfold.data.parquet import schema_of

        return _named("parquet", path, list(schema_of(path)), wanted)
    start = _text(lines.head(path))
    if start.startswith("PK\x03\x04"):
        raise InvalidData(f"{path.name} is a zip archive", "the files in it", "Unpack it, and give the folder.")
    if "\0" in start:
        raise InvalidData(f"{path.name} is not text", "CSV, TSV, JSON lines or Parquet", "Check the file.")
    first = start.split("\n", 1)[0].rstrip("\r")
    if not start.strip():
        raise empty(path)
    if not wanted.about_columns:
        if name == "bx-book-ratings.csv" or first.startswith('"User-ID";"ISBN"'):
            return Layout(
                "delimited", 0, 1, 2, 3, ";", header=True, quote="strip", encoding="latin-1", scale=(0, 10), unrated=0
            )
        if name == "u.data" or name.endswith(".rating"):
            return _positions(path, first, "\t", (1, 5))
        if name == "ratings.dat":
            return _positions(path, first, "::", (0.5, 5))
    if first.lstrip().startswith("{"):
        return _json(path, first, wanted)
    if not wanted.about_columns and _is_lines(name, start):
        return Layout("lines")
    return _delimited(path, start, wanted)


def _text(start: bytes) -> str:
    """The start of a file, which may end within a character, as UTF-8 where it is that, else as Latin-1."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return start.decode("latin-1")


def empty(path: Path) -> InvalidData:
    """The error for a file without a single interaction."""
    return InvalidData(f"{path.name} is empty", "at least one interaction", "Check that the file was copied whole.")


def plain(name: str) -> str:
    """A column name as it is compared: small letters and digits only, without the type that RecBole writes behind."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r":(token|float)(_seq)?$", "", name.lower()))


def _shown(names: list[str]) -> str:
    """Column names as an error shows them: not all of many, and no more of each than can be read."""
    return ", ".join(repr(name[:40]) for name in names[:12]) + (", …" if len(names) > 12 else "")


def find_columns(path: Path, names: list[str], wanted: Options) -> tuple[int, int, int | None]:
    """Positions of user, item and rating: the columns the caller names, else the first that has a known name.

    A column may be named by its position, counted from 1. Where no column is known to hold the items, the only other
    one of ids does.
    """
    found: dict[str, int] = {}
    plain_names = [plain(name) for name in names]
    for (role, known), named in zip(NAMES.items(), wanted.columns, strict=True):
        candidates = [plain_names.index(name) for name in known if name in plain_names]
        if named is not None and named in names:
            found[role] = names.index(named)
        elif named is not None and named.isdecimal() and 1 <= int(named) <= len(names):
            found[role] = int(named) - 1
        elif named is not None:
            raise InvalidData(
                f"{path.name} has no column {named!r}{nearest(named, names)}; it has {_shown(names)}",
                f"the column of the {role}",
                f"Name it by {role}_column=."
                if path == TABLE
                else f"Name it with --{role}-column, or give the separator with --separator.",
            )
        elif candidates:
            found[role] = candidates[0]
        elif role == "item" and len(others := _other_ids(plain_names, found["user"])) == 1:
            found[role] = others[0]
        elif role != "rating":
            raise InvalidData(
                f"{path.name} has no column that is known to hold the {role}; its columns are {_shown(names)}",
                "columns that name a user and an item",
                _command(path, names, found.get("user")),
            )
    return found["user"], found["item"], found.get("rating")


def _other_ids(plain_names: list[str], user: int) -> list[int]:
    """Columns of ids beside that of the user."""
    ids = [place for place, name in enumerate(plain_names) if place != user and re.fullmatch(r"[a-z]+id", name)]
    return [place for place in ids if not NO_ITEMS.fullmatch(plain_names[place])]


def _command(path: Path, names: list[str], user: int | None) -> str:
    """What to type where columns are not known, with the names that are there."""
    free = [name for place, name in enumerate(names) if place != user]
    mine = free.pop(0) if user is None and len(free) > 1 else [*names, "NAME"][user or 0]  # of no columns none has one
    item = free[0] if free else "NAME"
    if path == TABLE:
        return f"Say which they are: fairfold.fit(interactions, user_column={mine!r}, item_column={item!r})."
    words = ["--user-column", mine, "--item-column", item]
    columns = shlex.join(word if len(word) <= 40 else "NAME" for word in words)
    return (
        f"Say which they are: fairfold train --data {shlex.quote(path.name)} {columns} (in Python user_column=, "
        "item_column=); if the columns look joined, give the separator with --separator; if the first line names no "
        "columns, add one that does, such as user_id,item_id."
    )


def _named(kind: Kind, path: Path, names: list[str], wanted: Options) -> Layout:
    """Of a file that names its columns in every row, or in its schema."""
    user, item, rating = find_columns(path, names, wanted)
    return Layout(kind, names[user], names[item], None if rating is None else names[rating])


def _json(path: Path, first: str, wanted: Options) -> Layout:
    try:
        names = list(first_object(first))
        "".join(names).encode()  # half of a character, which JSON can write, is no name of a column
    except ValueError as error:
        raise InvalidData(
            f"the first line of {path.name} is not JSON ({error})", "one JSON object per line", "Check the file."
        ) from error
    layout = _named("json", path, names, wanted)
    return _scaled(layout, names, goodreads=plain(str(layout.item)) == "bookid")


def _scaled(layout: Layout, names: list[str], *, goodreads: bool) -> Layout:
    """Goodreads writes 0 where a reader gave no rating; Amazon's lowest is 1."""
    if layout.rating is not None and goodreads:
        return replace(layout, scale=(0, 5), unrated=0)
    if layout.rating is not None and {"asin", "parentasin"} & {plain(name) for name in names}:
        return replace(layout, scale=(1, 5))
    return layout


def _is_lines(name: str, start: str) -> bool:
    """Whether a text reads as `user item item …`: blanks between fields, and lines of different lengths."""
    if any(separator in start for separator in (",", ";", "\t", "|", "::")):
        return False
    whole = start.split("\n")
    widths = {len(line.split()) for line in (whole[:-1] or whole) if line.strip()}
    return len(widths) > 1 or name.endswith(".txt")


def _positions(path: Path, first: str, separator: str, scale: tuple[float, float]) -> Layout:
    width = len(first.split(separator))
    if width < 3:
        raise InvalidData(
            f"the first line of {path.name} is {first[:60]!r}",
            f"user, item and rating with a {SEPARATORS[separator]} between them",
            "Give the separator with --separator.",
        )
    return Layout("delimited", 0, 1, 2, width, separator, scale=scale)


def _delimited(path: Path, start: str, wanted: Options) -> Layout:
    first, *below = start.replace("\r", "").split("\n")
    separator = wanted.separator or _separator(first)
    names = _fields(first, separator)
    if len(names) < 2:
        raise InvalidData(
            f"the first line of {path.name} is {first[:60]!r}, one field with the separator {separator!r}",
            "at least a user and an item per line",
            "Give the separator with --separator.",
        )
    quote = '"' if len(separator.encode()) == 1 else None
    if not wanted.user_column and len(names) == 4 and _is_amazon(names):
        # The ratings of 2014 start with the user, those of 2018 with the product; users' ids all start with A.
        user, item = (0, 1) if names[0].startswith("A") and not names[1].startswith("A") else (1, 0)
        return Layout("delimited", user, item, 2, 4, separator, scale=(1, 5))
    by_position = all(named is None or named.isdecimal() for named in wanted.columns) and any(wanted.columns)
    known = any(plain(name) in words for name in names for words in NAMES.values()) or any(
        named in names for named in wanted.columns
    )
    headless = (by_position or not known) and _is_data(names, [_fields(line, separator) for line in below[:-1]])
    if headless and not by_position:
        rated = " --rating-column 3" if len(names) > 2 else ""
        raise InvalidData(
            f"the first line of {path.name} is {first[:60]!r}",
            "a header that names the columns",
            f"Say where they are: fairfold train --data {shlex.quote(path.name)} --user-column 1 --item-column 2{rated}"
            f" (in Python user_column='1'), or add a first line such as user_id,item_id{rated and ',rating'}.",
        )
    if headless:
        names = [str(place + 1) for place in range(len(names))]
    chosen = find_columns(path, names, wanted)
    layout = Layout("delimited", *chosen, len(names), separator, header=not headless, quote=quote)
    plain_names = {plain(name) for name in names}
    goodreads = plain_names >= {"bookid", "isread", "rating"}
    if not goodreads and plain_names >= {"userid", "movieid", "rating"}:
        return replace(layout, scale=(0.5, 5))
    return _scaled(layout, names, goodreads=goodreads)


def _separator(line: str) -> str:
    """The one that a line has most of; a blank only where there is no other, as names and titles hold blanks, too."""
    others = [separator for separator in SEPARATORS if separator != " " and separator in line]
    return max(others or [" "], key=lambda found: (line.count(found) * len(found), -len(found)))


def _fields(line: str, separator: str) -> list[str]:
    return [field.strip().strip('"') for field in line.split(separator)]


def _is_data(first: list[str], below: list[list[str]]) -> bool:
    """Whether a first line names no columns: a field is a number, or stands in its column again, as ids do."""
    seen = {(place, field) for row in below for place, field in enumerate(row) if field}
    return any(re.fullmatch(r"-?[\d.]+", field) or (place, field) in seen for place, field in enumerate(first))


def _is_amazon(fields: list[str]) -> bool:
    """Whether a line reads as Amazon's headerless `user,item,rating,time` (or item first)."""
    codes = all(re.fullmatch(r"[A-Z0-9]{8,}", field) for field in fields[:2])
    return codes and re.fullmatch(r"[1-5](\.0)?", fields[2]) is not None and fields[3].isdigit()
