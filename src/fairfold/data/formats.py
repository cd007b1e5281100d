"""File formats of interactions, detected from a file's name and first lines, and the options of ``prepare``."""

import codecs
import itertools
import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fairfold.data.files import head, no_such_file
from fairfold.data.parsing import parquet_schema, parse_object
from fairfold.errors import InvalidData, did_you_mean

SPLIT = 0.7
NEWEST, NEWEST_SHARE, RANDOM, USERS = "newest", "newest-share", "random", "users"
NAMED_SPLITS = (None, RANDOM, NEWEST, NEWEST_SHARE, USERS)
Kind = Literal["lines", "delimited", "json", "parquet"]
# Stands for the path of a table in memory; messages about it name Python arguments, not CLI options.
TABLE_IN_MEMORY = Path("the table")
# Known names of the columns, compared without case, blanks, `_` and `-`.
COLUMN_NAMES = {
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
    "time": (
        "timestamp", "time", "datetime", "unixreviewtime", "date", "ratedat", "createdat", "eventtime", "dateadded",
        "reviewtime", "ts",
    ),
}  # fmt: skip
# Columns of ids of something else than items.
OTHER_IDS = re.compile(r"(order|session|transaction|event|review|row|log|time|device|country|city|category|store).*id")
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar", "::": "double colon", " ": "blank"}


@dataclass(frozen=True)
class Options:
    """Options of ``prepare``: how a source is read, filtered and split."""

    top_users: int | None = None  # keep the users with most interactions, this many; None keeps all
    core: int = 0  # keep users and items with at least this many interactions, until all have them (k-core)
    ratings: bool = False  # keep the ratings and leave out what is not rated; else every interaction counts as one
    min_rating: float | None = None  # keep only what is rated at least this high, as implicit feedback
    # Share of a user's interactions to train on, drawn at random (0.7 or "random"), or another of NAMED_SPLITS
    # (docs/data.md). A split of the publisher is kept.
    split: float | str | None = None
    resplit: bool = False  # pool a published split and split again
    valid: float = 0.0  # share of a user's train interactions put aside for validation
    seed: int = 0  # of the split
    user_column: str | int | None = None  # name or position (from 1), where it is not detected
    item_column: str | int | None = None
    rating_column: str | int | None = None
    time_column: str | int | None = None
    separator: str | None = None  # between the fields of a line
    scale: tuple[float, float] | None = None  # lowest and highest valid rating
    images: str | Path | None = None  # folder of the images, for a folder that holds only their writers

    def __post_init__(self) -> None:
        plain_separator = self.separator != "" and not set(self.separator or "") & set('"\r\n')
        checks = (
            ("top_users", self.top_users is None or self.top_users >= 1, "a number of at least 1"),
            ("core", self.core >= 0, "a number of at least 0"),
            ("split", 0 < self.share <= 1, "a share above 0 and at most 1, or random, newest, newest-share, users"),
            ("valid", 0 <= self.valid < 1, "a share of at least 0 and below 1"),
            ("seed", self.seed >= 0, "a number of at least 0"),
            ("separator", plain_separator, "a text without quotes and line breaks"),
            ("scale", self.scale is None or self.scale[0] < self.scale[1], "the lowest rating, then the highest"),
            ("min_rating", not (self.ratings and self.min_rating is not None), "either ratings or min_rating"),
        )
        for name, valid, needed in checks:
            if not valid:
                raise InvalidData(f"{name} = {getattr(self, name)!r}", needed, "Change that option.")

    @property
    def by_time(self) -> bool:
        """Whether what is held out are the newest interactions."""
        return self.split in (NEWEST, NEWEST_SHARE)

    @property
    def share(self) -> float:
        """The share of a user's interactions to train on, where more than one is held out."""
        return self.split if isinstance(self.split, int | float) else SPLIT if self.split in NAMED_SPLITS else -1.0

    @property
    def describes_file(self) -> bool:
        """True if any option names a column or the separator."""
        return any(value is not None for value in (*self.columns, self.separator))

    @property
    def columns(self) -> tuple[str | None, ...]:
        """Names, or positions from 1, of the columns of user, item, rating and time that are given."""
        named = self.user_column, self.item_column, self.rating_column, self.time_column
        return tuple(None if name is None else str(name) for name in named)

    def non_default(self) -> dict[str, object]:
        """Options that differ from their defaults, for the manifest and the key of the cache."""
        defaults = asdict(Options())
        given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {name: value for name, value in given.items() if value != defaults[name]}


