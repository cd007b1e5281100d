"""Blocks of JSON lines as frames of text columns; what is not JSON, or holds no id, is left out and counted."""

import json
from collections import Counter
from collections.abc import Callable
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
    """The columns (names by role) of a block of whole lines, as text; what is left out is counted."""
    lines = [line for line in block.split(b"\n") if line.strip()]
    schema = dict.fromkeys(columns.values(), polars.String)
    nothing = polars.DataFrame(schema=schema)

    def engine(some: list[bytes]) -> polars.DataFrame:
        return polars.read_ndjson(b"\n".join(some), schema=schema) if some else nothing

    try:
        frame = engine(lines)
        if frame.height != len(lines):  # two objects on a line
            raise polars.exceptions.ComputeError("not one object a line")
    except polars.exceptions.PolarsError:
        frames, good = salvage([line for line in lines if _object(line) is not None], engine)
        frame = polars.concat([nothing, *frames])
        repairs[NOT_JSON] += len(lines) - len(good)
        lines = good
    frame = frame.select(polars.col(name).alias(role) for role, name in columns.items())
    return _with_plain_ids(frame, lines, columns, repairs)


def salvage(
    lines: list[bytes], parse_lines: Callable[[list[bytes]], polars.DataFrame]
) -> tuple[list[polars.DataFrame], list[bytes]]:
    """Frames of the lines that the engine reads, each as one row, and these lines: found by halving."""
    try:
        frame = parse_lines(lines)
        if frame.height == len(lines):
            return [frame], lines
    except polars.exceptions.PolarsError:
        pass
    if len(lines) <= 1:
        return [], []
    half = len(lines) // 2
    (frames, kept), (more_frames, more) = (salvage(part, parse_lines) for part in (lines[:half], lines[half:]))
    return frames + more_frames, kept + more


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        return first_object(line.decode())
    except ValueError:
        return None


def _with_plain_ids(
    frame: polars.DataFrame, lines: list[bytes], columns: dict[str, str], repairs: Counter[str]
) -> polars.DataFrame:
    """Without the rows whose ids are lists or objects: the engine gives their text, which no two writers agree on."""
    keep = polars.repeat(True, frame.height, dtype=polars.Boolean, eager=True)
    for role in ("user", "item"):
        # Text may begin like this as well, so the line is asked; such ids are too rare for that to cost.
        looks = frame[role].str.starts_with("{") | frame[role].str.starts_with("[")
        for row in looks.fill_null(False).arg_true().to_list():
            if not isinstance((_object(lines[row]) or {}).get(columns[role]), str):
                keep[row] = False
    repairs[NOT_AN_ID] += int((~keep).sum())
    return frame.filter(keep)
