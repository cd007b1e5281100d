"""Models cut to bytes: the leading rows and columns of a table in few bits, and the strongest pairs beside it.

Items are numbered by falling popularity and columns by falling weight, so that whatever a small device holds, a larger
one holds too, in more digits. Every byte counts: the numbers, each row's largest one, what an item is multiplied by,
both items and the value of a pair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from fairfold.errors import InvalidSettings
from fairfold.methods.base import Method, Tensors, cannot
from fairfold.projections import Assignment, PairList, Projection, RoundedBlock
from fairfold.projections.rounded import PAIR_BYTES
from fairfold.subspace import Capacity
from fairfold.values import BYTES, Shapes

ROW_BYTES = 6
"""Of a row beside its numbers: its largest one, and two factors of its item, two bytes each."""

ENOUGH_ROWS = 0.9
"""With so many of the rows in eight bits, nothing finer is asked for."""

NARROW = ((64, 4, 0.5), (32, 4, 0.25), (24, 3, 0.0))
"""Columns and bits for less than that: the first by which such a share of the rows can be held."""

TABLE_SHARE = 0.75
"""Of the bytes, where rows are missing: the rest goes to pairs."""


@dataclass(frozen=True)
class Cut:
    """What some bytes hold: rows, columns and bits of a number of the table, and pairs beside it."""

    rows: int
    columns: int
    bits: int
    pairs: int = 0


def cut_to(budget: int, rows: int, columns: int) -> Cut | None:
    """What a budget in bytes holds of a table of so many rows and columns; None where it holds no row."""
    held = budget // row_bytes(columns, 8)
    if held >= ENOUGH_ROWS * rows:
        return Cut(min(held, rows), columns, 8)
    for wide, bits, enough in NARROW:
        few = min(wide, columns)
        held = min(rows, int(TABLE_SHARE * budget) // row_bytes(few, bits))
        if held >= enough * rows:
            break
    if held == rows and few == columns:
        return Cut(rows, columns, bits)
    left = budget - held * row_bytes(few, bits) - BYTES
    return Cut(held, few, bits, max(0, left // PAIR_BYTES)) if held else None


def row_bytes(columns: int, bits: int) -> int:
    """Of a row with all that belongs to its item."""
    return -(-columns * bits // 8) + ROW_BYTES


class Leading(Method):
    """Leading rows and columns in few bits, and the strongest pairs: for models that are made at the server.

    Attributes:
        method: Its name.
        reference_factors: 1x is the bytes of a table of so many single-precision numbers for every item.
    """

    ordered: ClassVar[bool] = True

    method: Literal["leading"] = "leading"
    reference_factors: int = Field(32, ge=1, lt=2**31)

    def budget(self, tensors: Tensors, capacity: Capacity) -> int:
        """Bytes that a device may hold."""
        return capacity.limit(self._whole(tensors), 1) if capacity.budget is None else capacity.budget

    def share(self, tensors: Tensors, capacity: Capacity) -> float:
        """Which part of the whole that is."""
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
        """See the base class: the table, two vectors with a number per row, and the list of pairs."""
        if not tensors.catalogue:
            raise InvalidSettings(
                "subspace.method='leading' for a model that is trained on devices",
                "algorithm.kind='correlations'",
                "Use subspace.method='fair'.",
            )
        ((name, shape),) = compressed.items()
        found = []
        for capacity in capacities:
            cut = cut_to(self.budget(tensors, capacity), shape[0], shape[1])
            if cut is None:
                raise cannot("leading", capacity, "not a row of the table")
            held: dict[str, Projection] = {name: RoundedBlock((*shape,), (cut.rows, cut.columns), cut.bits)}
            for other, size in tensors.others.items():
                listed = PairList((*size,), (min(cut.pairs, size[0]), size[-1]))
                held[other] = RoundedBlock((*size,), (cut.rows,), 16) if len(size) == 1 else listed
            found.append(Assignment(held))
        return found

    def others(self, tensors: Tensors, held: Assignment) -> dict[str, Projection]:
        """All is divided."""
        return {}

    def fits(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> bool:
        """Every byte counts."""
        return Assignment(dict(projections)).bytes() <= self.budget(tensors, capacity)
