"""How one file of interactions is laid out, and how to tell from its name and first lines."""

import codecs
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fairfold.data import lines
from fairfold.data.json_lines import first_object
from fairfold.errors import InvalidData

Kind = Literal["lines", "delimited", "json", "parquet"]

# Names under which publishers and people keep the three columns, compared without case, blanks, `_` and `-`.
USER_NAMES = ("userid", "user", "reviewerid", "uid", "customerid", "memberid", "u")
ITEM_NAMES = (
    "itemid", "item", "movieid", "bookid", "isbn", "parentasin", "asin", "productid", "iid", "trackid", "songid",
    "businessid", "venueid", "i",
)  # fmt: skip
RATING_NAMES = ("rating", "bookrating", "overall", "stars", "score", "ratings")
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar", "::": "double colon", " ": "blank"}


@dataclass(frozen=True)
class Layout:
    """How one file is laid out.

    Attributes:
        kind: ``lines`` (`user item item …`), ``delimited`` text, ``json`` lines or ``parquet``.
        user: Column of the user: a name, or a position in a file without a header.
        item: Column of the item.
        rating: Column of the rating, or None when there is none.
        width: Number of columns of a delimited file.
        separator: What stands between the fields of a delimited file.
        header: Whether the first line names the columns.
        quote: ``"`` where fields may be quoted, ``strip`` where every field is wrapped in quotes that do not follow the
            rules of CSV (Book-Crossing), else None.
        encoding: The encoding the publisher states.
        scale: Lowest and highest rating that can be right, or None when unknown.
        unrated: The rating that stands for "no rating given".
    """

    kind: Kind
    user: str | int = 0
    item: str | int = 1
    rating: str | int | None = None
    width: int = 0
    separator: str = ","
    header: bool = False
    quote: str | None = None
    encoding: str = "utf-8"
    scale: tuple[float, float] | None = None
    unrated: float | None = None


@dataclass(frozen=True)
class Wanted:
    """What the caller says about a file whose layout is not known: column names, separator, scale of the ratings."""

    user: str | None = None
    item: str | None = None
    rating: str | None = None
    separator: str | None = None
    scale: tuple[float, float] | None = None

    @property
    def about_columns(self) -> bool:
        """Whether anything is said that decides how the file is read, beyond the scale of its ratings."""
        return any(value is not None for value in (self.user, self.item, self.rating, self.separator))


def detect(path: Path, wanted: Wanted | None = None) -> Layout:
    """Tell the layout of a file from its name and its first lines; what the caller wants goes before both."""
    wanted = Wanted() if wanted is None else wanted
    layout = _detect(path, wanted)
    return layout if wanted.scale is None else replace(layout, scale=wanted.scale)


