"""Nodes of a default fleet, over TLS, reply in one small process each: none of them starts a worker."""

import json
from pathlib import Path

from fairfold.device.stored_model import read_model
from fairfold.flower.fleet.local_fleet import make_local_fleet
from tests.support.settings import make_settings

LARGEST_BYTES = 45_000_000  # of a node's process, at its peak


def test_a_default_fleet_needs_no_torch_on_devices(tmp_path: Path) -> None:
    few = {"name": "synthetic", "users": 8, "items": 400, "interactions_per_user": 30}  # four users on a device
    settings = make_settings(rounds=2, evaluate_every=2, data=few)
    fleet, data = make_local_fleet(settings, "1x,4x", tmp_path)
    fleet.prepare(data)
    fleet.run(lambda _text: None)
    for number in range(2):
        status = json.loads((fleet.node(number) / "status.json").read_text())
        assert status["replies"] >= 4
        assert status["failures"] == 0
        assert 0 < status["last"]["peak"] < LARGEST_BYTES  # torch alone would take more than 200 MB
        model = read_model(fleet.node(number) / "state")
        assert model.round_number == 2
        assert model.recommend([0, 1, 2], 10)
