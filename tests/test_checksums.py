"""The one reader of plain values, where they come from somebody who means no good."""

import json
import tracemalloc
from typing import Any

import pytest

from fairfold.checksums import MAX_DEPTH, Damaged, parse_json_object


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth - 1):
        found = [found]
    return {"a": found}


def test_what_is_nested_as_deeply_as_allowed_is_read() -> None:
    beside = {f"[{{{number}": ['\\"[{[', {"b": []}] for number in range(200)}
    for values in (nested(MAX_DEPTH), nested(3) | beside):
        assert parse_json_object(json.dumps(values)) == values
        assert parse_json_object(json.dumps(values).encode()) == values


@pytest.mark.parametrize(
    "text",
    [json.dumps(nested(MAX_DEPTH + 1)), "[" * 60_000, '{"a":' * 10_000, '{"x": "' + "[" * 99 + '", "a": ' + "[{" * 99],
    ids=["one too many", "lists", "tables", "after a string"],
)
def test_what_is_nested_too_deeply_is_refused_before_memory_is_asked_for(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="within each other"):
            parse_json_object(text)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ['"' + '\\"' * 30_000, "[" * 65 + '"[', "\udc80", "[]", "", "{}{}"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(Damaged):
        parse_json_object(text)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(Damaged):
        parse_json_object(b'{"a": "\xff"}')
