"""FedHM's fast local solver gives the numbers of the readable one."""

from typing import Any

import pytest

from tests.support.federations import tiny_data, tiny_settings
from tests.support.parity import check_rounds


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("changes", [
    {"capacities": "1x-2x"},
    {"capacities": "2x-3x", "local_epochs": 2, "rank_rule": "share"},
    {"capacities": "1x-2x", "user_vectors": "uploaded", "replacement": True},
    {"capacities": "2x-4x", "model": "neumf-mlp", "factors": 8},
    {"capacities": "1x-2x", "faults": {"drop": 0.2, "nan": 0.2, "wrong_size": 0.2}},
    {"capacities": "1x-2x", "prox": 0.1},
])  # fmt: skip
def test_low_rank_devices(changes: dict[str, Any], optimizer: str) -> None:
    base: dict[str, Any] = {"method": "fedhm", "model": "neumf", "factors": 4, "local_lr": 0.02}
    settings = tiny_settings(seed=3, local_optimizer=optimizer, **base | changes)
    check_rounds(lambda: tiny_data(3, 9, 40, ratings=settings.predicts_ratings), settings, absolute=1e-7)
