"""Ratings by federated least squares: the batched round gives the numbers of the loop."""

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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    capacities=st.sampled_from(["1x", "4x", "1x-4x", "1x-2x-8x", "2x-8x"]),
    mapping=st.sampled_from(["ranked", "chunk"]),
    support=st.integers(0, 4),
    replacement=st.booleans(),
    streamed=st.booleans(),
    faulty=st.booleans(),
)
def test_any_federation(seed: int, faulty: bool, mapping: str, **changes: Any) -> None:
    faults = {"drop": 0.2, "nan": 0.2, "wrong_size": 0.1} if faulty else {}
    wanted = {"model": "mf-ratings", "solver": "least_squares", "aggregation": "delta", "chunk": 3, "ridge": 2.0}
    wanted |= {"tail_share": 0.5, "reference_factors": 3, "mapping": mapping, "alike": mapping == "ranked"}
    results = []
    for backend in (loop, batched):
        chosen = tiny_settings(seed=seed, faults=faults, **wanted | changes)
        federation, state, private = tiny_federation(tiny_data(seed, 9, 40, ratings=True), chosen)
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
