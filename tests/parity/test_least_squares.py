"""Federated least squares: the batched round gives the numbers of the loop."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairfold.federation.replies import Rejections
from fairfold.simulate import batched, loop
from tests.federations import tiny_data, tiny_federation, tiny_settings


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_parity(seed: int, **changes: Any) -> None:
    results = []
    wanted = {"solver": "least_squares", "aggregation": "delta", "chunk": 3, "weighting": "equal", "tail_share": 0.5}
    for backend in (loop, batched):
        chosen = tiny_settings(seed=seed, **wanted | {"support": 0} | changes)
        federation, state, private = tiny_federation(tiny_data(seed, 9, 40), chosen)
        rejections = Rejections()
        for _ in range(3):
            state = backend.run_round(state, private, federation, rejections)
        results.append((state, private, rejections.counts))
    (state, own, left_out), (batched_state, batched_own, batched_left_out) = results
    compared = [(state.full, batched_state.full), (own, batched_own)]
    compared += [(of, batched_state.moments[key]) for key, of in state.moments.items()]
    for expected, found in compared:
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-8)
    assert left_out == batched_left_out


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    capacities=st.sampled_from(["1x", "4x", "1x-4x", "1x-2x-8x", "2x-8x"]),
    mapping=st.sampled_from(["ranked", "chunk"]),
    weighting=st.sampled_from(["data", "equal", 0.5]),
    tail_share=st.sampled_from([0.5, 0.25]),
    support=st.integers(0, 4),
    replacement=st.booleans(),
    faulty=st.booleans(),
)
def test_any_federation(seed: int, faulty: bool, **changes: Any) -> None:
    faults = {"drop": 0.2, "nan": 0.2, "wrong_size": 0.1} if faulty else {}
    check_parity(seed, faults=faults, **changes)


@pytest.mark.parametrize("method", ["fair", "fair_hom", "full_trn", "fedavg"])
def test_methods(method: str) -> None:
    check_parity(5, method=method, capacities="1x-2x-4x")


def test_longer_rows_for_the_same_bytes() -> None:
    check_parity(6, reference_factors=1, capacities="1x-4x")
