"""Ratings by federated least squares: the batched round gives the numbers of the loop."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.federations import tiny_data, tiny_settings
from tests.parity.rounds import DOUBLE, SINGLE, check_rounds


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    digits=st.sampled_from([DOUBLE, SINGLE]),
    capacities=st.sampled_from(["1x", "4x", "1x-4x", "1x-2x-8x", "2x-8x"]),
    mapping=st.sampled_from(["ranked", "chunk"]),
    support=st.integers(0, 4),
    replacement=st.booleans(),
    streamed=st.booleans(),
    faulty=st.booleans(),
)
def test_any_federation(seed: int, digits: str, faulty: bool, mapping: str, **changes: Any) -> None:
    faults = {"drop": 0.2, "nan": 0.2, "wrong_size": 0.1} if faulty else {}
    wanted = {"model": "mf-ratings", "solver": "least_squares", "aggregation": "delta", "chunk": 3, "ridge": 2.0}
    wanted |= {"tail_share": 0.5, "reference_factors": 3, "mapping": mapping, "alike": mapping == "ranked"}
    chosen = tiny_settings(seed=seed, faults=faults, **wanted | changes)
    check_rounds(lambda: tiny_data(seed, 9, 40, ratings=True), chosen, digits)
