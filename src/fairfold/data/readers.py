"""Read any file of interactions as blocks of rows: user, item and, where there is one, rating."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy
import polars
from numpy.typing import NDArray

from fairfold.data import files, parsing
from fairfold.data.files import Advance
from fairfold.data.formats import SEPARATORS, FileFormat
from fairfold.errors import InvalidData

MALFORMED = "lines with a wrong number of fields, left out"
NO_ID = "rows without a user or an item, left out"
NOT_A_NUMBER = "ratings that are not numbers, rows left out"
NOT_A_TIME = "times that cannot be read, taken as the oldest"
OUT_OF_SCALE = "ratings out of scale, rows left out"
WITHOUT_ITEMS = "lines with a user and no items"
SURPLUS = "surplus"  # the column of fields beyond the last one
TOLERATED = 0.1  # share of unusable rows above which the format was guessed wrong, and reading the file is an error


def read(
    path: Path,
    file_format: FileFormat,
    *,
    repairs: Counter[str],
    block_size: int = files.BLOCK,
    advance: Advance = lambda _done: None,
) -> Iterator[polars.DataFrame]:
    """Yield the rows of a file in blocks of ``block_size`` bytes, in the order of the file; repairs are counted.

    Frames have the columns ``user`` and ``item`` (Int64 where every id of the block is a plain integer, else String)
    and, where the format has them, ``rating`` (Float32, null for "not rated") and ``time`` (Float64, null if unknown).
    """
    counts = Counter[str]()
    rows = 0
    for frame in _read_frames(path, file_format, counts, block_size, advance):
        clean = _clean_rows(frame, file_format, counts)
        rows += clean.height
        if clean.height:
            yield clean
    unusable = (MALFORMED, parsing.NOT_JSON, parsing.NOT_AN_ID, NO_ID, NOT_A_NUMBER, OUT_OF_SCALE)
    left_out = sum(counts[reason] for reason in unusable)
    if left_out > TOLERATED * (rows + left_out):
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
        given = f"{left_out:,} of {rows + left_out:,} rows of {path.name} cannot be used ({reasons})"
        remedy = "Check the columns, the separator (--separator) and the scale of the ratings (--scale)."
        raise InvalidData(given, file_format.describe(), remedy)
    if counts[NOT_A_TIME] > TOLERATED * rows:
        given = f"{counts[NOT_A_TIME]:,} of {rows:,} times of {path.name} cannot be read"
        remedy = "Name the column with --time-column, or hold out at random (split = 'random')."
        raise InvalidData(given, "numbers, or dates such as 2024-05-31 or 2024-05-31 18:00:00", remedy)
    repairs.update(counts)


def _read_frames(
    path: Path, file_format: FileFormat, repairs: Counter[str], size: int, advance: Advance
) -> Iterator[polars.DataFrame]:
    names = {role: str(name) for role, name in file_format.columns.items()}
    if file_format.kind == "parquet":
        for frame, share in parsing.parquet_blocks(path, names, max(1, size // parsing.BYTES_PER_ROW)):
            advance(int(path.stat().st_size * share))
            yield frame
        return
    quoted = file_format.kind == "delimited" and file_format.quote == '"'
    encoding = file_format.encoding
    found = files.blocks(path, size=size, quoted=quoted, encoding=encoding, repairs=repairs, advance=advance)
    for number, block in enumerate(found):
        body = block[block.find(b"\n") + 1 :] if number == 0 and file_format.header else block
        if not body.strip():
            continue
        if file_format.kind == "json":
            yield parsing.parse_json_lines(body, names, repairs)
        elif file_format.kind == "delimited":
            yield _parse_delimited(body, file_format, repairs)
        else:
            yield _parse_user_lines(path, body, repairs)


def _parse_user_lines(path: Path, block: bytes, repairs: Counter[str]) -> polars.DataFrame:
    for separator in (b",", b"\t", b";"):
        if separator in block:
            needed = "lines of the form `user item item …` with blanks between them"
            remedy = "Name the columns (--user-column, --item-column) if this is a table with one interaction per line."
            raise InvalidData(f"a {SEPARATORS[separator.decode()]} in {path.name}", needed, remedy)
    fields = polars.Series("line", block.decode().split("\n"), dtype=polars.String).str.strip_chars()
    fields = fields.filter(fields != "").str.split(" ")
    line = polars.col("line").list
    frame = fields.to_frame().select(line.first().alias("user"), line.slice(1).alias("item"))
    repairs[WITHOUT_ITEMS] += int((frame["item"].list.len() == 0).sum())
    frame = frame.filter(polars.col("item").list.len() > 0).explode("item")
    return frame.filter(polars.col("item") != "")  # two blanks in a row make an empty field


def _parse_delimited(block: bytes, file_format: FileFormat, repairs: Counter[str]) -> polars.DataFrame:
    """Parse lines of separated fields; lines with too many fields are left out."""
    separator = file_format.separator
    if len(separator.encode()) > 1:  # polars separates by one byte; a tab does not occur in these files
        block = block.replace(separator.encode(), b"\t")
        separator = "\t"
    try:
        frame = _parse_csv(block, file_format, separator)
    except polars.exceptions.PolarsError:  # quotes that follow no rule: every line is parsed on its own
        lines = [line for line in block.split(b"\n") if line.strip()]
        frames, _ = parsing.parse_valid_lines(lines, lambda some: _parse_csv(b"\n".join(some), file_format, separator))
        empty = polars.DataFrame(schema=dict.fromkeys([*file_format.columns, SURPLUS], polars.String))
        frame = polars.concat([empty, *frames])
        repairs[MALFORMED] += len(lines) - frame.height
    too_many = frame[SURPLUS].is_not_null()
    repairs[MALFORMED] += int(too_many.sum())
    frame = frame.filter(~too_many).drop(SURPLUS)
    if file_format.quote == "strip":
        frame = frame.with_columns(polars.all().str.strip_prefix('"').str.strip_suffix('"'))
    return frame


def _parse_csv(block: bytes, file_format: FileFormat, separator: str) -> polars.DataFrame:
    """Parse the columns of a block, and in ``SURPLUS`` the field beyond the last one; missing fields are null."""
    names = [f"column_{position + 1}" for position in range(file_format.width + 1)]
    columns = {role: int(position) for role, position in file_format.columns.items()} | {SURPLUS: file_format.width}
    # Polars takes the number of columns from the first line, which may be malformed, so one is put before it.
    first = separator.join("x" * len(names)).encode() + b"\n"
    frame = polars.read_csv(
        first + block,
        has_header=False,
        separator=separator,
        quote_char='"' if file_format.quote == '"' else None,
        schema=dict.fromkeys(names, polars.String),
        columns=[names[position] for position in sorted(set(columns.values()))],
        truncate_ragged_lines=True,
    )
    return frame.select(polars.col(names[position]).alias(role) for role, position in columns.items()).slice(1)


def _clean_rows(frame: polars.DataFrame, file_format: FileFormat, repairs: Counter[str]) -> polars.DataFrame:
    """Leave out, and count, unusable rows; give ids and ratings their types."""
    for role in ("user", "item"):
        missing = frame[role].is_null()
        if frame.schema[role] == polars.String:
            frame = frame.with_columns(polars.col(role).str.strip_chars())  # as a device does: "a" and "a " are one
            missing |= frame[role] == ""
        if missing.any():
            repairs[NO_ID] += int(missing.sum())
            frame = frame.filter(~missing.fill_null(True))
    if "rating" in frame.columns:
        given = frame["rating"]
        rating = given.cast(polars.Float32, strict=False)
        # An empty field is an interaction without a rating; other text is a mistake.
        blank = given.is_null() | (given == "") if given.dtype == polars.String else given.is_null()
        wrong = (rating.is_null() & ~blank.fill_null(True)) | ~rating.is_finite().fill_null(True)
        outside = wrong & False
        if file_format.scale is not None:
            outside = ~rating.is_between(*file_format.scale).fill_null(True) & ~wrong
        if file_format.unrated is not None:
            outside &= (rating != file_format.unrated).fill_null(True)
            rating = rating.replace(file_format.unrated, None)
        frame = frame.with_columns(rating.alias("rating"))
        repairs[NOT_A_NUMBER] += int(wrong.sum())
        repairs[OUT_OF_SCALE] += int(outside.sum())
        if wrong.any() or outside.any():
            frame = frame.filter(~(wrong | outside))
    if "time" in frame.columns:
        times = parsing.as_times(frame["time"])
        repairs[NOT_A_TIME] += times.null_count()
        frame = frame.with_columns(times.alias("time"))
    return frame.with_columns(integer_ids(frame["user"]), integer_ids(frame["item"]))


def integer_ids(ids: polars.Series) -> polars.Series:
    """Convert ids to Int64 if all are integers in canonical spelling, so that the text can be restored exactly."""
    if ids.dtype != polars.String:
        return ids.cast(polars.Int64)
    for sample in (ids.head(100), ids):
        numbers = sample.cast(polars.Int64, strict=False)
        padded = sample.str.starts_with("0") & (sample.str.len_bytes() > 1)  # 007 is not 7, nor is an ISBN
        signed = sample.str.starts_with("+") | sample.str.starts_with("-0")
        if numbers.null_count() or padded.any() or signed.any():
            return ids
    return numbers


class IdCounter:
    """Counts ids, and notes the first row of each, in memory of the number of distinct ids.

    Small integers are counted in an array; other ids per block, with blocks merged once they outgrow the total.
    (Polars' streaming aggregation keeps partial counts, and so grows with the rows.)
    """

    LARGEST = 1 << 24  # ids below it are counted in an array
    SMALLEST = 1 << 22  # counts of blocks held before they are added up

    def __init__(self) -> None:
        self._counts = numpy.zeros(0, dtype=numpy.int64)
        self._first = numpy.zeros(0, dtype=numpy.int64)
        self._parts: list[polars.DataFrame] = []
        self._merged = 0

    def add(self, ids: polars.Series, first_row: int) -> None:
        """Count the ids of a block that begins at row ``first_row``."""
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
            self._merge_parts()

    def _add_numbers(self, ids: NDArray[numpy.int64], first_row: int) -> None:
        largest = int(ids.max())
        if largest >= len(self._counts):
            more = numpy.zeros(max(largest + 1, 2 * len(self._counts)) - len(self._counts), dtype=numpy.int64)
            self._counts, self._first = numpy.append(self._counts, more), numpy.append(self._first, more)
        new = numpy.flatnonzero(self._counts[ids] == 0)[::-1]
        self._first[ids[new]] = first_row + new  # backwards, so that the first of several rows is written last
        numpy.add.at(self._counts, ids, 1)

    def _merge_parts(self) -> None:
        if len({part.schema["id"] for part in self._parts}) > 1:
            self._parts = [part.with_columns(polars.col("id").cast(polars.String)) for part in self._parts]
        merged = polars.concat(self._parts).group_by("id").agg(polars.col("rows").sum(), polars.col("row").min())
        self._parts = [merged]
        self._merged = merged.height

    def total(self) -> polars.DataFrame:
        """All ids (``id``) with their number of rows (``rows``) and first row (``row``)."""
        seen = numpy.flatnonzero(self._counts)
        self._parts.append(polars.DataFrame({"id": seen, "rows": self._counts[seen], "row": self._first[seen]}))
        self._counts, self._first = self._counts[:0], self._first[:0]
        if len(self._parts) > 1 and not self._parts[-1].height:
            self._parts.pop()
        self._merge_parts()
        return self._parts[0]
