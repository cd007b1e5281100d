"""The same numbers over messages as in the simulator, one client after another, for every algorithm and method.

Messages carry float32, so results agree to float32 rounding: 1e-6 of the largest number of a tensor. What is left out
is left out for the same reasons, and as often.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairfold.backends.batched import batched
from fairfold.data.images import ImageDataset
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidState
from fairfold.federation.evaluation import Evaluator
from fairfold.federation.round import sequential
from tests.support.federations import tiny_data
from tests.support.nodes import as_devices, assert_agrees, assert_same, in_process, simulated
from tests.support.pictures import pictures
from tests.support.settings import make_settings

FAULTS = {"drop": 0.1, "late": 0.1, "nan": 0.1, "infinite": 0.1, "wrong_size": 0.1, "out_of_range": 0.1}
ITEMS, USERS = 160, 8
STEPS: dict[str, Any] = {
    "algorithm": "gradient", "model": "mf", "local_lr": 0.05, "batch_size": 4, "aggregation": "paper",
}  # fmt: skip
CHANGES: dict[str, Any] = {"aggregation": "delta", "server_optimizer": "sgd", "server_lr": 1.0}
SOLVED: dict[str, Any] = {"algorithm": "closed_form", "server_optimizer": "sgd"}
RATINGS: dict[str, Any] = {"algorithm": "ratings", "rated": True}
IMAGES: dict[str, Any] = {
    "data": {"name": "pictures", "clients": 8}, "model": "mlp", "local_epochs": 1, "batch_size": 16,
    "shuffle": False, "local_lr": 0.01, "aggregation": "paper",
}  # fmt: skip

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fair": STEPS,
    "fair by changes": STEPS | CHANGES | {"rehash": True, "local_epochs": 2},
    "fair with adam on devices": STEPS | CHANGES | {"local_optimizer": "adam", "local_lr": 0.001},
    "fair_hom": STEPS | {"method": "fair_hom"},
    "full_trn": STEPS | {"method": "full_trn"},
    "fedavg": STEPS | {"method": "fedavg", "capacities": "1x"},
    "fedhm": STEPS | {"method": "fedhm"},
    "heterofl": STEPS | {"method": "heterofl"},
    "inconsistent": STEPS | {"method": "inconsistent", "mapping": "element"},
    "neumf": STEPS | {"model": "neumf", "local_lr": 0.02},
    "neumf, deeper and with dropout": STEPS
    | {"model": {"kind": "neumf", "depth": 2, "dropout": 0.3}, "local_lr": 0.02},
    "neumf-mlp": STEPS | {"model": "neumf-mlp", "rated": True, "local_lr": 0.01},
    "everything compressed": STEPS | {"model": "neumf", "compress": "all", "local_lr": 0.02, "prox": 0.1},
    "softmax with a bias": STEPS | {"objective": "softmax", "item_bias": True, "num_negatives": 3, "local_lr": 0.02},
    "squared with chunks": STEPS | {"objective": "squared", "mapping": "chunk", "chunk": 4, "local_lr": 0.02},
    "closed_form": SOLVED,
    "closed_form with momentum": {"algorithm": "closed_form", "server_optimizer": "momentum", "server_lr": 0.1},
    "closed_form by Newton steps": {"algorithm": "closed_form", "server_optimizer": "newton", "server_lr": 1.0},
    "closed_form by Newton steps and counts": {
        "algorithm": "closed_form",
        "server_optimizer": "newton",
        "server_lr": 1.0,
        "popularity": "counts",
        "tail_share": 0.5,
    },
    "closed_form with a tail": SOLVED | {"tail_share": 0.5, "support": 2},
    "closed_form of more factors": SOLVED | {"factors": 8, "reference_factors": 16},
    "closed_form by counts": SOLVED | {"popularity": "counts", "support": 2},
    "closed_form by data": SOLVED | {"weighting": "data", "ridge": 0.3},
    "ratings": RATINGS | {"group_similar": False},
    "ratings alike": RATINGS | {"group_similar": True},
    "ratings streamed": RATINGS | {"streamed": True},
    "ratings by counts": RATINGS | {"popularity": "counts"},
    "co_occurrence": {"algorithm": "co_occurrence", "method": "truncated"},
    "co_occurrence streamed": {
        "algorithm": {"kind": "co_occurrence", "support": 1, "popularity_weight": 0.0, "streamed": True},
        "method": "truncated",
        "reference_factors": 3,
    },
    "mlp": IMAGES,
    "mlp by changes": IMAGES | CHANGES,
}
SCHEMES = ("1x", "1x-16x", "1x-2x-4x-8x-16x-32x-64x")
SMALL_SCHEMES = {"fedhm": "1x-2x", "heterofl": "1x-4x", "full_trn": "1x-2x", "inconsistent": "1x-4x"}
"""For methods that cannot serve the smallest devices."""

MEMORABLE = ("ratings", "co_occurrence", "fair", "mlp")


def parity_case(name: str, scheme: str, *, faults: bool, **changes: Any) -> tuple[Any, Any]:
    """Data and settings."""
    keys: dict[str, Any] = {
        "factors": 4,
        "rounds": 3,
        "clients_per_round": None,
        "evaluate_every": 3,
        "capacities": scheme,
    }
    keys |= ALGORITHMS[name] | changes
    rated, images = bool(keys.pop("rated", False)), keys.get("model") == "mlp"
    if images:
        del keys["factors"]
    if faults:
        keys["faults"] = FAULTS
    data: Any = pictures(count=240) if images else tiny_data(1, USERS, ITEMS, rated)
    return data, make_settings(**keys)


def check(name: str, scheme: str, folder: Path, *, faults: bool, **changes: Any) -> dict[str, int]:
    """Run both; one user a node. Returns who was left out in the simulator."""
    data, settings = parity_case(name, scheme, faults=faults, **changes)
    expected, world, rejections = simulated(data, settings, as_devices if amplifies(name) else sequential)
    nodes = in_process(data, settings, world.clients.num_clients, folder, evaluate=False)
    nodes.run()
    assert_agrees(nodes, expected, world, rejections)
    if amplifies(name):
        assert_agrees(nodes, *simulated(data, settings), within=5e-4)
    return dict(rejections.counts)


def amplifies(name: str) -> bool:
    """Whether rounding grows from round to round, so that programs of other sums part by more than 1e-6."""
    return name.startswith(("ratings", "mlp"))


@pytest.mark.parametrize("faults", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm(name: str, faults: bool, tmp_path: Path) -> None:
    scheme = "1x-2x" if name in ("fedhm", "full_trn") else "1x-4x"
    counts = check(name, scheme, tmp_path, faults=faults)
    assert bool(counts) == faults


@pytest.mark.parametrize("faults", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MEMORABLE)
def test_every_scheme(name: str, scheme: str, faults: bool, tmp_path: Path) -> None:
    check(name, scheme, tmp_path, faults=faults)


@pytest.mark.parametrize("name", ["fair", "closed_form", "ratings", "mlp"])
def test_too_large_a_change_is_refused_alike(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match=r"values out of range\)"):  # of everybody, so the round does not count
        check(name, "1x-4x", tmp_path, faults=False, max_change=1e-9, rounds=1, network={"max_failed_rounds": 1})


@pytest.mark.parametrize("name", ["fair", "closed_form by counts", "ratings"])
def test_some_clients_drawn_as_in_the_simulator(name: str, tmp_path: Path) -> None:
    check(name, "1x-4x", tmp_path, faults=True, clients_per_round=5, rounds=6)


@pytest.mark.parametrize("name", ["fair", "fair by changes", "closed_form", "neumf", "ratings", "ratings streamed"])
def test_a_node_with_several_users_sends_the_sum_of_their_updates(name: str, tmp_path: Path) -> None:
    data, settings = parity_case(name, "1x-4x", faults=False)
    expected, world, rejections = simulated(data, settings, batched)
    nodes = in_process(data, settings, 4, tmp_path, evaluate=False)  # two users each
    nodes.run()
    # A regression over eight users' facts makes more of the order of a sum.
    assert_agrees(nodes, expected, world, rejections, within=1e-5 if name.startswith("ratings") else 1e-6)


def test_every_shape_that_is_tried_goes_over_flower(tmp_path: Path) -> None:
    """Rows without columns among them."""
    name, scheme, changes = "co_occurrence", "1x-16x", {"rounds": 13, "evaluate_every": 13}
    plan: Any = simulated(*parity_case(name, scheme, faults=False))[1].plan
    tried = [split for splits in plan.algorithm.tuning(plan).splits for split in splits[:11]]
    assert {split.columns == 0 for split in tried} == {False, True}
    assert check(name, scheme, tmp_path, faults=False, **changes) == {}


@pytest.mark.parametrize("nodes", [2, 8])
def test_sums_validation_and_models_are_the_simulator_s_to_the_last_bit(nodes: int, tmp_path: Path) -> None:
    """For any users of a node: a choice between models, at a knife's edge, is the same over messages."""
    keys: dict[str, Any] = {"rounds": 15, "evaluate_every": 15, "capacities": "1x-4x", "factors": 8}
    settings = make_settings(algorithm="co_occurrence", method="truncated", clients_per_round=None, **keys)
    data = SyntheticDataset(users=24, items=80, interactions_per_user=16).dataset()
    expected, _, _ = simulated(data, settings, batched)
    found = in_process(data, settings, nodes, tmp_path, evaluate=False).run()
    assert_same(found.full, expected.full, 0.0)
    assert expected.algorithm_state.keys() == {"sum", "solver", "quality"}
    for name, moment in expected.algorithm_state.items():
        assert_same(found.algorithm_state[name], moment, 0.0)


