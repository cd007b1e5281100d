"""Two backends, same numbers: random federations trained by the readable loop and by the batched program.

In float64, because Adam and Adagrad divide a gradient by its own size. Where a gradient is zero in exact arithmetic
(the output bias of a pairwise loss) what they see is rounding, and in float32 that noise moves weights by whole steps.
"""

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


def check_parity(seed: int, rounds: int = 2, ratings: bool = False, **changes: Any) -> None:
    results = []
    for backend in (loop, batched):
        chosen = tiny_settings(seed=seed, **changes)
        assert chosen.solver == "closed_form" or batched.batches_well(chosen)
        federation, state, private = tiny_federation(tiny_data(seed, 9, 40, ratings), chosen)
        rejections = Rejections()
        for _ in range(rounds):
            state = backend.run_round(state, private, federation, rejections)
        results.append((state.full, private, rejections.counts))
    (full, own, left_out), (full_batched, own_batched, left_out_batched) = results
    for expected, found in ((full, full_batched), (own, own_batched)):
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert left_out == left_out_batched


@pytest.mark.parametrize("optimiser", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("method", ["fair", "fair_hom", "full_trn", "fedavg"])
@pytest.mark.parametrize("model", ["mf", "neumf"])
def test_methods_and_optimisers(method: str, optimiser: str, model: str) -> None:
    check_parity(1, method=method, local_optimiser=optimiser, model=model, local_step=0.02, capacities="1x-2x-4x")


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("changes", [
    {"method": "fedhm"}, {"method": "fedhm", "rank_rule": "share"}, {"method": "heterofl"},
    {"method": "inconsistent", "mapping": "element"},
    {"method": "inconsistent", "mapping": "element", "aggregation": "delta", "server_optimiser": "sgd"},
    {"user_vectors": "uploaded"}, {"user_vectors": "uploaded", "method": "fedhm", "replacement": True},
])  # fmt: skip
def test_rivals_and_uploaded_user_vectors(changes: dict[str, Any], optimiser: str) -> None:
    shared: dict[str, Any] = {"model": "neumf", "local_step": 0.02, "capacities": "1x-2x", "factors": 4}
    check_parity(6, rounds=3, local_optimiser=optimiser, **shared | changes)
    check_parity(7, local_optimiser=optimiser, **shared | changes | {"capacities": "2x-3x", "local_epochs": 2})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("mapping", "chunk"), [("element", 1), ("chunk", 3), ("ranked", 1), ("ranked", 2)])
def test_mappings_and_seeds(seed: int, mapping: str, chunk: int) -> None:
    changes: dict[str, Any] = {
        "local_epochs": 2,
        "negatives": 2,
        "local_optimiser": "adam",
        "local_step": 0.02,
        "rehash": True,
    }
    check_parity(seed, mapping=mapping, chunk=chunk, capacities="1x-4x", **changes)


@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam", "yogi", "adagrad"])
def test_delta_rule_with_every_server_optimiser(optimiser: str) -> None:
    check_parity(2, rounds=3, aggregation="delta", server_optimiser=optimiser, server_step=0.1, capacities="1x-2x")


@pytest.mark.parametrize("method", ["fair", "fedhm", "heterofl"])
def test_ratings(method: str) -> None:
    changes: dict[str, Any] = {"model": "neumf-mlp", "factors": 8, "local_optimiser": "adam", "local_step": 0.02}
    check_parity(3, ratings=True, capacities="2x-4x", method=method, **changes)


@pytest.mark.parametrize("changes", [{"weighting": "equal"}, {"replacement": True}, {"shuffle": False}, {"sign": False},
                                     {"size_rule": "paper"}, {"clients_per_round": None}])  # fmt: skip
def test_other_choices(changes: dict[str, Any]) -> None:
    check_parity(4, capacities="1x-4x", **changes)


@pytest.mark.parametrize("changes", [{}, {"method": "fedhm", "factors": 8}, {"user_vectors": "uploaded"}])
def test_faults_leave_out_the_same_clients(changes: dict[str, Any]) -> None:
    faults = {"drop": 0.1, "late": 0.1, "nan": 0.1, "infinite": 0.1, "wrong_size": 0.1, "out_of_range": 0.1}
    check_parity(5, rounds=6, faults=faults, capacities="1x-4x", **changes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", [
    {"capacities": "1x-4x"},
    {"capacities": "2x-8x", "mapping": "element", "weighting": "equal", "rehash": True},
    {"capacities": "1x-2x-4x", "aggregation": "delta", "server_optimiser": "adam", "server_step": 0.1},
    {"capacities": "1x-4x", "method": "fair_hom"},
    {"capacities": "1x-4x", "faults": {"drop": 0.2, "nan": 0.2, "wrong_size": 0.2}},
])  # fmt: skip
def test_closed_form(seed: int, changes: dict[str, Any]) -> None:
    check_parity(seed, rounds=3, solver="closed_form", **changes)
