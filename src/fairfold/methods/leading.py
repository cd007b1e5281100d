"""Models cut to bytes: leading rows and columns of a table in few bits, the strongest pairs and neighbours beside it.

A curve of 16 numbers is held by all: how popular items are, by their number.

Items are numbered by falling popularity and columns by falling weight. How a budget is divided between rows, columns,
pairs and neighbours is a *shape*. Which one serves best depends on the data, so some are tried (:func:`shapes_for`).
Every byte counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import ClassVar, Literal

from pydantic import Field

from fairfold.errors import InvalidSettings
from fairfold.methods.base import Method, Shape, Tensors, cannot
from fairfold.projections import Assignment, CodedRows, PairList, Projection
from fairfold.projections.coded import FACTORS, pair_bytes, pairs_within, row_bytes
from fairfold.subspace import Capacity
from fairfold.values import BYTES, Shapes

COLUMNS = (12, 24, 48, 96, 192, 384)
"""Columns that are tried."""

ALONE, BESIDE = Shape(0, 0.5), 0.75
"""Pairs that are tried: alone, with no more of a row than its two factors; and in what rows leave of the bytes, which
take no more than such a share of them, with half of the columns that are tried first (24 at least)."""

USERS_PER_COLUMN, FEWEST = (30, 10), (48, 24)
"""What is tried first has a column for so many users, and so many at least, or of few users a column for fewer of them
and half as many at least: more would follow what few of them do."""

ALL, HANDFUL = 192, 150
"""Columns that are all there are where users are so few: what is left of fewer columns than users is what λ was meant
to weigh, and is worse than either all of them or very few."""

ENOUGH, FEW = 0.3, 1 / 16
"""The share of the rows that what is tried first has to hold (of all that there could be, or else all of them), and any
other shape."""

NEIGHBOURS, MOST_NEAR = 5, 1 / 3
"""Neighbours of every item that are held first of all, unless they take more than such a share of the bytes; and then
one of every item is tried."""

CURVE = 16
"""Numbers of the curve, a byte each."""

BITS = ((8, 1.0), (4, 0.25), (3, 0.0))
"""Bits of a number: the first by which such a share of the rows can be held."""


@dataclass(frozen=True)
class Cut:
    """What some bytes hold: rows, columns and bits of a number of the table, pairs and neighbours beside it."""

    rows: int
    columns: int
    bits: int
    pairs: int = 0
    near: int = 0


def cut_to(budget: int, rows: int, columns: int, shape: Shape) -> Cut | None:
    """What a budget in bytes holds of a table of so many rows and columns in a shape; None where it holds no row."""
    budget = max(0, budget - CURVE)
    near = min(shape.near * rows, pairs_within(budget // 2, rows))
    budget -= pair_bytes(near, rows)
    few, mine = min(shape.columns, columns), int(shape.share * budget)
    held = {bits: min(rows, mine // row_bytes(few, bits)) for bits, _ in BITS}
    bits = next(bits for bits, enough in BITS if held[bits] >= enough * rows)
    left = budget - held[bits] * row_bytes(few, bits)
    pairs = pairs_within(left, rows) if shape.share < 1 else 0
    return Cut(held[bits], few, bits, pairs, near) if held[bits] else None


def shapes_for(
    budget: int, rows: int, columns: int, users: int, neighbours: int = NEIGHBOURS, whole: int = 0
) -> list[Shape]:
    """Shapes worth a trial, of which the first serves where nothing is known; ``whole``: see :class:`Tensors`."""

    def held(shape: Shape) -> int:
        cut = cut_to(budget, rows, columns, shape)
        return cut.rows if cut is not None else 0

    (many, few), (usual, least) = USERS_PER_COLUMN, FEWEST
    wanted = max(users / many, min(usual, max(least, users / few))) if users >= HANDFUL else ALL
    first = min(range(len(COLUMNS)), key=lambda place: abs(log(COLUMNS[place] / wanted)))
    near = neighbours if pair_bytes(neighbours * rows, rows) <= MOST_NEAR * budget else 0
    while first and held(Shape(COLUMNS[first], near=near)) < min(rows, ENOUGH * max(rows, whole)):
        first -= 1
    others = [Shape(COLUMNS[place]) for place in (first - 1, first - 2, first + 1) if 0 <= place < len(COLUMNS)]
    found = {cut_to(budget, rows, columns, shape): shape for shape in [Shape(COLUMNS[first], near=near)]}
    another = Shape(COLUMNS[first], near=0 if near else min(1, neighbours))
    paired = ALONE, Shape(COLUMNS[max(first - 1, 1)], BESIDE)
    for shape in [another, *(replace(other, near=near) for other in (*others, *paired))]:
        if held(shape) >= FEW * rows:
            found.setdefault(cut_to(budget, rows, columns, shape), shape)
    return list(found.values())


def _lists(tensors: Tensors) -> Shapes:
    """Those of pairs, and of neighbours: two items and a value in a row."""
    return {name: shape for name, shape in tensors.others.items() if shape[-1] > FACTORS}


class Leading(Method):
    """Leading rows and columns in few bits, strongest pairs and neighbours: for models that are made at the server.

    Attributes:
        method: Its name.
        reference_factors: 1x is the bytes of a table of this many single-precision numbers for every item.
        uploads: ``"capacity"``: a device sends no more bytes than its capacity is a share; ``"all"``: all that it has.
    """

    ordered: ClassVar[bool] = True

    method: Literal["leading"] = "leading"
    reference_factors: int = Field(32, ge=1, lt=2**31)
    uploads: Literal["capacity", "all"] = "capacity"

    def budget(self, tensors: Tensors, capacity: Capacity) -> int:
        """Bytes that a device may hold."""
        return capacity.limit(self._whole(tensors), 1) if capacity.budget is None else capacity.budget

    def share(self, tensors: Tensors, capacity: Capacity) -> float:
        """Which part of all that it could send it does."""
        if self.uploads == "all":
            return 1.0
        return min(1.0, self.budget(tensors, capacity) / self._whole(tensors))

    def _whole(self, tensors: Tensors) -> int:
        return tensors.catalogue * self.reference_factors * BYTES

    def divide(
        self,
        tensors: Tensors,
        compressed: Shapes,
        capacities: Sequence[Capacity],
        seed: int,
        round_number: int,
    ) -> list[Assignment]:
        """See the base class: the table, the list of pairs, that of neighbours where there is one, and the curve."""
        if not tensors.catalogue:
            raise InvalidSettings(
                "subspace.method='leading' for a model that is trained on devices",
                "algorithm.kind='correlations'",
                "Use subspace.method='fair'.",
            )
        ((name, shape),), found = compressed.items(), []
        for capacity in capacities:
            budget, columns = self.budget(tensors, capacity), shape[1] - FACTORS
            cut = cut_to(budget, shape[0], columns, self.shape_for(tensors, budget, shape[0], columns))
            if cut is None:
                raise cannot("leading", capacity, "not a row of the table")
            held: dict[str, Projection] = {name: CodedRows((*shape,), (cut.rows, FACTORS + cut.columns), cut.bits)}
            for (other, listed), many in zip(_lists(tensors).items(), (cut.pairs, cut.near), strict=False):
                held[other] = PairList((*listed,), (min(many, listed[0]), listed[1]), shape[0])
            whole = {other: (*of,) for other, of in tensors.others.items() if other not in held}
            held |= {other: CodedRows(of, of, BITS[0][0]) for other, of in whole.items()}
            found.append(Assignment(held))
        return found

    def shape_for(self, tensors: Tensors, budget: int, rows: int, columns: int) -> Shape:
        """The one that was settled for these bytes, or else the nearest ones; the first worth a trial if none was."""
        if not tensors.settled:
            neighbours = sum(of[0] // rows for of in list(_lists(tensors).values())[1:])
            return shapes_for(budget, rows, columns, tensors.users, neighbours, tensors.whole)[0]
        return tensors.settled[min(tensors.settled, key=lambda known: abs(log(known / max(budget, 1))))]

    def others(self, tensors: Tensors, held: Assignment) -> dict[str, Projection]:
        """All is divided."""
        return {}

    def used(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> float:
        """See the base class: bytes."""
        return Assignment(dict(projections)).bytes() / max(self.budget(tensors, capacity), 1)

    def fits(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> bool:
        """Every byte counts."""
        return Assignment(dict(projections)).bytes() <= self.budget(tensors, capacity)