def test_images_of_a_device_with_its_own_order(tmp_path: Path) -> None:
    """With chance a device draws its own order; the run goes on, and learns."""
    data, settings = parity_case("mlp", "1x-4x", faults=False, shuffle=True, rounds=4, evaluate_every=4)
    assert isinstance(data, ImageDataset)
    nodes = in_process(data, settings, 8, tmp_path)
    nodes.run()
    first, last = nodes.strategy.start_quality, nodes.strategy.progress.history[-1].quality
    assert first is not None
    assert last is not None
    assert last.server > first.server


@pytest.mark.parametrize(
    "name", ["closed_form", "fair", "neumf", "closed_form by counts", "softmax with a bias", "co_occurrence streamed"]
)
def test_qualities_that_clients_measure_are_those_of_the_simulator(name: str, tmp_path: Path) -> None:
    """After, and before by the items' order alone, for every size: no device sees another's test items or all rows."""
    _, settings = parity_case(name, "1x-2x-4x", faults=False, top=5, evaluate_every=3)
    data = SyntheticDataset(users=12, items=40, interactions_per_user=14).dataset()
    nodes = in_process(data, settings, 6, tmp_path)
    evaluator, world = Evaluator(nodes.world, {}), nodes.world
    order = -torch.arange(data.num_items).float()
    before = [
        evaluator._evaluate_ranking(lambda users: order.repeat(len(users), 1), evaluator.members(n)).ndcg
        for n in range(3)
    ]
    state = nodes.run()
    for number in range(6):
        world.clients.save_local_state([2 * number, 2 * number + 1], nodes.kept(number).acknowledged.local_state)
    after = evaluator.quality(state, world.plan.assignments(2))
    start, last = nodes.strategy.start_quality, nodes.strategy.progress.history[-1].quality
    assert start is not None
    assert last is not None
    assert start.groups == pytest.approx(before, rel=1e-6)
    assert last.groups == pytest.approx(after.groups, rel=1e-6)
    assert last.groups != pytest.approx(before, rel=1e-3)
    assert nodes.strategy.open_round.node_qualities.keys() == nodes.strategy.nodes.usable.keys()


@pytest.mark.parametrize("name", ["ratings", "ratings streamed"])
def test_half_precision_loses_nothing_of_sums_that_remember(name: str, tmp_path: Path) -> None:
    """What devices receive is rounded; their updates are not, so the sums are those of each last update."""
    data, settings = parity_case(name, "1x-4x", faults=False, rounds=4)
    whole = in_process(data, settings, USERS, tmp_path / "whole", evaluate=False)
    half = in_process(data, settings, USERS, tmp_path / "half", evaluate=False, half=True)
    expected, found = whole.run(), half.run()
    for report, other in zip(whole.strategy.progress.history, half.strategy.progress.history, strict=True):
        assert other.bytes_down == report.bytes_down // 2
        assert other.bytes_up == report.bytes_up
    assert_same(found.full, expected.full, 2e-2)
