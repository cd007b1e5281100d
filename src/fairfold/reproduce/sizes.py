"""What stands beside the quality: seconds, bytes, and what each size's own model reaches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fairfold.reproduce.tables import Entry, Grid, crossed, shown
from fairfold.runs.units import human_bytes, human_seconds
from fairfold.values import BYTES

COLUMNS = ("row", "column", "size", "users", "holds", "receives", "sends", "own model", "for all users")


@dataclass(frozen=True)
class Size:
    """Devices of one capacity in one cell; None where something is not known."""

    name: str
    users: int
    held: int  # bytes, as those received and sent a round
    down: int | None
    up: int | None
    quality: float | None  # of their own model, for the users who hold it
    everybody: float | None  # for all users


@dataclass(frozen=True)
class View:
    """One side of a table of results: a line a row, a column a column."""

    about: str
    heading: list[str]
    rows: list[list[str]]


def sizes(entry: Entry) -> list[Size]:
    """Of one cell; none where it is not about devices."""
    found = []
    for name, facts in entry.facts.get("devices", {}).items():
        if "users" not in facts:
            continue
        held = BYTES * facts["numbers held"]
        down, up = facts.get("bytes down"), facts.get("bytes up")
        found.append(Size(name, facts["users"], held, down, up, facts.get("quality"), facts.get("everybody")))
    return found


def views(grid: Grid) -> list[View]:
    """What can be told of a table beside its quality: what it costs, and what each size's own model reaches."""
    sides: list[tuple[str, Callable[[Entry], str]]] = [
        ("Seconds a round (the fastest seed's), bytes a round of all devices, both ways, bytes a device holds", _cost),
        ("Each size's own model, lowest to highest, for the users who hold it; in brackets for all users alike", _own),
    ]
    found = [View(about, *crossed(grid, text)) for about, text in sides]
    return [view for view in found if any(any(row[1:]) for row in view.rows)]


def _cost(entry: Entry) -> str:
    if "seconds a round" not in entry.facts:
        return ""
    words = [human_seconds(entry.facts["seconds a round"]), human_bytes(entry.facts["bytes a round"])]
    return ", ".join(filter(None, [*words, _span([size.held for size in sizes(entry)], human_bytes)]))


def _own(entry: Entry) -> str:
    own = _span([size.quality for size in sizes(entry)], "{:.3f}".format)
    everybody = _span([size.everybody for size in sizes(entry)], "{:.3f}".format)
    return f"{own} ({everybody})" if own and everybody else own


def _span(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """The lowest and the highest of those that are known."""
    known = [value for value in values if value is not None]
    return "–".join(dict.fromkeys(text(end) for end in (min(known), max(known)))) if known else ""


def size_rows(grid: Grid) -> list[tuple[str, ...]]:
    """One line a cell and size, as text, in the order of :data:`COLUMNS`."""
    return [
        (
            entry.row, entry.column, size.name, f"{size.users:,}", *map(_bytes, (size.held, size.down, size.up)),
            shown(size.quality), shown(size.everybody),
        )
        for entry in grid.entries
        for size in sizes(entry)
    ]  # fmt: skip


def _bytes(count: int | None) -> str:
    return "–" if count is None else human_bytes(count)
