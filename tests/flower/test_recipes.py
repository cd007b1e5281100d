"""Every recipe over messages, by eight nodes of four sizes with several users each, is the simulation."""

from pathlib import Path
from typing import Any

import pytest

from fairfold.backends.batched import batched
from fairfold.config.files import load_settings
from tests.support.federations import tiny_data
from tests.support.nodes import assert_same, in_process, simulated

NODES, USERS, ITEMS = 8, 24, 160
CHANGES: dict[str, Any] = {
    "fleet.capacities": "1x-2x-4x-8x", "fleet.clients_per_round": None, "run.rounds": 3, "run.evaluate_every": 3,
    "run.baselines": False,
}  # fmt: skip
SECURE = {"privacy.level": "secure", "privacy.min_cohort": 2}


CASES = [("paper", {}), ("authors", {}), ("fair", {}), ("ratings", {}), ("paper", SECURE), ("authors", SECURE),
         ("fair", SECURE), ("ratings", SECURE)]  # fmt: skip


@pytest.mark.parametrize(("recipe", "privacy"), CASES)
def test_a_recipe_ends_with_the_simulation_s_model(recipe: str, privacy: dict[str, Any], tmp_path: Path) -> None:
    """No node is left out for what its users weigh, and sums of masked vectors differ by their rounding alone."""
    data = tiny_data(1, USERS, ITEMS, ratings=recipe == "ratings")
    settings = load_settings(None, CHANGES | privacy, recipe)
    same = privacy if recipe == "ratings" else {}  # rounded statistics number its items otherwise: another model
    expected, _, _ = simulated(data, load_settings(None, CHANGES | same, recipe), batched)
    nodes = in_process(data, settings, NODES, tmp_path, max_users=USERS // NODES)
    found = nodes.run()
    assert nodes.strategy.progress.rejections.counts == {}
    assert found.round_number == 3
    assert_same(found.full, expected.full, 1e-3 if recipe == "paper" else 1e-4)  # Adam divides by tiny gradients


@pytest.mark.parametrize("privacy", [{}, SECURE], ids=["plain", "secure"])
def test_a_server_with_its_tables_on_disk_is_the_simulation_in_memory(privacy: dict[str, Any], tmp_path: Path) -> None:
    changes = CHANGES | {
        "fleet.capacities": "2x-8x", "algorithm.aggregation": "delta", "algorithm.local_optimizer": "sgd",
        "algorithm.local_lr": 0.5, "algorithm.server_optimizer": "momentum", "algorithm.server_lr": 0.5,
    }  # fmt: skip
    data = tiny_data(1, USERS, ITEMS)
    expected, _, _ = simulated(data, load_settings(None, changes, "authors"), batched)
    settings = load_settings(None, changes | privacy | {"run.table_storage": "disk"}, "authors")
    nodes = in_process(data, settings, NODES, tmp_path, max_users=USERS // NODES, folder=tmp_path / "run")
    found = nodes.run()
    assert (tmp_path / "run" / "table-1.blocks").stat().st_size == 4 * len(expected.full["item_product.weight"])
    assert_same({name: vector.clone() for name, vector in found.full.items()}, expected.full, 1e-4)
