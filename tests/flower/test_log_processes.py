"""The log of enrolled keys with real programs over TLS: it grows between runs, and a forked one ends the sums.

python -m pytest tests/flower/test_log_processes.py -m slow
"""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairfold.atomic_io import write_atomically
from fairfold.cli import app
from fairfold.config import Settings
from fairfold.flower.fleet.local_fleet import LocalFleet, make_local_fleet
from fairfold.flower.fleet.processes import stop_on_exit
from fairfold.flower.roster import Roster

pytestmark = pytest.mark.slow


def trained(local_fleet: LocalFleet, nodes: int) -> int | None:
    """The exit status of a new run of the fleet."""
    shutil.rmtree(local_fleet.run_folder, ignore_errors=True)
    job = local_fleet.start_run("--wait-for", str(nodes))
    return job.wait(600)


def copies(local_fleet: LocalFleet) -> set[bytes]:
    """The logs as the devices keep them."""
    return {path.read_bytes() for path in local_fleet.folder.glob("nodes/*/state/secure/roster.jsonl")}


def test_devices_follow_one_log_and_refuse_another(tmp_path: Path) -> None:
    settings = Settings(
        data={"kind": "synthetic", "users": 40, "items": 60, "interactions_per_user": 10},
        algorithm={"kind": "co_occurrence", "support": 1, "tune": False, "min_item_users": 0},
        run={"rounds": 1, "evaluate_every": 1},
        privacy={"level": "secure", "min_cohort": 3},
        fleet={"network": {"max_failed_rounds": 2}},
    )
    local_fleet, data = make_local_fleet(settings, "1x*5", tmp_path / "trial")
    local_fleet.wait_for = 4
    local_fleet.prepare(data)
    roster = local_fleet.server.roster()
    with stop_on_exit(local_fleet.programs):
        local_fleet.start_server()
        for number in range(4):
            local_fleet.roster.write_bytes(b"")
            local_fleet.enrol(number)
        keys = [local_fleet.node(number) / "key.pub" for number in range(4)]
        write_atomically(local_fleet.roster, b"".join(key.read_bytes() for key in keys))
        for number in range(4):
            local_fleet.start_node(number)
        assert trained(local_fleet, 4) == 0
        assert copies(local_fleet) == {roster.content()}
        shown = CliRunner().invoke(app, ["node", "roster", str(local_fleet.node(0))])
        assert shown.output.startswith("# 4 devices, 4 of them new; "), shown.output

        local_fleet.enrol_all()  # one more, which the owners' rosters have as well
        local_fleet.start_node(4)
        assert trained(local_fleet, 5) == 0
        assert len(roster.entries()) == 5
        assert copies(local_fleet) == {roster.content()}
        shown = CliRunner().invoke(app, ["node", "status", str(local_fleet.node(0))])
        assert "5 devices, 1 of them added since" in shown.output, shown.output

        forked = Roster(tmp_path / "forked", roster.signer)  # the same keys, and one more, in another order
        for one in [*reversed(roster.entries()), roster.entries()[0]._replace(key=bytes(49), node=5)]:
            forked.add(one)
        shutil.copy(forked.path, roster.path)
        before = copies(local_fleet)
        assert trained(local_fleet, 5)
        log = (local_fleet.run_folder / "run.log").read_text()
        assert "line 6 of the roster (it does not follow the line before)" in log
        assert "0 devices that gave keys" in log
        assert not (local_fleet.run_folder / "result.json").exists()
        assert copies(local_fleet) == before
        refused = CliRunner().invoke(app, ["node", "roster", str(local_fleet.node(0))])
        assert "does not begin with the 4 lines" in refused.output + str(refused.exception)
