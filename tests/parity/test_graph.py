"""The cohort as one program over one vector gives the numbers of the sequential backend."""

from typing import Any

import pytest
import torch

from fairfold.kernels import gpu
from tests.support.federations import tiny_data, tiny_settings
from tests.support.parity import Runner, by_backend, check_rounds, graph

NO_GPU = pytest.mark.skipif(not gpu.available(), reason="needs a GPU that torch can use, and Triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def check(device: torch.device, seed: int, rounds: int = 2, ratings: bool = False, **changes: Any) -> None:
    runner = Runner(by_backend(graph(device), device), lambda _: True)
    chosen = tiny_settings(seed=seed, **changes)
    check_rounds(lambda: tiny_data(seed, 9, 40, ratings), chosen, rounds=rounds, runner=runner, absolute=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("method", ["fair", "fair_hom", "full_trn", "fedavg"])
@pytest.mark.parametrize("model", ["mf", "neumf"])
def test_methods_and_optimizers(device: torch.device, method: str, optimizer: str, model: str) -> None:
    check(device, 1, method=method, local_optimizer=optimizer, model=model, local_lr=0.02, capacities="1x-2x-4x")


@pytest.mark.parametrize("changes", [{"weighting": "equal"}, {"replacement": True}, {"shuffle": False}, {"sign": False},
                                     {"clients_per_round": None}, {"compress": "all"},
                                     {"user_vectors": "uploaded"}, {"user_vectors": "uploaded", "compress": "all"},
                                     {"aggregation": "delta", "server_optimizer": "adam"}])  # fmt: skip
def test_other_choices(device: torch.device, changes: dict[str, Any]) -> None:
    check(device, 4, capacities="1x-4x", local_optimizer="adam", local_lr=0.02, local_epochs=2, **changes)


@pytest.mark.parametrize("changes", [{"method": "inconsistent", "capacities": "1x-2x-4x"},
                                     {"method": "inconsistent", "capacities": "4x", "replacement": True},
                                     {"method": "heterofl", "capacities": "1x-2x-4x"},
                                     {"method": "heterofl", "capacities": "2x-4x", "aggregation": "delta"},
                                     {"method": "fedhm", "capacities": "1x-2x", "l2": 0.1},
                                     {"method": "fedhm", "capacities": "2x-3x", "rank_rule": "share"},
                                     {"method": "fedhm", "capacities": "1x-2x", "user_vectors": "uploaded"},
                                     {"method": "fedhm", "capacities": "1x-2x-3x", "objective": "squared"},
                                    ])  # fmt: skip
@pytest.mark.parametrize(("model", "optimizer"), [("mf", "sgd"), ("neumf", "adam")])
def test_baselines(device: torch.device, model: str, changes: dict[str, Any], optimizer: str) -> None:
    check(device, 2, factors=4, model=model, local_optimizer=optimizer, local_lr=0.02, local_epochs=2, **changes)


@pytest.mark.parametrize("method", ["fedhm", "heterofl", "inconsistent"])
def test_baselines_with_faults(device: torch.device, method: str) -> None:
    faults = {"drop": 0.1, "late": 0.1, "nan": 0.1, "infinite": 0.1, "wrong_size": 0.1, "out_of_range": 0.1}
    check(device, 5, rounds=6, faults=faults, method=method, factors=4, capacities="1x-2x")


def test_ratings_of_factored_devices(device: torch.device) -> None:
    model: dict[str, Any] = {"model": "neumf-mlp", "factors": 8, "local_optimizer": "adam", "local_lr": 0.02}
    check(device, 3, ratings=True, method="fedhm", capacities="2x-4x", **model)


def test_ratings(device: torch.device) -> None:
    check(device, 3, ratings=True, model="neumf-mlp", local_optimizer="adam", local_lr=0.02, capacities="2x-4x")


def test_faults_leave_out_the_same_clients(device: torch.device) -> None:
    faults = {"drop": 0.1, "late": 0.1, "nan": 0.1, "infinite": 0.1, "wrong_size": 0.1, "out_of_range": 0.1}
    check(device, 5, rounds=6, faults=faults, capacities="1x-4x")
