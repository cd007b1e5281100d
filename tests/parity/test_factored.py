"""FedHM's fast local solver gives the numbers of the readable one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fairfold.federation.replies import Rejections
from fairfold.simulate import batched, loop
from tests.federations import tiny_data, tiny_federation, tiny_settings


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("optimiser", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("changes", [
    {"capacities": "1x-2x"},
    {"capacities": "2x-3x", "local_epochs": 2, "rank_rule": "share"},
    {"capacities": "1x-2x", "user_vectors": "uploaded", "replacement": True},
    {"capacities": "2x-4x", "model": "neumf-mlp", "factors": 8},
    {"capacities": "1x-2x", "faults": {"drop": 0.2, "nan": 0.2, "wrong_size": 0.2}},
    {"capacities": "1x-2x", "prox": 0.1},
])  # fmt: skip
def test_low_rank_devices(changes: dict[str, Any], optimiser: str) -> None:
    base: dict[str, Any] = {"method": "fedhm", "model": "neumf", "factors": 4, "local_step": 0.02}
    settings = tiny_settings(seed=3, local_optimiser=optimiser, **base | changes)
    results = []
    for backend in (loop, batched):
        data = tiny_data(3, 9, 40, ratings=settings.model == "neumf-mlp")
        federation, state, private = tiny_federation(data, settings)
        rejections = Rejections()
        for _ in range(3):
            state = backend.run_round(state, private, federation, rejections)
        results.append((state.full, private, rejections.counts))
    (full, own, left_out), (full_fast, own_fast, left_out_fast) = results
    assert left_out == left_out_fast
    for expected, found in ((full, full_fast), (own, own_fast)):
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
