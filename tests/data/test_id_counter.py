"""Counting in blocks gives what counting at once gives, for ids of every kind."""

from collections import Counter

import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.data.readers import IdCounter

NUMBERS = st.integers(-3, 40)
WORDS = st.sampled_from(["a", "b", "07", "9"])


@pytest.mark.parametrize("ids", [NUMBERS, WORDS], ids=["numbers", "words"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_blocks_add_up(ids: st.SearchStrategy[int | str], data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.lists(ids, max_size=30), max_size=6))
    tally = IdCounter()
    tally.LARGEST, tally.SMALLEST = 20, 8
    row = 0
    for block in blocks:
        tally.add(polars.Series(block, dtype=polars.Int64 if ids is NUMBERS else polars.String), row)
        row += len(block)
    flat = [one for block in blocks for one in block]
    found = {one: (rows, first) for one, rows, first in tally.total().rows()}
    assert found == {one: (count, flat.index(one)) for one, count in Counter(flat).items()}


def test_numbers_and_words_together_are_words() -> None:
    tally = IdCounter()
    tally.add(polars.Series([5, 5, 7]), 0)
    tally.add(polars.Series(["5", "x"]), 3)
    assert sorted(tally.total().rows()) == [("5", 3, 0), ("7", 1, 2), ("x", 1, 4)]
