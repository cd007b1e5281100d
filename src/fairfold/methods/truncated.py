"""Models truncated to bytes: leading rows and columns of a table in few bits, strongest pairs and neighbors beside it.

Items are numbered by falling popularity and columns by falling weight. How a budget is divided between rows, columns,
pairs and neighbors is a *split*. Which one serves best depends on the data, so several are tuning candidates
(:func:`candidate_splits`). Every client also holds a popularity curve of 16 numbers. Every byte counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import ClassVar, Literal

from pydantic import Field

from fairfold.errors import InvalidSettings
from fairfold.methods.base import Method, Tensors, unsupported_capacity
from fairfold.subspace import Capacity
from fairfold.subspace.packed import FACTORS, QuantizedPairs, QuantizedRows, pair_bytes, pairs_within, row_bytes
from fairfold.subspace.projection import Assignment, Projection
from fairfold.typing import FLOAT_BYTES, Shapes

COLUMNS = (12, 24, 48, 96, 192, 384)  # numbers of columns that are candidates
ROWS_BESIDE_PAIRS = 0.75  # share of the bytes for rows in the candidate with pairs and half of the default columns
# Beyond so many rows the default holds pairs alone: of many items each has to do with few. Up to so many users
# neighbors stand beside them.
MANY_ROWS, MANY_USERS = 11_584, 2_048
# With so few users the default is all columns: a spectrum cut below their number is worse than all or very few
HANDFUL_OF_USERS, ALL_COLUMNS = 150, 192
MIN_CANDIDATE_ROWS = 1 / 16  # share of the rows that a candidate has to hold
ALL_COLUMNS_ROWS = 0.3  # and that the default has to hold where it has all columns
NEIGHBORS_PER_ITEM, MAX_NEIGHBOR_SHARE = 5, 1 / 3  # in the default split, unless they take more of the bytes
CURVE = 16  # numbers of the popularity curve, a byte each
# Bits of a number, each with the share of rows that must fit; the first that does
BITS = ((8, 1.0), (7, 1.0), (6, 1.0), (5, 1.0), (4, 0.25), (3, 0.0))


@dataclass(frozen=True)
class BudgetSplit:
    """How bytes are divided between rows, pairs and neighbors."""

    columns: int  # of the rows
    share: float = 1.0  # of the bytes that neighbors leave, for rows; the rest is for pairs
    neighbors: int = 0  # of every item


PAIRS_ALONE = BudgetSplit(0, 0.2)  # the candidate without columns: two factors per row, and pairs


@dataclass(frozen=True)
class TruncatedTensors(Tensors):
    """Tensors of a model whose table has rows for leading items only."""

    catalogue: int = 0  # items that capacities are measured by
    users: int = 1  # as far as is known
    splits: Mapping[int, BudgetSplit] = field(default_factory=dict)  # chosen for clients of some bytes
    whole: int = 0  # rows if every client uploaded all; 0 if there are so many
    streamed: bool = False  # whether histories are encoded by rows that pass by: a client's own only score


@dataclass(frozen=True)
class TruncatedSizes:
    """What a budget holds: rows, columns and bits per number of the table, pairs and neighbors."""

    rows: int
    columns: int
    bits: int
    pairs: int = 0
    neighbors: int = 0


def fit_to_budget(budget: int, rows: int, columns: int, split: BudgetSplit) -> TruncatedSizes | None:
    """What a budget in bytes holds of a table under a split; None if not a single row."""
    budget = max(0, budget - CURVE)
    neighbors = min(split.neighbors * rows, pairs_within(budget // 2, rows, True))
    budget -= pair_bytes(neighbors, rows, True)
    width = min(split.columns, columns)
    row_budget = int(split.share * budget)
    held = {bits: min(rows, row_budget // row_bytes(width, bits)) for bits, _ in BITS}
    bits = next(bits for bits, enough in BITS if held[bits] >= enough * rows)
    pairs = pairs_within(budget - held[bits] * row_bytes(width, bits), rows) if split.share < 1 else 0
    return TruncatedSizes(held[bits], width, bits, pairs, neighbors) if held[bits] else None


def candidate_splits(
    budget: int,
    rows: int,
    columns: int,
    users: int,
    neighbors: int = NEIGHBORS_PER_ITEM,
    whole: int = 0,
    streamed: bool = False,
) -> list[BudgetSplit]:
    """Splits worth trying, the default first; ``whole``, ``streamed`` as in :class:`TruncatedTensors`."""

    def rows_held(split: BudgetSplit) -> int:
        sizes = fit_to_budget(budget, rows, columns, split)
        return sizes.rows if sizes is not None else 0

    # A column per 30 users, 48 at least; with few users one per 10, 24 at least: more would overfit.
    wanted = ALL_COLUMNS if users < HANDFUL_OF_USERS else max(users / 30, min(48, max(24, users / 10)))
    best = first = min(range(len(COLUMNS)), key=lambda place: abs(log(COLUMNS[place] / wanted)))
    kept = neighbors if pair_bytes(neighbors * rows, rows, True) <= MAX_NEIGHBOR_SHARE * budget else 0
    full = max(rows, whole) / (2 if streamed else 1)

    def of_columns(place: int) -> BudgetSplit:
        # Neighbors stand beside rows of all items, and never in the place of rows.
        beside = BudgetSplit(COLUMNS[place], neighbors=kept)
        return beside if rows_held(beside) == rows else replace(beside, neighbors=0)

    def has_enough_rows(place: int) -> bool:
        # At least the share that the columns are of those wanted: so neither is cut much more than the other.
        share = ALL_COLUMNS_ROWS if users < HANDFUL_OF_USERS else COLUMNS[place] / COLUMNS[best]
        return rows_held(of_columns(place)) >= min(rows, share * full)

    while first and not has_enough_rows(first):
        first -= 1
    leading = of_columns(first)
    default, others = leading, list[BudgetSplit]()
    if rows > MANY_ROWS:
        default, others = replace(PAIRS_ALONE, neighbors=0 if users > MANY_USERS else kept), [leading]
    others.insert(0, replace(default, neighbors=0 if default.neighbors else kept or min(1, neighbors)))
    others += [of_columns(place) for place in (first - 1, first - 2, first + 1) if 0 <= place < len(COLUMNS)]
    others.append(replace(PAIRS_ALONE, neighbors=kept))
    others.append(replace(of_columns(max(first - 1, 1)), share=ROWS_BESIDE_PAIRS))
    found = {fit_to_budget(budget, rows, columns, default): default}
    for split in others:
        if rows_held(split) >= MIN_CANDIDATE_ROWS * rows:
            found.setdefault(fit_to_budget(budget, rows, columns, split), split)
    return list(found.values())


def _pair_lists(tensors: Tensors) -> Shapes:
    """Lists of pairs and of neighbors: two items and a value in a row."""
    return {name: shape for name, shape in tensors.others.items() if shape[-1] > FACTORS}


class Truncated(Method):
    """Leading rows and columns in few bits, strongest pairs and neighbors: for models that the server solves for.

    Attributes:
        method: Its name in settings.
        reference_factors: 1x is the bytes of a table of this many single-precision numbers for every item.
        uploads: ``"capacity"``: a client uploads no more bytes than its capacity is a share; ``"all"``: all it has.
    """

    ordered: ClassVar[bool] = True

    method: Literal["truncated"] = "truncated"
    reference_factors: int = Field(32, ge=1, lt=2**31)
    uploads: Literal["capacity", "all"] = "capacity"

    def budget(self, tensors: Tensors, capacity: Capacity) -> int:
        """Bytes that a client may hold."""
        return capacity.limit(self._full_bytes(tensors), 1) if capacity.budget is None else capacity.budget

    def share(self, tensors: Tensors, capacity: Capacity) -> float:
        """Which part of all that a client could upload it may."""
        if self.uploads == "all":
            return 1.0
        return min(1.0, self.budget(tensors, capacity) / self._full_bytes(tensors))

    def _full_bytes(self, tensors: Tensors) -> int:
        if not isinstance(tensors, TruncatedTensors):
            given = "subspace.method='truncated' for a model that is trained on devices"
            raise InvalidSettings(given, "algorithm.kind='co_occurrence'", "Use subspace.method='fair'.")
        return tensors.catalogue * self.reference_factors * FLOAT_BYTES

    def divide(
        self, tensors: Tensors, compressed: Shapes, capacities: Sequence[Capacity], seed: int, round_number: int
    ) -> list[Assignment]:
        """Assignments per capacity: how many rows, pairs and neighbors its bytes hold, beside the popularity curve."""
        budgets = [self.budget(tensors, capacity) for capacity in capacities]
        ((name, shape),) = compressed.items()
        columns = shape[1] - FACTORS
        found = []
        for capacity, budget in zip(capacities, budgets, strict=True):
            sizes = fit_to_budget(budget, shape[0], columns, self.split_for(tensors, budget, shape[0], columns))
            if sizes is None:
                raise unsupported_capacity("truncated", capacity, "not a row of the table")
            kept = (sizes.rows, FACTORS + sizes.columns)
            held: dict[str, Projection] = {name: QuantizedRows((*shape,), kept, sizes.bits)}
            counts = ((sizes.pairs, False), (sizes.neighbors, True))
            for (other, listed), (count, directed) in zip(_pair_lists(tensors).items(), counts, strict=False):
                kept = (min(count, listed[0]), listed[1])
                held[other] = QuantizedPairs((*listed,), kept, shape[0], directed)
            whole = {other: (*of,) for other, of in tensors.others.items() if other not in held}
            held |= {other: QuantizedRows(of, of, BITS[0][0]) for other, of in whole.items()}
            found.append(Assignment(held))
        return found

    def split_for(self, tensors: Tensors, budget: int, rows: int, columns: int) -> BudgetSplit:
        """The split chosen for these bytes, or for the nearest ones; the default if none was chosen."""
        assert isinstance(tensors, TruncatedTensors)
        if not tensors.splits:
            neighbors = sum(of[0] // rows for of in list(_pair_lists(tensors).values())[1:])
            return candidate_splits(budget, rows, columns, tensors.users, neighbors, tensors.whole, tensors.streamed)[0]
        return tensors.splits[min(tensors.splits, key=lambda known: abs(log(known / max(budget, 1))))]

    def others(self, tensors: Tensors, held: Assignment) -> dict[str, Projection]:
        return {}

    def used_share(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> float:
        return Assignment(dict(projections)).bytes() / max(self.budget(tensors, capacity), 1)

    def fits(self, tensors: Tensors, projections: Mapping[str, Projection], capacity: Capacity) -> bool:
        return Assignment(dict(projections)).bytes() <= self.budget(tensors, capacity)
