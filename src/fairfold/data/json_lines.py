"""Blocks of JSON lines as frames of text columns; what is not JSON, or holds no id, is left out and counted."""

import json
from collections import Counter
from typing import Any, NoReturn

import polars

NOT_JSON = "lines that are not JSON, left out"
NOT_AN_ID = "users or items that are lists or objects, rows left out"


def first_object(line: str) -> dict[str, Any]:
    """One line as an object; ValueError where it is none."""
    try:
        found = json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _refuse(name: str) -> NoReturn:
    """NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{name} is not JSON")


def parse(block: bytes, columns: dict[str, str], repairs: Counter[str]) -> polars.DataFrame:
    """The columns of a block of lines, as text.

    Args:
        block: Whole lines.
        columns: Name in the file of every column wanted, by role.
        repairs: Where what is left out is counted.
    """
    lines = [line for line in block.split(b"\n") if line.strip()]
    schema = dict.fromkeys(columns.values(), polars.String)
    try:
        frame = _engine(lines, schema)
    except polars.exceptions.PolarsError:
        good = [line for line in lines if _is_object(line)]
        frame, good = _salvage(good, schema)
        repairs[NOT_JSON] += len(lines) - len(good)
        lines = good
    frame = frame.select(polars.col(name).alias(role) for role, name in columns.items())
    return _with_plain_ids(frame, lines, columns, repairs)


def _engine(lines: list[bytes], schema: dict[str, type[polars.String]]) -> polars.DataFrame:
    if not lines:
        return polars.DataFrame(schema=schema)
    frame = polars.read_ndjson(b"\n".join(lines), schema=schema)
    if frame.height != len(lines):  # two objects on a line
        raise polars.exceptions.ComputeError("not one object a line")
    return frame


def _salvage(lines: list[bytes], schema: dict[str, type[polars.String]]) -> tuple[polars.DataFrame, list[bytes]]:
    """The lines that the engine reads as well, found by halving: it is stricter than the standard in a few corners."""
    try:
        return _engine(lines, schema), lines
    except polars.exceptions.PolarsError:
        if len(lines) <= 1:
            return polars.DataFrame(schema=schema), []
        half = len(lines) // 2
        frames, kept = zip(*(_salvage(part, schema) for part in (lines[:half], lines[half:])), strict=True)
        return polars.concat(frames), [line for part in kept for line in part]


def _is_object(line: bytes) -> bool:
    try:
        first_object(line.decode())
    except ValueError:
        return False
    return True


def _with_plain_ids(
    frame: polars.DataFrame, lines: list[bytes], columns: dict[str, str], repairs: Counter[str]
) -> polars.DataFrame:
    """Without the rows whose ids are lists or objects: the engine gives their text, which no two writers agree on."""
    keep = polars.repeat(True, frame.height, dtype=polars.Boolean, eager=True)
    for role in ("user", "item"):
        # Text may begin like this as well, so the line is asked; such ids are too rare for that to cost.
        looks = frame[role].str.starts_with("{") | frame[role].str.starts_with("[")
        for row in looks.fill_null(False).arg_true().to_list():
            if not _is_text(lines[row], columns[role]):
                keep[row] = False
    if keep.all():
        return frame
    repairs[NOT_AN_ID] += int((~keep).sum())
    return frame.filter(keep)


def _is_text(line: bytes, name: str) -> bool:
    try:
        return isinstance(first_object(line.decode()).get(name), str)
    except ValueError:
        return False
