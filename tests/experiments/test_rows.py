"""Records are CSV: what is written is what is read, by this program and by others."""

import csv
import io
import json
import math
from typing import Any

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.records import COLUMNS, HEADER, Outcome, new_record, outcome_from_record, record_to_row, row_to_record
from fairfold.checksums import Damaged

WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), max_size=12)
NUMBERS = st.floats(allow_nan=False, width=64)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(st.text(max_size=6), ANYTHING, max_size=4)
OUTCOMES = st.builds(
    Outcome,
    state=st.sampled_from(["done", "N/A", "broken"]),
    reason=st.text(max_size=20),
    best=st.none() | NUMBERS,
    last=st.none() | NUMBERS,
    curve=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4).map(tuple),
    seconds=NUMBERS,
    facts=TABLES,
    data=TABLES,
    by_user=st.dictionaries(st.text(max_size=6), st.text(max_size=9), max_size=2),
)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(OUTCOMES, WORDS, WORDS, WORDS, TABLES, st.integers())
def test_a_row_is_one_line_that_says_what_was_written(
    outcome: Outcome, table: str, row: str, column: str, settings: dict[str, Any], seed: int
) -> None:
    described = {"table": table, "row": row, "column": column, "kind": "k", "seed": seed, "settings": settings}
    record = new_record(f"{table} {row}", "mark", described, outcome)
    line = record_to_row(record)
    assert line.count("\n") == 1
    assert "\r" not in line
    found = row_to_record(line[:-1].encode())
    assert outcome_from_record(found) == outcome_from_record(as_json(record))
    assert {key: of for key, of in found.items() if key != "outcome"} == {
        key: of for key, of in as_json(record).items() if key != "outcome"
    }


def test_other_programs_read_the_same() -> None:
    users = {"NDCG@20": "x" * 300_000}  # longer than what Python's own reader takes, unless its limit is raised
    outcome = Outcome.of_curve([(1.0, 0.25), (2.0, 1 / 3)], "NDCG@20", facts={'a, "b"': [1]}, by_user=users)
    described = {
        "table": "t",
        "row": "1x, 16x",
        "column": "",
        "kind": "k",
        "seed": 3,
        "settings": {"run": {"rounds": 2}},
    }
    records = [
        new_record("one", "mark", described, outcome),
        new_record("two", "other", described, Outcome("N/A", "no")),
    ]
    text = "\n".join([HEADER, *(record_to_row(record)[:-1] for record in records)])
    read = pandas.read_csv(io.StringIO(text), keep_default_na=False)
    assert list(read.columns) == [*COLUMNS, "checksum"]
    assert list(read["row"]) == ["1x, 16x"] * 2
    assert float(read["best"][0]) == 1 / 3
    assert json.loads(read["settings"][0]) == {"run": {"rounds": 2}}
    assert json.loads(read["by_user"][0]) == users
    assert json.loads(read["reason"][1]) == "no"
    usual = csv.field_size_limit()
    assert row_to_record(record_to_row(records[0])[:-1].encode())["outcome"]["by_user"] == users
    assert csv.field_size_limit() == usual


def test_what_diverged_stays_no_number() -> None:
    line = record_to_row(new_record("one", "mark", {}, Outcome(best=math.nan, last=math.inf)))
    found = outcome_from_record(row_to_record(line[:-1].encode()))
    assert math.isnan(found.best or 0)
    assert found.last == math.inf


@pytest.mark.parametrize("damage", [b"", HEADER.encode(), b"{}", b"one,two,00000000", b"\xff"])
def test_other_lines_are_no_rows(damage: bytes) -> None:
    with pytest.raises(Damaged):
        row_to_record(damage)
