"""A private run with real programs over TLS: noise from devices, ledgers on their disks, and nodes that are killed.

python -m pytest tests/flower/test_private_processes.py -m slow
"""

import time
from pathlib import Path

import pytest

from fairfold.flower.federate import Trial, trial_of
from fairfold.flower.processes import Program, stopping
from fairfold.privacy.ledger import Ledger
from fairfold.runs.read import read_values
from fairfold.settings import Settings

pytestmark = pytest.mark.slow

NODES = "1x*4,4x*3,16x*3"
KILLED = {"entered": 9, "invited": 8}
"""Nodes that die once their ledger has the sum of pairs, and when they are invited to it."""

CLIENT = """
import time
from fairfold.flower import make_client_app, secure_device
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


def killing(trial: Trial, programs: dict[int, Program]) -> None:
    """Kill every node that has come to the place where it is to end."""
    for number in KILLED.values():
        if number in programs and (trial.node(number) / "here").exists():
            programs.pop(number).kill()


def spent(trial: Trial, number: int) -> float:
    return Ledger(trial.node(number) / "state" / "ledger", 8.0, 1e-5, 3).spent()


def test_a_private_run_and_a_second_one_that_devices_refuse(tmp_path: Path) -> None:
    settings = Settings(
        data={"kind": "synthetic", "users": 40, "items": 60, "interactions_per_user": 10},
        algorithm={"kind": "correlations"},
        privacy={"level": "private", "smallest_cohort": 3},
    )
    trial, data = trial_of(settings, NODES, tmp_path / "trial")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "mortal_devices.py").write_text(CLIENT.replace("{killed!r}", repr(KILLED)))
    trial.app, trial.variables = "mortal_devices:app", {"PYTHONPATH": str(mine)}
    trial.wait_for = 8  # those who are left
    trial.prepare(data)
    with stopping(trial.programs):
        trial.start_server()
        trial.enrol_all()
        nodes = {number: trial.start_node(number) for number in range(10)}
        job = trial.start_run("--wait-for", "10")
        deadline = time.monotonic() + 3_000
        while job.status() is None:
            killing(trial, nodes)
            assert time.monotonic() < deadline, job.tail(40)
            time.sleep(0.2)
        result = read_values(trial.run_folder / "result.json", job.tail(60))
        assert sorted(set(range(10)) - nodes.keys()) == sorted(KILLED.values())
        assert [answers for _, answers in trial.server.rounds_done()] == [8]
        assert result["privacy"]["epsilon"] == pytest.approx(8)
        assert "ε = 8" in result["told"][0]
        # Who was killed after it was written down has paid, who was killed before has not.
        assert [round(spent(trial, number), 3) for number in range(8)] == [8.0] * 8
        assert spent(trial, KILLED["entered"]) == pytest.approx(8)
        assert spent(trial, KILLED["invited"]) < 4
        trial.run_folder.rename(tmp_path / "first")
        again = trial.start_run("--wait-for", "8")
        while again.status() is None:
            assert time.monotonic() < deadline, again.tail(40)
            time.sleep(0.2)
    assert not (trial.run_folder / "result.json").exists()
    log = (trial.run_folder / "run.log").read_text()
    assert "BudgetSpent on the device: 'survey', which would bring ε to 8.475" in log
    said = "".join(path.read_text() for path in (trial.folder / "logs").glob("node-*.log"))
    assert said.count("BudgetSpent: 'survey', which would bring ε to 8.475") >= 8
