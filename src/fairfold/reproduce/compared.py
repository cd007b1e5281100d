"""Rows of a table compared user by user: what a table names as ``against``, with an interval for every difference.

That is a row, a column or a reference; ``TABLE/ROW`` is a row of another table of the experiment, ``TABLE/*`` the one
that has the same name there, and ``TABLE/*/COLUMN`` another column of it.
"""

from collections.abc import Iterator
from functools import cache

import numpy

from fairfold.reproduce.paired import Difference, Each, intervals, over_seeds
from fairfold.reproduce.tables import BySeed, Grid, View, crossed

SAME = "*"
ABOUT = "What it gives more than {}, mean and 95 % interval, paired over {}"


def compared(grid: Grid) -> list[View]:
    """A table for each that others are compared with; none where cells do not say what each user got."""
    found = []
    for name, apart in gaps(grid):
        heading, rows = crossed(grid, lambda entry, apart=apart: str(apart.get((entry.row, entry.column), "")))  # type: ignore[misc]
        shown = [row for row in rows if any(row[1:])]
        kept = [at for at in range(len(heading)) if at == 0 or any(row[at] for row in shown)]
        cut = [[line[at] for at in kept] for line in (heading, *shown)]
        over = "test images" if grid.file.metric == "accuracy" else "users"
        table, *there = name.split("/")
        beside = " of ".join([*there[1:], f"the same row of {table}"]) if there[:1] == [SAME] else name
        found.append(View(ABOUT.format(beside, over), cut[0], cut[1:]))
    return found


def gaps(grid: Grid) -> Iterator[tuple[str, dict[tuple[str, str], Difference]]]:
    """What every cell gives more than one that is named, by row and column."""
    known, mean = grid.by_user, cache(over_seeds)  # a cell is unpacked once, however often it is compared
    apart: dict[int, dict[tuple[str, tuple[str, str]], Each]] = {}  # by how many users: these share their draws
    for name in grid.file.against:
        for place, mine in known.items():
            pair = [mine, _other(grid, known, name, place)]
            if grid.file.splits or len(pair[1]) > 1:  # of what both have; a reference of one split has no seeds
                both = [seed for seed in pair[0] if seed in pair[1]]
                pair = [{seed: of[seed] for seed in both} for of in pair]
            if all(pair):
                each, beside = (mean(tuple(of.values())) for of in pair)
                if len(each) == len(beside):
                    apart.setdefault(len(each), {})[name, place] = each - beside
    found = dict[str, dict[tuple[str, str], Difference]]()
    for pairs in apart.values():
        for (name, place), difference in zip(pairs, intervals(numpy.stack(list(pairs.values()))), strict=True):
            found.setdefault(name, {})[place] = difference
    yield from ((name, found[name]) for name in grid.file.against if name in found)


def _other(grid: Grid, known: dict[tuple[str, str], BySeed], name: str, place: tuple[str, str]) -> BySeed:
    row, column = place
    table, *there = name.split("/")
    if there and table in grid.others:
        return grid.others[table].get((row if there[0] == SAME else there[0], [*there, column][1]), {})
    if name == row or (name == column and not grid.file.measures):
        return {}
    if (name, column) in known or (row, name) in known:
        return known.get((name, column)) or known[row, name]
    if len(alone := [given for (_, other), given in known.items() if other == name]) == 1 and not grid.file.measures:
        return alone[0]  # a column with one cell, e.g. FedAvg, which has no sizes
    found = grid.references_by_user.items()  # named without what was chosen for them
    return next((texts for reference, texts in found if reference.split(" (")[0] == name), {})