@dataclass(frozen=True)
class FileFormat:
    """Format of one file; columns are names, or positions in delimited text."""

    kind: Kind  # "lines" are `user item item …`
    user: str | int = 0
    item: str | int = 1
    rating: str | int | None = None
    time: str | int | None = None
    reads_time: bool = False  # whether times are read: only where they decide what is held out
    width: int = 0  # number of columns of a delimited file
    separator: str = ","
    header: bool = False  # whether the first line names the columns
    # `"` where fields may be quoted; "strip" where all are, but not by the rules of CSV (Book-Crossing).
    quote: str | None = None
    encoding: str = "utf-8"  # stated by the publisher
    scale: tuple[float, float] | None = None  # lowest and highest valid rating
    unrated: float | None = None  # the rating that stands for "no rating given"

    @property
    def columns(self) -> dict[str, str | int]:
        """Columns by role: user, item and, where there are any, rating and, where it is read, time."""
        others = {"rating": self.rating, "time": self.time if self.reads_time else None}
        return {"user": self.user, "item": self.item} | {
            role: name for role, name in others.items() if name is not None
        }

    def describe(self) -> str:
        """What a row should look like, for error messages."""
        if self.kind != "delimited":
            return "rows with a user and an item"
        separator = SEPARATORS.get(self.separator, self.separator)
        scale = "" if self.scale is None else f", ratings from {self.scale[0]:g} to {self.scale[1]:g}"
        return f"{self.width} fields a line with a {separator} between them{scale}"


def detect_format(path: Path, options: Options | None = None) -> FileFormat:
    """Detect the format of a file from its name and first lines; given options take precedence."""
    options = options or Options()
    file_format = replace(_detect_by_content(path, options), reads_time=options.by_time)
    return file_format if options.scale is None else replace(file_format, scale=options.scale)


def _detect_by_content(path: Path, options: Options) -> FileFormat:
    name = path.name.lower().removesuffix(".gz")
    if not path.exists():
        raise no_such_file(path)
    if name.endswith((".parquet", ".pq")):
        return _named_format("parquet", path, list(parquet_schema(path)), options)
    content = head(path)
    try:
        start = codecs.getincrementaldecoder("utf-8")().decode(content)  # it may end within a character
    except UnicodeDecodeError:
        start = content.decode("latin-1")
    if start.startswith("PK\x03\x04"):
        raise InvalidData(f"{path.name} is a zip archive", "the files in it", "Unpack it, and give the folder.")
    if "\0" in start:
        raise InvalidData(f"{path.name} is not text", "CSV, TSV, JSON lines or Parquet", "Check the file.")
    first = start.split("\n", 1)[0].rstrip("\r")
    if not start.strip():
        raise empty_file(path)
    if not options.describes_file:
        if name == "bx-book-ratings.csv" or first.startswith('"User-ID";"ISBN"'):
            quoting: dict[str, Any] = {"header": True, "quote": "strip", "encoding": "latin-1"}
            return FileFormat("delimited", 0, 1, 2, width=3, separator=";", scale=(0, 10), unrated=0, **quoting)
        if name == "u.data" or name.endswith(".rating"):
            return _positional_format(path, first, "\t", (1, 5))
        if name == "ratings.dat":
            return _positional_format(path, first, "::", (0.5, 5))
    if first.lstrip().startswith("{"):
        return _json_format(path, first, options)
    if not options.describes_file and _is_lines(name, start):
        return FileFormat("lines")
    return _delimited_format(path, start, options)


def empty_file(path: Path) -> InvalidData:
    """Make the error for a file without a single interaction."""
    return InvalidData(f"{path.name} is empty", "at least one interaction", "Check that the file was copied whole.")


