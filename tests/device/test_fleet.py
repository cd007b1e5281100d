"""Nodes of a fleet, over TLS, reply in one small process each: none of them starts a worker."""

import json
from pathlib import Path

import pytest

from fairfold.config.files import load_settings
from fairfold.device import native
from fairfold.device.stored_model import read_model
from fairfold.flower.fleet.local_fleet import make_local_fleet
from tests.support.settings import make_settings

FEW = {"name": "synthetic", "users": 12, "items": 400, "interactions_per_user": 30}  # four users on a device
SECURE = {"privacy": {"level": "secure", "min_cohort": 3}, "algorithm": {"kind": "co_occurrence", "min_item_users": 0}}
LARGEST = {"default": 40_000_000, "secure": 48_000_000, "paper": 48_000_000}  # bytes of a node's process at its peak


@pytest.mark.parametrize(
    "case", ["default", pytest.param("secure", marks=pytest.mark.slow), pytest.param("paper", marks=pytest.mark.slow)]
)
def test_a_fleet_needs_no_torch_on_devices(tmp_path: Path, case: str) -> None:
    if case == "paper" and native.library() is None:
        pytest.skip("the C library of devices was not built")
    base = load_settings(None, {}, "paper") if case == "paper" else None
    more = SECURE if case == "secure" else {}
    settings = make_settings(base, rounds=2, evaluate_every=2, data=FEW, **more)
    fleet, data = make_local_fleet(settings, "1x,4x,4x", tmp_path)
    fleet.prepare(data)
    fleet.run(lambda _text: None)
    for number in range(3):
        status = json.loads((fleet.node(number) / "status.json").read_text())
        assert status["replies"] >= 4
        assert status["failures"] == 0
        assert 0 < status["last"]["peak"] < LARGEST[case]  # torch alone would take more than 200 MB
        model = read_model(fleet.node(number) / "state")
        assert model.round_number == 2
        if case != "paper":
            assert model.recommend([0, 1, 2], 10)