def _detect(path: Path, wanted: Wanted) -> Layout:
    name = path.name.lower().removesuffix(".gz")
    if not path.exists():
        raise lines.no_such_file(path)
    if name.endswith((".parquet", ".pq")):
        return _parquet(path, wanted)
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
    return _delimited(path, first, wanted)


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
    """A column name as it is compared: small letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _shown(names: list[str]) -> str:
    """Column names as an error shows them: not all of many, and no more of each than can be read."""
    return ", ".join(repr(name[:40]) for name in names[:12]) + (", …" if len(names) > 12 else "")


def find_column(path: Path, role: str, names: list[str], wanted: str | None, known: tuple[str, ...]) -> int | None:
    """The position of a column: the one the caller names, else the first that has one of the known names."""
    if wanted is not None:
        if wanted in names:
            return names.index(wanted)
        raise InvalidData(
            f"{path.name} has no column {wanted!r}; it has {_shown(names)}",
            f"the column of the {role}",
            f"Name it with --{role}-column, or give the separator with --separator.",
        )
    plain_names = [plain(name) for name in names]
    return next((plain_names.index(candidate) for candidate in known if candidate in plain_names), None)


def find_columns(path: Path, names: list[str], wanted: Wanted) -> tuple[int, int, int | None]:
    """Positions of the user, the item and the rating; an error that lists the columns where one is missing."""
    user = find_column(path, "user", names, wanted.user, USER_NAMES)
    item = find_column(path, "item", names, wanted.item, ITEM_NAMES)
    rating = find_column(path, "rating", names, wanted.rating, RATING_NAMES)
    for role, position in (("user", user), ("item", item)):
        if position is None:
            raise InvalidData(
                f"{path.name} has no column that is known to hold the {role}; its columns are {_shown(names)}",
                "a header that names a user and an item column",
                f"Name it with --{role}-column; if the columns look joined, give the separator with --separator.",
            )
    assert user is not None
    assert item is not None
    return user, item, rating


def _parquet(path: Path, wanted: Wanted) -> Layout:
    from fairfold.data.parquet import schema_of

    names = list(schema_of(path))
    user, item, rating = find_columns(path, names, wanted)
    return Layout("parquet", names[user], names[item], None if rating is None else names[rating])


def _json(path: Path, first: str, wanted: Wanted) -> Layout:
    try:
        names = list(first_object(first))
    except ValueError as error:
        raise InvalidData(
            f"the first line of {path.name} is not JSON ({error})", "one JSON object a line", "Check the file."
        ) from error
    user, item, rating = find_columns(path, names, wanted)
    chosen = None if rating is None else names[rating]
    # Goodreads writes 0 where a reader gave no rating; Amazon's lowest is 1.
    zero = chosen is not None and plain(names[item]) == "bookid"
    scale = None if chosen is None else ((0.0, 5.0) if zero else _amazon_scale(names))
    return Layout("json", names[user], names[item], chosen, scale=scale, unrated=0 if zero else None)


def _amazon_scale(names: list[str]) -> tuple[float, float] | None:
    return (1, 5) if {"asin", "parentasin"} & {plain(name) for name in names} else None


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


def _delimited(path: Path, first: str, wanted: Wanted) -> Layout:
    separator = wanted.separator or max(SEPARATORS, key=lambda s: (first.count(s) * len(s), -len(s)))
    names = [name.strip().strip('"') for name in first.split(separator)]
    if len(names) < 2:
        raise InvalidData(
            f"the first line of {path.name} is {first[:60]!r}, one field with the separator {separator!r}",
            "at least a user and an item a line",
            "Give the separator with --separator.",
        )
    quote = '"' if len(separator.encode()) == 1 else None
    if not wanted.user and len(names) == 4 and _is_amazon(names):
        # The ratings of 2014 start with the user, those of 2018 with the product; users' ids all start with A.
        user, item = (0, 1) if names[0].startswith("A") and not names[1].startswith("A") else (1, 0)
        return Layout("delimited", user, item, 2, 4, separator, scale=(1, 5))
    if not wanted.about_columns and all(re.fullmatch(r"-?[\d.]+", name) for name in names):
        raise InvalidData(
            f"the first line of {path.name} is {first[:60]!r}",
            "a header that names the columns",
            "Add a first line such as user_id,item_id,rating.",
        )
    chosen = find_columns(path, names, wanted)
    layout = Layout("delimited", *chosen, len(names), separator, header=True, quote=quote)
    plain_names = {plain(name) for name in names}
    if {"bookid", "isread", "rating"} <= plain_names:
        return replace(layout, scale=(0, 5), unrated=0)
    if {"userid", "movieid", "rating"} <= plain_names:
        return replace(layout, scale=(0.5, 5))
    if layout.rating is not None and {"asin", "parentasin"} & plain_names:
        return replace(layout, scale=(1, 5))
    return layout


def _is_amazon(fields: list[str]) -> bool:
    """Whether a line reads as Amazon's headerless `user,item,rating,time` (or item first)."""
    codes = all(re.fullmatch(r"[A-Z0-9]{8,}", field) for field in fields[:2])
    return codes and re.fullmatch(r"[1-5](\.0)?", fields[2]) is not None and fields[3].isdigit()