def normalize(name: str) -> str:
    """Reduce a column name to lower-case letters and digits, without RecBole's type suffix."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r":(token|float)(_seq)?$", "", name.lower()))


def _abbreviate(names: list[str]) -> str:
    return ", ".join(repr(name[:40]) for name in names[:12]) + (", …" if len(names) > 12 else "")


def find_columns(path: Path, names: list[str], options: Options) -> tuple[int, int, int | None, int | None]:
    """Find the positions of user, item, rating and time: columns given as options, else the first of a known name."""
    found: dict[str, int] = {}
    normalized = [normalize(name) for name in names]
    for (role, known), named in zip(COLUMN_NAMES.items(), options.columns, strict=True):
        candidates = [normalized.index(name) for name in known if name in normalized]
        if named is not None and named in names:
            found[role] = names.index(named)
        elif named is not None and named.isdecimal() and 1 <= int(named) <= len(names):
            found[role] = int(named) - 1
        elif named is not None:
            given = f"{path.name} has no column {named!r}{did_you_mean(named, names)}; it has {_abbreviate(names)}"
            remedy = f"with --{role}-column, or give the separator with --separator."
            remedy = f"by {role}_column=." if path == TABLE_IN_MEMORY else remedy
            raise InvalidData(given, f"the column of the {role}", f"Name it {remedy}")
        elif candidates:
            found[role] = candidates[0]
        elif role == "item" and len(others := _other_ids(normalized, found["user"])) == 1:
            found[role] = others[0]  # the only other column of ids
        elif role in ("user", "item"):
            given = f"{path.name} has no column that is known to hold the {role}; its columns are {_abbreviate(names)}"
            remedy = _naming_remedy(path, names, found.get("user"))
            raise InvalidData(given, "columns that name a user and an item", remedy)
    return found["user"], found["item"], found.get("rating"), found.get("time")


def _other_ids(normalized: list[str], user: int) -> list[int]:
    ids = [place for place, name in enumerate(normalized) if place != user and re.fullmatch(r"[a-z]+id", name)]
    return [place for place in ids if not OTHER_IDS.fullmatch(normalized[place])]


def _naming_remedy(path: Path, names: list[str], user: int | None) -> str:
    free = [name for place, name in enumerate(names) if place != user]
    user_name = free.pop(0) if user is None and len(free) > 1 else [*names, "NAME"][user or 0]
    item_name = free[0] if free else "NAME"
    if path == TABLE_IN_MEMORY:
        return f"Name them: fairfold.fit(interactions, user_column={user_name!r}, item_column={item_name!r})."
    arguments = ["--user-column", user_name, "--item-column", item_name]
    columns = shlex.join(argument if len(argument) <= 40 else "NAME" for argument in arguments)
    return (
        f"Name them: fairfold train --data {shlex.quote(path.name)} {columns} (in Python user_column=, "
        "item_column=); if the columns look joined, give the separator with --separator; if the first line names no "
        "columns, add one that does, such as user_id,item_id."
    )


def _named_format(kind: Kind, path: Path, names: list[str], options: Options) -> FileFormat:
    user, item, *others = find_columns(path, names, options)
    rating, time = (None if place is None else names[place] for place in others)
    return FileFormat(kind, names[user], names[item], rating, time)


def _json_format(path: Path, first: str, options: Options) -> FileFormat:
    try:
        names = list(parse_object(first))
        "".join(names).encode()  # refuses half of a surrogate pair, which JSON can write
    except ValueError as error:
        given = f"the first line of {path.name} is not JSON ({error})"
        raise InvalidData(given, "one JSON object per line", "Check the file.") from error
    file_format = _named_format("json", path, names, options)
    return _with_publisher_scale(file_format, names, goodreads=normalize(str(file_format.item)) == "bookid")


def _with_publisher_scale(file_format: FileFormat, names: list[str], *, goodreads: bool) -> FileFormat:
    """Set the scale of known publishers: Goodreads writes 0 for "not rated"; Amazon's lowest is 1."""
    if file_format.rating is not None and goodreads:
        return replace(file_format, scale=(0, 5), unrated=0)
    if file_format.rating is not None and {"asin", "parentasin"} & {normalize(name) for name in names}:
        return replace(file_format, scale=(1, 5))
    return file_format


