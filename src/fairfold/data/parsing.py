"""Parse JSON lines and Parquet files into frames; rows that cannot be used are left out and counted."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import polars

from fairfold.data.files import check_unpacked, parquet_errors
from fairfold.errors import InvalidData

NOT_JSON = "lines that are not JSON, left out"
NOT_AN_ID = "users or items that are lists or objects, rows left out"
BYTES_PER_ROW = 16  # assumed size of a user and an item, by which the number of rows of a Parquet file is limited
_INTEGERS = (polars.Int8, polars.Int16, polars.Int32, polars.Int64, polars.UInt8, polars.UInt16, polars.UInt32)
# Dates and times as text; a day before a month and the like are not guessed
_TIME_FORMATS = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M", "%Y-%m-%d", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d", "%m %d, %Y")
_ZONED_FORMATS = ("%Y-%m-%dT%H:%M:%S%.f%#z", "%Y-%m-%d %H:%M:%S%.f%#z", "%a %b %d %H:%M:%S %z %Y")
_NOT_NUMERIC = (polars.Date, polars.Datetime, polars.Duration, polars.Time, polars.Binary, polars.Object)


def parse_object(line: str) -> dict[str, Any]:
    """Parse one line as a JSON object; ValueError where it is none."""
    try:
        found = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _refuse_constant(name: str) -> NoReturn:  # NaN and Infinity
    raise ValueError(f"{name} is not JSON")


def parse_json_lines(block: bytes, columns: dict[str, str], repairs: Counter[str]) -> polars.DataFrame:
    """Parse the given columns (names by role) of a block of whole lines, as text; count what is left out."""
    lines = [line for line in block.split(b"\n") if line.strip()]
    schema = dict.fromkeys(columns.values(), polars.String)
    empty = polars.DataFrame(schema=schema)

    def parse_lines(some: list[bytes]) -> polars.DataFrame:
        return polars.read_ndjson(b"\n".join(some), schema=schema) if some else empty

    try:
        frame = parse_lines(lines)
        if frame.height != len(lines):  # two objects on a line
            raise polars.exceptions.ComputeError("not one object a line")
    except polars.exceptions.PolarsError:
        frames, valid = parse_valid_lines([line for line in lines if _object_or_none(line) is not None], parse_lines)
        frame = polars.concat([empty, *frames])
        repairs[NOT_JSON] += len(lines) - len(valid)
        lines = valid
    frame = frame.select(polars.col(name).alias(role) for role, name in columns.items())
    # Rows whose ids are lists or objects, of which polars gives some text, are left out.
    keep = polars.repeat(True, frame.height, dtype=polars.Boolean, eager=True)
    for role in ("user", "item"):
        # Text may begin like this as well: such lines, which are rare, are parsed again.
        suspicious = frame[role].str.starts_with("{") | frame[role].str.starts_with("[")
        for row in suspicious.fill_null(False).arg_true().to_list():
            if not isinstance((_object_or_none(lines[row]) or {}).get(columns[role]), str):
                keep[row] = False
    repairs[NOT_AN_ID] += int((~keep).sum())
    return frame.filter(keep)


def parse_valid_lines(
    lines: list[bytes], parse_lines: Callable[[list[bytes]], polars.DataFrame]
) -> tuple[list[polars.DataFrame], list[bytes]]:
    """Parse the lines that polars can read, found by bisection; return the frames and these lines."""
    with contextlib.suppress(polars.exceptions.PolarsError):
        frame = parse_lines(lines)
        if frame.height == len(lines):
            return [frame], lines
    if len(lines) <= 1:
        return [], []
    half = len(lines) // 2
    frames, valid = parse_valid_lines(lines[:half], parse_lines)
    more_frames, more_valid = parse_valid_lines(lines[half:], parse_lines)
    return frames + more_frames, valid + more_valid


def _object_or_none(line: bytes) -> dict[str, Any] | None:
    try:
        return parse_object(line.decode())
    except ValueError:
        return None


def parquet_schema(path: Path) -> dict[str, polars.DataType]:
    """Names and types of the columns of a Parquet file."""
    with parquet_errors(path):
        return dict(polars.scan_parquet(path, glob=False).collect_schema())


def parquet_blocks(path: Path, columns: dict[str, str], rows: int) -> Iterator[tuple[polars.DataFrame, float]]:
    """Yield the given columns (names by role), ``rows`` rows at a time, each block with its share of the file."""
    schema = parquet_schema(path)
    for role, name in columns.items():
        _check_type(path, role, name, schema[name])
    with parquet_errors(path):
        table = polars.scan_parquet(path, glob=False)
        total = int(table.select(polars.len()).collect().item())
    check_unpacked(path, path.stat().st_size, total * BYTES_PER_ROW)
    selected = [polars.col(name).alias(role) for role, name in columns.items()]
    for start in range(0, total, rows):
        with parquet_errors(path):
            frame = table.slice(start, rows).select(selected).collect()
            for role in ("user", "item"):
                if frame.schema[role] not in _INTEGERS:
                    frame = frame.with_columns(polars.col(role).cast(polars.String))
        yield frame, frame.height / total


def _check_type(path: Path, role: str, name: str, found: polars.DataType) -> None:
    """Refuse ids that have no text form, and ratings that are not numbers."""
    not_text = found.is_nested() or found in (polars.Binary, polars.Object)
    if not_text or (role == "rating" and found in _NOT_NUMERIC):
        needed = "one number per row" if role == "rating" else "one number or text per row"
        remedy = f"Name another with --{role}-column, or write the column again."
        raise InvalidData(f"the column {name!r} of {path.name} holds {found}", needed, remedy)


def as_times(times: polars.Series) -> polars.Series:
    """Times as numbers, later ones larger: numbers as they are, dates in seconds; null where a text is neither."""
    if times.dtype in (polars.Date, polars.Datetime):
        return times.cast(polars.Datetime("us")).dt.epoch("us").cast(polars.Float64) / 1e6
    numbers = times.cast(polars.Float64, strict=False)
    if times.dtype != polars.String or numbers.null_count() < max(len(times), 1):
        return numbers.set(~numbers.is_finite(), None)
    text = times.str.strip_chars().str.replace(r"^(\d{4}-\d\d-\d\d)T([\d:.]+)$", "$1 $2")
    for form in (*_TIME_FORMATS, *_ZONED_FORMATS):
        found = text.str.to_datetime(form, strict=False, time_unit="us", ambiguous="earliest")
        numbers = numbers.fill_null(found.dt.epoch("us").cast(polars.Float64) / 1e6)
    return numbers
