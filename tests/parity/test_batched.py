"""Two backends, same numbers: random federations trained by the readable loop and by the batched program.

In float64, because Adam and Adagrad divide a gradient by its own size. Where a gradient is zero in exact arithmetic
(the output bias of a pairwise loss) what they see is rounding, and in float32 that noise moves weights by whole steps.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairfold.backends import active_set
from fairfold.data import Dataset, Interactions
from fairfold.kernels.native import loader
from tests.support.federations import tiny_data, tiny_settings
from tests.support.parity import check_rounds, compiled_serves_all


@pytest.fixture(params=["compiled", "autograd"], autouse=True)
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with both ways to train a client."""
    if request.param == "autograd":
        monkeypatch.setattr(active_set, "train_compiled", lambda *_: False)
    elif loader.library() is None:
        pytest.skip(loader.status().reason)
    else:
        monkeypatch.setattr(active_set, "train_lockstep", compiled_serves_all)


def check_parity(seed: int, rounds: int = 2, ratings: bool = False, **changes: Any) -> None:
    check_rounds(
        lambda: tiny_data(seed, 9, 40, ratings), tiny_settings(seed=seed, **changes), rounds=rounds, absolute=1e-7
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("method", ["fair", "fair_hom", "full_trn", "fedavg", "heterofl", "fedhm"])
@pytest.mark.parametrize("model", ["mf", "neumf"])
def test_methods_and_optimizers(method: str, optimizer: str, model: str) -> None:
    check_parity(
        1, method=method, local_optimizer=optimizer, model=model, local_lr=0.02, capacities="1x-2x-4x", factors=8
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("mapping", "chunk"), [("element", None), ("chunk", 3), ("ranked", 1), ("ranked", 2)])
def test_mappings_and_seeds(seed: int, mapping: str, chunk: int | None) -> None:
    changes: dict[str, Any] = {
        "local_epochs": 2,
        "num_negatives": 2,
        "local_optimizer": "adam",
        "local_lr": 0.02,
        "rehash": True,
    }
    if chunk is not None:
        changes["chunk"] = chunk
    check_parity(seed, mapping=mapping, capacities="1x-4x", **changes)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "yogi", "adagrad"])
def test_delta_rule_with_every_server_optimiser(optimizer: str) -> None:
    check_parity(2, rounds=3, aggregation="delta", server_optimizer=optimizer, server_lr=0.1, capacities="1x-2x")


def test_ratings() -> None:
    check_parity(3, ratings=True, model="neumf-mlp", local_optimizer="adam", local_lr=0.02, capacities="2x-4x")


@pytest.mark.parametrize("changes", [{"weighting": "equal"}, {"replacement": True}, {"shuffle": False}, {"sign": False},
                                     {"clients_per_round": None}])  # fmt: skip
def test_other_choices(changes: dict[str, Any]) -> None:
    check_parity(4, capacities="1x-4x", **changes)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("changes", [
    {"prox": 0.5, "model": "mf"},
    {"user_vectors": "uploaded"},
    {"compress": "all", "capacities": "1x-2x", "factors": 8, "mapping": "element"},
    {"prox": 0.1, "model": "mf", "compress": "all", "user_vectors": "uploaded", "factors": 8, "mapping": "element"},
    {"method": "inconsistent", "mapping": "element"},
    {"model": {"kind": "neumf", "depth": 3, "factors": 2}},
    {"model": "neumf-mlp", "compress": "all", "factors": 8, "mapping": "element"},
])  # fmt: skip
def test_choices_that_change_what_a_device_trains(changes: dict[str, Any], optimizer: str) -> None:
    ratings = changes.get("model") == "neumf-mlp"
    base: dict[str, Any] = {"model": "neumf", "local_optimizer": optimizer, "local_lr": 0.02, "capacities": "1x-2x"}
    check_parity(6, ratings=ratings, **base | changes)


def test_proximal_term_of_dense_tensors() -> None:
    # Under SGD alone: the term pulls at what rounding moved, and optimizers that divide make whole steps of that.
    check_parity(7, model="neumf", prox=0.5, local_lr=0.02, capacities="1x-2x")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_generated_federations(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(["mf", "neumf", "neumf-mlp"]))
    changes: dict[str, Any] = {
        "model": model,
        "factors": data.draw(st.integers(2, 19)),
        "batch_size": data.draw(st.integers(1, 30)),
        "local_epochs": data.draw(st.integers(1, 4)),
        "local_optimizer": data.draw(st.sampled_from(["sgd", "adagrad", "adam"])),
        "local_lr": data.draw(st.sampled_from([1e-3, 0.05])),
        "capacities": data.draw(st.sampled_from(["1x", "1x-2x", "2x-8x"])),
        "method": data.draw(st.sampled_from(["fair", "fedavg", "inconsistent"])),
    }
    if model != "neumf-mlp":
        changes["num_negatives"] = data.draw(st.integers(1, 3))
        changes["l2"] = data.draw(st.sampled_from([0.0, 1e-6, 0.1]))
    if changes["method"] != "fedavg":
        changes["mapping"] = data.draw(st.sampled_from(["element", "chunk", "ranked"]))
    check_parity(data.draw(st.integers(0, 99)), rounds=1, ratings=model == "neumf-mlp", **changes)


@pytest.mark.parametrize("model", ["mf", "neumf"])
@pytest.mark.parametrize("weighting", ["data", "equal"])
def test_users_without_a_sample(model: str, weighting: str) -> None:
    """They take part, change nothing, and count as the settings say."""
    full = tiny_data(8, 9, 40)
    kept = full.train.users % 3 != 1
    train = Interactions.from_pairs(full.train.users[kept], full.train.items[kept], 9, 40)
    chosen = tiny_settings(model=model, weighting=weighting, capacities="1x-4x", clients_per_round=None)
    check_rounds(lambda: Dataset("gaps", train, train), chosen, rounds=1)


def test_faults_leave_out_the_same_clients() -> None:
    faults = {"drop": 0.1, "late": 0.1, "nan": 0.1, "infinite": 0.1, "wrong_size": 0.1, "out_of_range": 0.1}
    check_parity(5, rounds=6, faults=faults, capacities="1x-4x")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", [
    {"capacities": "1x-4x"},
    {"capacities": "2x-8x", "mapping": "element", "weighting": "equal", "rehash": True},
    {"capacities": "1x-2x-4x", "aggregation": "delta", "server_optimizer": "adam", "server_lr": 0.1},
    {"capacities": "1x-4x", "method": "fair_hom"},
    {"capacities": "1x-4x", "faults": {"drop": 0.2, "nan": 0.2, "wrong_size": 0.2}},
])  # fmt: skip
def test_closed_form(seed: int, changes: dict[str, Any]) -> None:
    check_parity(seed, rounds=3, algorithm="closed_form", **changes)
