"""Networks on images: the readable loop and the fast backend give the same numbers, for every method and optimiser.

In float64, for the reason given in test_batched.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.federation.aggregate import ServerState
from fairfold.federation.image_task import ImageTask, task_of
from fairfold.federation.replies import Rejections
from fairfold.federation.settings import read_settings
from fairfold.simulate import batched, loop
from fairfold.simulate.federation import Federation
from tests.pictures import SMALL, pictures

METHODS = ["fair", "fair_hom", "full_trn", "fedavg", "fedhm", "heterofl", "inconsistent"]


@pytest.fixture(autouse=True, scope="module")
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_parity(seed: int, rounds: int = 2, side: int = 6, **changes: Any) -> None:
    results = []
    data = pictures(seed, side=side)
    chosen = read_settings(SMALL | {"seed": seed} | changes)
    for backend in (loop, batched):
        federation = Federation.of(chosen, task_of(data, chosen))
        full, private = federation.initial()
        state, rejections = ServerState(full), Rejections()
        for _ in range(rounds):
            state = backend.run_round(state, private, federation, rejections)
        results.append((full, state.full, rejections.counts))
    (before, expected, left_out), (_, found, left_out_fast) = results
    assert expected.keys() == found.keys()
    assert any(not torch.equal(before[name], expected[name]) for name in expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert left_out == left_out_fast


@pytest.mark.parametrize("optimiser", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_and_optimisers(method: str, optimiser: str) -> None:
    check_parity(1, method=method, local_optimiser=optimiser, local_step=0.01, capacities="1x-2x-4x")


@pytest.mark.parametrize("method", METHODS)
def test_convolutions(method: str) -> None:
    check_parity(2, rounds=1, side=28, model="lenet", method=method, capacities="1x-4x", local_epochs=1)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scheme=st.sampled_from(["1x", "2x-4x", "1x-8x", "2x-4x-8x"]),
    compress=st.sampled_from(["all", "model"]),
    mapping=st.sampled_from(["element", "chunk"]),
    changes=st.fixed_dictionaries({
        "chunk": st.sampled_from([2, 3, 8]), "rehash": st.booleans(), "sign": st.booleans(),
        "shuffle": st.booleans(), "batch_size": st.integers(1, 30), "aggregation": st.sampled_from(["paper", "delta"]),
        "weighting": st.sampled_from(["data", "equal"]), "replacement": st.booleans(),
    }),
)  # fmt: skip
def test_any_choice(seed: int, scheme: str, compress: str, mapping: str, changes: dict[str, Any]) -> None:
    check_parity(seed, rounds=1, capacities=scheme, compress=compress, mapping=mapping, **changes)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_narrow_networks_by_the_delta_rule(optimiser: str) -> None:
    changes: dict[str, Any] = {"server_optimiser": optimiser, "server_step": 0.05, "aggregation": "delta"}
    check_parity(6, rounds=3, method="heterofl", capacities="2x-4x", **changes)


def test_faults_and_the_proximal_term() -> None:
    faults = {"drop": 0.1, "late": 0.1, "nan": 0.1, "infinite": 0.1, "wrong_size": 0.1, "out_of_range": 0.1}
    check_parity(5, rounds=3, faults=faults, capacities="1x-4x")
    check_parity(5, rounds=1, prox=0.1, capacities="1x-4x")


def test_pixels_are_shifted_and_scaled() -> None:
    scaled = SMALL["images"] | {"mean": 0.25, "deviation": 0.5}
    check_parity(7, capacities="2x-4x", images=scaled)
    chosen = read_settings(SMALL | {"images": scaled})
    data = pictures(7, side=6)
    task = task_of(data, chosen)
    assert isinstance(task, ImageTask)
    expected = (data.train.images[[3, 0]].double() / 255 - 0.25) / 0.5
    torch.testing.assert_close(task.pixels(torch.tensor([3, 0])), expected)
