"""Networks on images: the sequential and the fast backend give the same numbers, for every method and optimizer.

In float64, for the reason given in test_batched.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.federation.clients import ImageClients
from fairfold.federation.federation import Federation
from tests.support.parity import check_rounds, precision
from tests.support.pictures import SMALL, pictures
from tests.support.settings import make_settings

METHODS = ["fair", "fair_hom", "full_trn", "fedavg", "fedhm", "heterofl", "inconsistent"]


def check_parity(seed: int, rounds: int = 2, side: int = 6, **changes: Any) -> None:
    chosen = make_settings(**SMALL | {"seed": seed} | changes)
    check_rounds(lambda: pictures(seed, side=side), chosen, rounds=rounds, absolute=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_and_optimizers(method: str, optimizer: str) -> None:
    check_parity(1, method=method, local_optimizer=optimizer, local_lr=0.01, capacities="1x-2x-4x")


@pytest.mark.parametrize("method", METHODS)
def test_convolutions(method: str) -> None:
    check_parity(2, rounds=1, side=28, model="lenet", method=method, capacities="1x-4x", local_epochs=1)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scheme=st.sampled_from(["1x", "2x-4x", "1x-8x", "2x-4x-8x"]),
    compress=st.sampled_from(["all", "model"]),
    mapping=st.sampled_from([{"mapping": "element"}, *({"mapping": "chunk", "chunk": size} for size in (2, 3, 8))]),
    changes=st.fixed_dictionaries({
        "rehash": st.booleans(), "sign": st.booleans(),
        "shuffle": st.booleans(), "batch_size": st.integers(1, 30), "aggregation": st.sampled_from(["paper", "delta"]),
        "weighting": st.sampled_from(["data", "equal"]), "replacement": st.booleans(),
    }),
)  # fmt: skip
def test_any_choice(seed: int, scheme: str, compress: str, mapping: dict[str, Any], changes: dict[str, Any]) -> None:
    check_parity(seed, rounds=1, capacities=scheme, compress=compress, **mapping, **changes)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_narrow_networks_by_the_delta_rule(optimizer: str) -> None:
    changes: dict[str, Any] = {"server_optimizer": optimizer, "server_lr": 0.05, "aggregation": "delta"}
    check_parity(6, rounds=3, method="heterofl", capacities="2x-4x", **changes)


def test_faults_and_the_proximal_term() -> None:
    faults = {"drop": 0.1, "late": 0.1, "nan": 0.1, "infinite": 0.1, "wrong_size": 0.1, "out_of_range": 0.1}
    check_parity(5, rounds=3, faults=faults, capacities="1x-4x")
    check_parity(5, rounds=1, prox=0.1, capacities="1x-4x")


def test_pixels_are_shifted_and_scaled() -> None:
    scaled = SMALL["data"] | {"mean": 0.25, "deviation": 0.5}
    check_parity(7, capacities="2x-4x", data=scaled)
    chosen = make_settings(**SMALL | {"data": scaled})
    data = pictures(7, side=6)
    clients = Federation.of(chosen, data).clients
    assert isinstance(clients, ImageClients)
    expected = (data.train.images[[3, 0]].double() / 255 - 0.25) / 0.5
    with precision():
        torch.testing.assert_close(clients.training.pixels(torch.tensor([3, 0])), expected)
