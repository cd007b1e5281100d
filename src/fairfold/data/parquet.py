"""Parquet files: a path is a path, never a pattern, and what a file says of itself is checked before it is read."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import polars

from fairfold.data.limits import check_unpacked
from fairfold.errors import InvalidData

BYTES_A_ROW = 16
"""Of a user and an item; what a file's number of rows is weighed by."""

_WHOLE = (polars.Int8, polars.Int16, polars.Int32, polars.Int64, polars.UInt8, polars.UInt16, polars.UInt32)
_NO_NUMBERS = (polars.Date, polars.Datetime, polars.Duration, polars.Time, polars.Binary, polars.Object)


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turn every form in which the engine complains about a file into one clear error."""
    try:
        yield
    except InvalidData:
        raise
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise InvalidData(
            f"{path.name} is not Parquet, truncated or damaged ({reason})",
            "a whole Parquet file",
            "Write or download it again.",
        ) from error


def schema_of(path: Path) -> dict[str, polars.DataType]:
    """Names and types of the columns of a file."""
    with errors_of(path):
        return dict(polars.scan_parquet(path, glob=False).collect_schema())


def read_whole(path: Path, *, memory_map: bool = True) -> polars.DataFrame:
    """A file that fairfold has written; not mapped where it is about to be written anew."""
    with errors_of(path):
        return polars.read_parquet(path, glob=False, memory_map=memory_map)


def blocks(path: Path, columns: dict[str, str], rows: int) -> Iterator[tuple[polars.DataFrame, float]]:
    """The columns wanted (names by role), so many rows at a time, each with its share of the file."""
    schema = schema_of(path)
    for role, name in columns.items():
        _check_type(path, role, name, schema[name])
    with errors_of(path):
        table = polars.scan_parquet(path, glob=False)
        total = int(table.select(polars.len()).collect().item())
    check_unpacked(path, path.stat().st_size, total * BYTES_A_ROW)
    chosen = [polars.col(name).alias(role) for role, name in columns.items()]
    for start in range(0, total, rows):
        with errors_of(path):
            frame = table.slice(start, rows).select(chosen).collect()
            for role in ("user", "item"):
                if frame.schema[role] not in _WHOLE:
                    frame = frame.with_columns(polars.col(role).cast(polars.String))
        yield frame, frame.height / total


def _check_type(path: Path, role: str, name: str, found: polars.DataType) -> None:
    """Refuse ids and ratings of which nobody could say what they are as text, or as a number."""
    bad = found.is_nested() or found in (polars.Binary, polars.Object) or (role == "rating" and found in _NO_NUMBERS)
    if bad:
        raise InvalidData(
            f"the column {name!r} of {path.name} holds {found}",
            "one number per row" if role == "rating" else "one number or text per row",
            f"Name another with --{role}-column, or write the column again.",
        )
