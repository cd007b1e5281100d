"""A private run with real programs over TLS: noise from devices, ledgers on their disks, and nodes that are killed.

python -m pytest tests/flower/test_private_processes.py -m slow
"""

import time
from pathlib import Path

import pytest

from fairfold.config import Settings
from fairfold.flower.fleet.local_fleet import LocalFleet, make_local_fleet
from fairfold.flower.fleet.processes import Program, stop_on_exit
from fairfold.privacy.ledger import Ledger
from fairfold.runs.folder import read_json

pytestmark = pytest.mark.slow

NODES = "1x*4,4x*3,16x*3"
KILLED = {"entered": 9, "invited": 8}
"""Nodes that die once their ledger has the sum of pairs, and when they are invited to it."""

CLIENT = """
import time
from fairfold.flower import make_client_app
from fairfold.privacy.ledger import Ledger

KILLED = {killed!r}
app = make_client_app()
spend, require = Ledger.spend, Ledger.require


def die(ledger, entry, when):
    home = ledger.folder.parent.parent
    if entry.release == "train 0" and int(home.name) == KILLED[when]:
        home.joinpath("here").touch()
        time.sleep(100_000)


def requiring(ledger, entry):
    die(ledger, entry, "invited")
    return require(ledger, entry)


def spending(ledger, entry):
    spend(ledger, entry)
    die(ledger, entry, "entered")
    return ledger.spent()


Ledger.require, Ledger.spend = requiring, spending
"""


def killing(local_fleet: LocalFleet, programs: dict[int, Program]) -> None:
    """Kill every node that has come to the place where it is to end."""
    for number in KILLED.values():
        if number in programs and (local_fleet.node(number) / "here").exists():
            programs.pop(number).kill()


def spent(local_fleet: LocalFleet, number: int) -> float:
    return Ledger(local_fleet.node(number) / "state" / "ledger", 8.0, 1e-5, 3).spent()


def test_a_private_run_and_a_second_one_that_devices_refuse(tmp_path: Path) -> None:
    settings = Settings(
        data={"kind": "synthetic", "users": 40, "items": 60, "interactions_per_user": 10},
        algorithm={"kind": "co_occurrence"},
        privacy={"level": "private", "min_cohort": 3},
    )
    local_fleet, data = make_local_fleet(settings, NODES, tmp_path / "trial")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "mortal_devices.py").write_text(CLIENT.replace("{killed!r}", repr(KILLED)))
    local_fleet.app, local_fleet.variables = "mortal_devices:app", {"PYTHONPATH": str(mine)}
    local_fleet.wait_for = 8  # those who are left
    local_fleet.prepare(data)
    with stop_on_exit(local_fleet.programs):
        local_fleet.start_server()
        local_fleet.enrol_all()
        nodes = {number: local_fleet.start_node(number) for number in range(10)}
        job = local_fleet.start_run("--wait-for", "10")
        deadline = time.monotonic() + 3_000
        while job.status() is None:
            killing(local_fleet, nodes)
            assert time.monotonic() < deadline, job.tail(40)
            time.sleep(0.2)
        result = read_json(local_fleet.run_folder / "result.json", job.tail(60))
        assert sorted(set(range(10)) - nodes.keys()) == sorted(KILLED.values())
        assert [updates for _, updates in local_fleet.server.completed_rounds()] == [8]
        assert result["privacy"]["epsilon"] == pytest.approx(8)
        assert "ε = 8" in result["notes"][0]
        # Who was killed after it was written down has paid, who was killed before has not.
        assert [round(spent(local_fleet, number), 3) for number in range(8)] == [8.0] * 8
        assert spent(local_fleet, KILLED["entered"]) == pytest.approx(8)
        assert spent(local_fleet, KILLED["invited"]) < 4
        local_fleet.run_folder.rename(tmp_path / "first")
        again = local_fleet.start_run("--wait-for", "8")
        while again.status() is None:
            assert time.monotonic() < deadline, again.tail(40)
            time.sleep(0.2)
    assert not (local_fleet.run_folder / "result.json").exists()
    log = (local_fleet.run_folder / "run.log").read_text()
    assert "BudgetSpent on the device: 'statistics', which would bring ε to 8.475" in log
    output = "".join(path.read_text() for path in (local_fleet.folder / "logs").glob("node-*.log"))
    assert output.count("BudgetSpent: 'statistics', which would bring ε to 8.475") >= 8
