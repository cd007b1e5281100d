"""The lowest capacity a method can serve, found by asking the method, and what such a device really takes.

A device of HeteroFL holds the leading columns of the table, one of FedHM the two factors; either looks up and trains
rows of a table of N rows and few columns. FAIR's looks rows up by hashing. So one measured job, a table of so many
columns in a subspace of such a size, serves all three (the r × d numbers of FedHM's second factor are left out in its
favour).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairfold.errors import InvalidCapacity
from fairfold.methods import Method
from fairfold.methods.base import Tensors
from fairfold.nn import footprint
from fairfold.projections import Hashed, KeptColumns, LowRank
from fairfold.settings import read_settings
from fairfold.subspace import Capacity

Tell = Callable[[int, int], None]
"""Told how far a cell is: what is done, of how much."""


@dataclass(frozen=True)
class MemorySettings:
    """Of one cell: a table of items × dim."""

    subspace: dict[str, Any]  # the table of a federation's settings: a method and its keys
    items: int = 1_000_000
    dim: int = 32
    compressions: tuple[int, ...] = (1, 8, 31, 32, 1024)  # where memory is measured, as far as the method serves them
    batch: int = 512  # rows looked up at once
    rows: int = 5_000  # rows a round touches

    def method(self) -> Method:
        """What is asked."""
        averaging = {"kind": "gradient", "aggregation": "paper"}  # which all methods go with
        return read_settings({"algorithm": averaging, "subspace": self.subspace}).subspace


def measured(given: MemorySettings, tell: Tell) -> tuple[float, dict[str, Any]]:
    """The largest compression (a whole number) that the method serves, and measured bytes by compression."""
    most = largest_compression(given)
    devices: dict[str, Any] = {}
    points = sorted({*(c for c in given.compressions if c <= most), most})
    for number, compression in enumerate(points):
        held = _held(given, compression)
        assert held is not None
        hashed = isinstance(held, Hashed)
        columns = given.dim if hashed else held.size // given.items
        size = held.size if hashed else given.items * columns
        job = footprint.Job(given.items, columns, size, batch=given.batch, rows=given.rows)
        devices[f"{compression}x"] = {"numbers held": held.size, "measured peak bytes": footprint.measure(job)}
        tell(number + 1, len(points))
    whole = f"table of {given.items:,} × {given.dim}"
    return float(most), {"metric": "compression", "table": whole, "devices": devices}


def largest_compression(given: MemorySettings) -> int:
    """By bisection between one that is served and one that is not; at most the number of weights of the table."""
    served, refused = 1, given.items * given.dim + 1
    while refused - served > 1:
        middle = (served + refused) // 2
        if _held(given, middle) is None:
            refused = middle
        else:
            served = middle
    return served


def _held(given: MemorySettings, compression: int) -> Hashed | LowRank | KeptColumns | None:
    """What a device of that capacity holds of the table; None if the method refuses."""
    table = Tensors({"item": (given.items, given.dim)}, {})
    try:
        (held,) = given.method().assign(table, [Capacity.parse(f"{compression}x")], 0)
    except InvalidCapacity:
        return None
    assert held.projections is not None
    projection = held.projections["item"]
    assert isinstance(projection, Hashed | LowRank | KeptColumns)
    return projection
