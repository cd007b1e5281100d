"""The same numbers over messages as in the simulator: server's tensors and users' vectors, after a few rounds.

Messages carry float32 changes, so results agree to float32 rounding: 2e-5 of a number's size, 2e-6 at least.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.data.synthetic import SyntheticWorld
from fairfold.flower.store import DeviceStore
from fairfold.simulate.result import Judge
from tests.federations import tiny_data, tiny_settings
from tests.flower.common import in_process, simulated


def check(state: Path, nodes: int = 6, seed: int = 0, users: int = 12, ratings: bool = False, **changes: Any) -> None:
    base: dict[str, Any] = {"rounds": 3, "clients_per_round": None, "capacities": "1x-2x-4x", "evaluate_every": 2}
    settings = tiny_settings(seed=seed, **base | changes)
    if settings.own_model:  # of the built-in ones it is known
        settings = settings.model_copy(update={"ratings": ratings})
    data = tiny_data(seed, users, 40, ratings)
    full, private = simulated(data, settings)
    strategy, grid, _, _ = in_process(data, settings, nodes, state)
    strategy.start(grid)
    assert strategy.progress.state.round_number == settings.rounds
    assert not strategy.progress.rejections.counts
    for name, vector in full.items():
        torch.testing.assert_close(strategy.progress.state.full[name], vector, rtol=2e-5, atol=2e-6)
    kept = [DeviceStore(state / f"node-{number}").load() for number in range(nodes)]
    for name, rows in private.items():
        found = torch.cat([one.vectors[name] for one in kept])
        torch.testing.assert_close(found, rows, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("method", ["fair", "fair_hom"])
@pytest.mark.parametrize("solver", ["gradient", "closed_form"])
@pytest.mark.parametrize("aggregation", ["paper", "delta"])
def test_methods_solvers_and_rules(method: str, solver: str, aggregation: str, tmp_path: Path) -> None:
    check(tmp_path, method=method, solver=solver, aggregation=aggregation, server_optimiser="sgd", server_step=1.0)


@pytest.mark.parametrize("optimiser", ["momentum", "yogi", "adagrad"])
def test_server_optimisers(optimiser: str, tmp_path: Path) -> None:
    check(tmp_path, aggregation="delta", server_optimiser=optimiser, server_step=0.1, solver="closed_form")


@pytest.mark.parametrize("objective", ["bpr", "softmax", "squared"])
def test_objectives_with_a_bias(objective: str, tmp_path: Path) -> None:
    check(tmp_path, objective=objective, item_bias=True, negatives=3, local_step=0.02, factors=8)


def test_one_user_a_node_drawn_as_in_the_simulator(tmp_path: Path) -> None:
    check(tmp_path, nodes=12, clients_per_round=5, rounds=5, rehash=True, local_epochs=2)


def test_fedavg_among_devices_that_hold_the_model(tmp_path: Path) -> None:
    check(tmp_path, method="fedavg", capacities="1x", local_optimiser="adagrad")


@pytest.mark.parametrize("model", ["neumf", "neumf-mlp"])
def test_networks(model: str, tmp_path: Path) -> None:
    check(tmp_path, model=model, ratings=model == "neumf-mlp", local_step=0.02)


def test_every_tensor_compressed(tmp_path: Path) -> None:
    check(tmp_path, model="neumf", compress="all", factors=8, local_step=0.02, prox=0.1)


@pytest.mark.parametrize(("mapping", "chunk"), [("element", 1), ("chunk", 3), ("ranked", 2)])
def test_mappings(mapping: str, chunk: int, tmp_path: Path) -> None:
    check(tmp_path, mapping=mapping, chunk=chunk, weighting="equal", capacities="1x-4x")


@pytest.mark.parametrize(
    "changes",
    [
        {"solver": "closed_form", "rehash": True},
        {"solver": "gradient"},
        {"model": "neumf"},
        {"item_bias": True, "objective": "squared"},
    ],
)
def test_what_devices_say_of_their_models_is_what_the_simulator_finds(changes: dict[str, Any], tmp_path: Path) -> None:
    """Before and after, for every size: no device sees another's test items, and none realises the table."""
    settings = tiny_settings(
        rounds=3, clients_per_round=None, capacities="1x-2x-4x", top=5, evaluate_every=3, **changes
    )
    data = SyntheticWorld(users=12, items=40, interactions_per_user=14).dataset()
    strategy, grid, federation, private = in_process(data, settings, 6, tmp_path)
    judge, before = Judge(federation, {}), strategy.progress.state
    expected = judge.quality(before, private, federation.assignments(0))
    strategy.start(grid)
    kept = [DeviceStore(tmp_path / f"node-{number}").load() for number in range(6)]
    trained = {name: torch.cat([one.vectors[name] for one in kept]) for name in private}
    found = judge.quality(strategy.progress.state, trained, federation.assignments(2))
    last = strategy.progress.history[-1].quality
    assert strategy.start_quality is not None
    assert last is not None
    assert strategy.start_quality.groups == pytest.approx(expected.groups, rel=1e-6)
    assert last.groups == pytest.approx(found.groups, rel=1e-6)
    assert last.groups != pytest.approx(expected.groups, rel=1e-3)
    assert all(node.first_quality and node.last_quality for node in strategy.nodes.usable.values())
