"""A table of one figure per data set and model, gathered from the records of several experiments.

``<!-- gathered:`` holds its rows, ``by:`` and its columns, with ``;`` or a new line between them; what follows, up to
``<!-- end -->``, is made::

    ml-1m = MovieLens 1M; goodreads-published goodreads = Goodreads-100
    by:
    popularity = beyond beyond-large: popularity
    `fair`, 16x = fair: mixed: 16x > NDCG@20

A row names the tables of its data set, a column its experiments and either a baseline or the row and column of a table;
the first table that there is counts. The best of a row is set in bold.
"""

import re
from collections.abc import Callable

from experiments.tables import ResultTable
from fairfold.errors import InvalidData

GATHERED = re.compile(r"(<!-- gathered:\n(?P<rows>.*?)\nby:\n(?P<columns>.*?)\n-->\n).*?(<!-- end -->)", re.DOTALL)
BETWEEN = re.compile(r"\s*[;\n]\s*")
UNKNOWN = "–"
Tables = Callable[[str], dict[str, ResultTable]]


def gathered_cells(rows: str, columns: str, tables: Tables) -> tuple[list[str], list[list[str]]]:
    """The heading and the lines of a gathered table; ``tables`` gives those of an experiment."""
    named_columns = [_split(line, " = ") for line in BETWEEN.split(columns)]
    lines = []
    for names, title in (_split(line, " = ") for line in BETWEEN.split(rows)):
        values = [_value(names.split(), place, tables) for _, place in named_columns]
        texts = [UNKNOWN if value is None else f"{value:.3f}".removeprefix("0") for value in values]
        best = max((text for text in texts if text != UNKNOWN), default=UNKNOWN)
        lines.append([title, *(f"**{text}**" if text == best != UNKNOWN else text for text in texts)])
    return ["", *(heading for heading, _ in named_columns)], lines


def _split(text: str, separator: str) -> tuple[str, str]:
    first, found, second = text.partition(separator)
    if not found:
        raise InvalidData(f"{text!r} in a gathered table", f"a line with {separator!r}", "Correct the comment.")
    return first, second


def _value(names: list[str], place: str, tables: Tables) -> float | None:
    """The figure of one cell; None where no record has it, an error where no table could have it."""
    experiments, wanted = _split(place, ": ")
    row, _, column = wanted.partition(" > ")
    candidates = [tables(experiment) for experiment in experiments.split()]
    found = next((known[name] for name in names for known in candidates if name in known), None)
    if found is None:
        return None
    if not column:
        values = [value for name, value in found.baselines.items() if name.split(" (")[0] == row]
        return next((value for value in values if isinstance(value, float)), None)
    entry = next((one for one in found.entries if (one.row, one.column) == (row, column)), None)
    if entry is None:
        raise InvalidData(f"{wanted!r} of {found.name}", "a row and a column of this table", "Correct the comment.")
    return entry.mean
