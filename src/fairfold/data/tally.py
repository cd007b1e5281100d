"""Counts of ids that come in blocks, in memory proportional to the different ids."""

import numpy
import polars


class Tally:
    """How often each id was seen, and in which row first.

    Small whole numbers are counted in an array. For other ids blocks are counted on their own and added up once they
    outgrow the total. (The engine's own streaming aggregation keeps partial counts of ids that are far apart, and so
    grows with the rows.)
    """

    LARGEST = 1 << 24  # ids below it are counted in an array
    SMALLEST = 1 << 22  # counts of blocks held before they are added up

    def __init__(self) -> None:
        self._counts = numpy.zeros(0, dtype=numpy.int64)
        self._first = numpy.zeros(0, dtype=numpy.int64)
        self._parts: list[polars.DataFrame] = []
        self._merged = 0

    def add(self, ids: polars.Series, first_row: int) -> None:
        """Count the ids of a block, whose first row has the number ``first_row``."""
        if not len(ids):
            return
        if ids.dtype == polars.Int64:
            numbers = ids.to_numpy()
            if numbers.min() >= 0 and numbers.max() < self.LARGEST:
                self._add_numbers(numbers, first_row)
                return
        frame = ids.alias("id").to_frame().with_row_index("row", first_row)
        counts = frame.group_by("id").agg(polars.len().cast(polars.Int64).alias("rows"), polars.col("row").min())
        self._parts.append(counts.select("id", "rows", polars.col("row").cast(polars.Int64)))
        if sum(part.height for part in self._parts) > max(self.SMALLEST, 2 * self._merged):
            self._merge()

    def _add_numbers(self, ids: "numpy.typing.NDArray[numpy.int64]", first_row: int) -> None:
        largest = int(ids.max())
        if largest >= len(self._counts):
            more = numpy.zeros(max(largest + 1, 2 * len(self._counts)) - len(self._counts), dtype=numpy.int64)
            self._counts, self._first = numpy.append(self._counts, more), numpy.append(self._first, more)
        new = numpy.flatnonzero(self._counts[ids] == 0)[::-1]
        self._first[ids[new]] = first_row + new  # backwards, so that the first of several rows is written last
        numpy.add.at(self._counts, ids, 1)

    def _merge(self) -> None:
        if len({part.schema["id"] for part in self._parts}) > 1:
            self._parts = [part.with_columns(polars.col("id").cast(polars.String)) for part in self._parts]
        whole = polars.concat(self._parts).group_by("id").agg(polars.col("rows").sum(), polars.col("row").min())
        self._parts, self._merged = [whole], whole.height

    def total(self) -> polars.DataFrame:
        """Every id with its number of rows (``rows``) and its first one (``row``)."""
        seen = numpy.flatnonzero(self._counts)
        self._parts.append(polars.DataFrame({"id": seen, "rows": self._counts[seen], "row": self._first[seen]}))
        self._counts, self._first = self._counts[:0], self._first[:0]
        if len(self._parts) > 1 and not self._parts[-1].height:
            self._parts.pop()
        self._merge()
        return self._parts[0]
