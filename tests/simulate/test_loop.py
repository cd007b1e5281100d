"""The walking skeleton learns, repeats itself, and takes every setting."""

import pytest
import torch

from fairfold import Settings, simulate
from fairfold.federation.settings import read_settings

SMALL = {
    "world": {"users": 60, "items": 300, "interactions_per_user": 30},
    "clients_per_round": 30,
    "rounds": 25,
    "evaluate_every": 25,
}


def small(**changes: object) -> Settings:
    return read_settings(SMALL | changes)


def test_every_size_of_device_beats_popularity() -> None:
    world = {"users": 200, "items": 1_500, "interactions_per_user": 60}
    result = simulate(small(world=world, clients_per_round=40, rounds=40, evaluate_every=40, server_step=0.1))
    for group in result.groups:
        assert group.references["popularity"] < group.quality < group.references["best possible"]
    assert result.references["popularity"] < result.quality < result.references["best possible"]


def test_the_same_settings_give_the_same_numbers() -> None:
    first, second = simulate(small(rounds=3)), simulate(small(rounds=3))
    assert torch.equal(first.state.full, second.state.full)
    assert not torch.equal(first.state.full, simulate(small(rounds=3, seed=1)).state.full)


@pytest.mark.parametrize(
    "changes",
    [
        {"solver": "gradient", "aggregation": "paper", "weighting": "data", "local_epochs": 2, "local_step": 0.1},
        {"mapping": "element", "rehash": True},
        {"mapping": "chunk", "chunk": 4, "sign": False, "size_rule": "paper"},
        {"server_optimiser": "sgd", "server_step": 0.1},
        {"capacities": "1x"},
        {"capacities": "1x-...-64x"},
    ],
)
def test_every_setting_runs(changes: dict[str, object]) -> None:
    result = simulate(small(rounds=2, evaluate_every=2, **changes))
    assert torch.isfinite(result.state.full).all()
    assert 0 <= result.quality <= 1


def test_a_new_hash_every_round_changes_the_subspaces() -> None:
    fixed, fresh = simulate(small(rounds=2)), simulate(small(rounds=2, rehash=True))
    assert not torch.equal(fixed.state.full, fresh.state.full)
