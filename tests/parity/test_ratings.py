"""Ratings: the batched round gives the numbers of the loop."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.federations import tiny_data, tiny_settings
from tests.support.parity import DOUBLE, SINGLE, check_rounds


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    digits=st.sampled_from([DOUBLE, SINGLE]),
    capacities=st.sampled_from(["1x", "4x", "1x-4x", "1x-2x-8x", "2x-8x"]),
    rows=st.none() | st.integers(0, 4),
    replacement=st.booleans(),
    streamed=st.booleans(),
    faulty=st.booleans(),
)
def test_any_federation(seed: int, digits: str, faulty: bool, rows: int | None, **changes: Any) -> None:
    faults = {"drop": 0.2, "nan": 0.2, "wrong_size": 0.1} if faulty else {}
    wanted: dict[str, Any] = {"algorithm": "ratings", "reference_factors": 3}
    wanted |= {"mapping": "chunk"} if rows is None else {"tail_share": 0.5, "support": rows, "group_similar": True}
    chosen = tiny_settings(seed=seed, faults=faults, **wanted | changes)
    check_rounds(lambda: tiny_data(seed, 9, 40, ratings=True), chosen, digits)
