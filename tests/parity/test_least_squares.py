"""Federated least squares: the batched round gives the numbers of the loop."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.data.synthetic import SyntheticWorld
from tests.federations import tiny_data, tiny_settings
from tests.flat import flat
from tests.parity.rounds import DOUBLE, SINGLE, check_rounds


def check_parity(seed: int, digits: str = DOUBLE, **changes: Any) -> None:
    wanted: dict[str, Any] = {"solver": "least_squares", "weighting": "equal"}
    if changes.get("mapping", "ranked") == "ranked" and changes.get("method") not in ("full_trn", "fedavg"):
        wanted |= {"tail_share": 0.5, "support": 0}
    chosen = tiny_settings(seed=seed, **wanted | changes)
    check_rounds(lambda: tiny_data(seed, 9, 40), chosen, digits)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    digits=st.sampled_from([DOUBLE, SINGLE]),
    capacities=st.sampled_from(["1x", "4x", "1x-4x", "1x-2x-8x", "2x-8x"]),
    rows=st.fixed_dictionaries({"tail_share": st.sampled_from([0.5, 0.25]), "support": st.integers(0, 4)})
    | st.just({"mapping": "chunk"}),
    weighting=st.sampled_from(["data", "equal", 0.5]),
    replacement=st.booleans(),
    faulty=st.booleans(),
)
def test_any_federation(seed: int, faulty: bool, rows: dict[str, Any], **changes: Any) -> None:
    faults = {"drop": 0.2, "nan": 0.2, "wrong_size": 0.1} if faulty else {}
    check_parity(seed, faults=faults, **rows, **changes)


@pytest.mark.parametrize("method", ["fair", "fair_hom", "full_trn", "fedavg"])
def test_methods(method: str) -> None:
    check_parity(5, method=method, capacities="1x-2x-4x")


def test_longer_rows_for_the_same_bytes() -> None:
    check_parity(6, reference_factors=1, capacities="1x-4x")


def test_single_precision_where_the_sums_are_far_smaller_than_the_model() -> None:
    world = SyntheticWorld(users=600, items=4_000, interactions_per_user=100)
    check_rounds(world.dataset, flat(solver="least_squares"), SINGLE, rounds=5)
