"""Nodes of a fleet, over TLS, reply in one small process each: none of them starts a worker."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device_memory import cases, measure
from fairfold.config.files import load_settings
from fairfold.device import native, offline
from fairfold.device.stored_model import read_model
from fairfold.flower.fleet.local_fleet import make_local_fleet
from fairfold.flower.local_data import LocalFile
from tests.support.settings import make_settings

FEW = {"name": "synthetic", "users": 12, "items": 400, "interactions_per_user": 30}  # four users on a device
SECURE = {"privacy": {"level": "secure", "min_cohort": 3}}
PAIRS = {"algorithm": {"kind": "co_occurrence", "min_item_users": 0}}
IDLE = 25_000_000  # bytes of PSS of a node's process
PLAIN, MASKED = 40_000_000, 48_000_000  # bytes of a node's process at its peak: torch alone would take 200 MB
MOST_START_SECONDS = 1.0  # of processor time, from the start of `fairfold node start` until it is connected
CASES: dict[str, tuple[str | None, dict[str, Any], int]] = {
    "default": (None, {}, PLAIN),
    "ratings": ("ratings", {}, PLAIN),
    "secure": (None, SECURE | PAIRS, MASKED),
    "secure ratings": ("ratings", SECURE, MASKED),
    "paper": ("paper", {}, MASKED),
}
# Every process of the fleet runs this first: it notes the start of a worker.
NOTE = """
import os, sys
if "fairfold.flower.fleet.worker" in sys.orig_argv:
    open(os.environ["NOTED"], "a").close()
"""


def write_ratings(path: Path) -> dict[str, Any]:
    """A file of ratings of twelve users."""
    draw = random.Random(1)
    rows = [(user, item) for user in range(12) for item in draw.sample(range(400), 30)]
    lines = ["user,item,rating", *(f"u{user},{item},{draw.randint(1, 5)}" for user, item in rows)]
    path.write_text("\n".join(lines))
    return {"kind": "interactions", "name": str(path)}


@pytest.mark.parametrize(
    "case", [name if name == "default" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_fleet_needs_no_torch_on_devices(tmp_path: Path, case: str) -> None:
    recipe, more, largest = CASES[case]
    if recipe == "paper" and native.library() is None:
        pytest.skip("the C library of devices was not built")
    data = write_ratings(tmp_path / "ratings.csv") if recipe == "ratings" else FEW
    base = None if recipe is None else load_settings(None, {}, recipe)
    settings = make_settings(base, rounds=2, evaluate_every=2, data=data, **more)
    fleet, found = make_local_fleet(settings, "1x,4x,4x", tmp_path / "fleet")
    (tmp_path / "sitecustomize.py").write_text(NOTE)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    fleet.variables |= {"PYTHONPATH": paths, "NOTED": str(tmp_path / "started")}
    fleet.prepare(found)
    fleet.run(lambda _text: None)
    assert not (tmp_path / "started").exists()
    for number in range(3):
        status = json.loads((fleet.node(number) / "status.json").read_text())
        assert status["replies"] >= 4
        assert status["failures"] == 0
        assert 0 < status["last"]["peak"] < largest
        assert 0 < status["start_cpu"] < MOST_START_SECONDS
        state, file = fleet.node(number) / "state", LocalFile(fleet.node(number) / "train.csv")
        model = read_model(state)
        assert model.round_number == 2
        histories = file.histories(model.items, ratings=model.kind == "ratings")
        user = next(iter(histories))
        assert 0 < len(offline.recommend(state, model, user, histories[user], 10)) <= 10


@pytest.mark.slow
@pytest.mark.parametrize(("case", "largest"), [("plain", PLAIN), ("secure", MASKED)])
def test_devices_of_8000_items_stay_small(case: str, largest: int) -> None:
    """The fleet of the benchmark, whose nodes are looked at while they wait, too."""
    for node in measure(cases()[case]):
        assert 0 < node["idle"] < IDLE
        assert 0 < node["peak"] < largest
        assert node["workers"] == node["failures"] == 0