def _is_lines(name: str, start: str) -> bool:
    """True if a text looks like ``user item item …``: blanks between fields, lines of different lengths."""
    if any(separator in start for separator in (",", ";", "\t", "|", "::")):
        return False
    whole = start.split("\n")
    widths = {len(line.split()) for line in (whole[:-1] or whole) if line.strip()}
    return len(widths) > 1 or name.endswith(".txt")


def _positional_format(path: Path, first: str, separator: str, scale: tuple[float, float]) -> FileFormat:
    width = len(first.split(separator))
    if width < 3:
        raise _bad_first_line(path, first, f"user, item and rating with a {SEPARATORS[separator]} between them")
    time = 3 if width > 3 else None
    return FileFormat("delimited", 0, 1, 2, time, width=width, separator=separator, scale=scale)


def _bad_first_line(
    path: Path, first: str, needed: str, remedy: str = "Give the separator with --separator."
) -> InvalidData:
    return InvalidData(f"the first line of {path.name} is {first[:60]!r}", needed, remedy)


def _delimited_format(path: Path, start: str, options: Options) -> FileFormat:
    first, *below = start.replace("\r", "").split("\n")
    separator = options.separator or _separator(first)
    names = _split_fields(first, separator)
    if len(names) < 2:
        raise _bad_first_line(path, first, f"user and item, not one field with the separator {separator!r}")
    quote = '"' if len(separator.encode()) == 1 else None
    if not options.user_column and len(names) == 4 and _is_amazon(names):
        # The ratings of 2014 start with the user, those of 2018 with the product; users' ids all start with A.
        user, item = (0, 1) if names[0].startswith("A") and not names[1].startswith("A") else (1, 0)
        return FileFormat("delimited", user, item, 2, 3, width=4, separator=separator, scale=(1, 5))
    by_position = all(named is None or named.isdecimal() for named in options.columns) and any(options.columns)
    normalized = set(map(normalize, names))
    known = bool(normalized & set(itertools.chain(*COLUMN_NAMES.values())) or set(names) & set(options.columns))
    headless = (by_position or not known) and _is_data(names, [_split_fields(line, separator) for line in below[:-1]])
    if headless and not by_position:
        rated = " --rating-column 3" if len(names) > 2 else ""
        remedy = (
            f"Name them: fairfold train --data {shlex.quote(path.name)} --user-column 1 --item-column 2{rated}"
            f" (in Python user_column='1'), or add a first line such as user_id,item_id{rated and ',rating'}."
        )
        raise _bad_first_line(path, first, "a header that names the columns", remedy)
    if headless:
        names = [str(place + 1) for place in range(len(names))]
        normalized = set(names)
    positions = find_columns(path, names, options)
    others: dict[str, Any] = {"width": len(names), "separator": separator, "header": not headless, "quote": quote}
    file_format = FileFormat("delimited", *positions, **others)
    goodreads = normalized >= {"bookid", "isread", "rating"}
    if not goodreads and normalized >= {"userid", "movieid", "rating"}:
        return replace(file_format, scale=(0.5, 5))
    return _with_publisher_scale(file_format, names, goodreads=goodreads)


def _separator(line: str) -> str:
    """Most frequent separator of a line; a blank only where there is no other, since titles hold blanks."""
    others = [separator for separator in SEPARATORS if separator != " " and separator in line]
    return max(others or [" "], key=lambda found: (line.count(found) * len(found), -len(found)))


def _split_fields(line: str, separator: str) -> list[str]:
    return [field.strip().strip('"') for field in line.split(separator)]


def _is_data(first: list[str], below: list[list[str]]) -> bool:
    """True if a first line is data: a field is a number, or occurs again in its column, as ids do."""
    seen = {(place, field) for row in below for place, field in enumerate(row) if field}
    return any(re.fullmatch(r"-?[\d.]+", field) or (place, field) in seen for place, field in enumerate(first))


def _is_amazon(fields: list[str]) -> bool:
    """True if a line looks like Amazon's headerless ``user,item,rating,time`` (or item first)."""
    codes = all(re.fullmatch(r"[A-Z0-9]{8,}", field) for field in fields[:2])
    return codes and re.fullmatch(r"[1-5](\.0)?", fields[2]) is not None and fields[3].isdigit()
