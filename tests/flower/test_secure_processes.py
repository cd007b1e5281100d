"""Secure sums with real programs over TLS: nodes of three sizes, one of them killed in every phase of a round; and one
that is killed in the statistics before the first.

    python -m pytest tests/flower/test_secure_processes.py -m slow

What every device says is written down on its own disk before it is masked, and what the server unmasks beside its run,
so that both can be added up and compared.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest

from fairfold.config import Settings
from fairfold.flower.fleet.local_fleet import LocalFleet, make_local_fleet
from fairfold.flower.fleet.processes import Program, stop_on_exit
from fairfold.privacy.secure.keys import read_roster

pytestmark = pytest.mark.slow

KINDS = ("secure_keys", "secure_shares", "train", "secure_sign", "secure_reveal")
KILLED = dict(zip(KINDS, (8, 9, 10, 4, 5), strict=True))

CLIENT = """
import time
from pathlib import Path
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from fairfold.flower import make_client_app
from fairfold.privacy.secure.client import SecureClient

KILLED = {killed!r}
inner = make_client_app()
app = ClientApp()


def reply_to(message: Message, context: Context) -> Message:
    home, kind = Path(context.node_config["state"]).parent, message.metadata.message_type.split(".")[-1]
    invitation = message.content["fairfold"].get("secure", b"") if kind == "secure_keys" else b""
    if b"train" in invitation:
        home.joinpath("training").touch()
    due = kind == "statistics" or home.joinpath("training").exists()
    if due and KILLED.get(kind) == int(home.name) and not home.joinpath("here").exists():
        home.joinpath("here").touch()
        time.sleep(100_000)
    mask = SecureClient.mask

    def noted(device, words):
        session = device.session
        words.tofile(home / f"said-{session.purpose}-{session.round}-{device.identity.name}-{device.size}")
        return mask(device, words)

    SecureClient.mask = noted
    return inner(message, context)


for kind in ("capacity", "statistics", "numbering", "secure_keys", "secure_shares", "secure_sign", "secure_reveal"):
    app.query(kind)(reply_to)
app.train()(reply_to)
app.evaluate()(reply_to)
"""

SERVER = """

import json
from pathlib import Path

from fairfold.flower.secure_aggregation import SecureRound

finish = SecureRound.finish


def noted(summed):
    completed = finish(summed)
    session, server = summed.server.session, summed.server
    path = Path({folder!r}) / f"sum-{session.purpose}-{session.round}.json"
    totals = [of.tolist() for of in server.sums] if completed else []
    facts = {"sizes": session.layout.sizes, "lengths": session.layout.lengths, "survivors": server.survivors}
    path.write_text(json.dumps(facts | {"totals": totals}))
    return completed


SecureRound.finish = noted
"""


def trial_with(killed: dict[str, int], nodes: str, place: Path, smallest: int) -> LocalFleet:
    """A trial whose devices hang when they are asked some things, to be killed there."""
    settings = Settings(
        data={"kind": "synthetic", "users": 48, "items": 60, "interactions_per_user": 10},
        algorithm={"kind": "co_occurrence", "support": 1, "tune": False},
        run={"rounds": 2, "evaluate_every": 2},
        privacy={"level": "secure", "min_cohort": smallest},
    )
    local_fleet, data = make_local_fleet(settings, nodes, place / "trial")
    mine = place / "mine"
    mine.mkdir()
    (mine / "mortal_devices.py").write_text(CLIENT.replace("{killed!r}", repr(killed)))
    local_fleet.app, local_fleet.variables = "mortal_devices:app", {"PYTHONPATH": str(mine)}
    local_fleet.round_timeout = 180.0  # who is back before Flower notices that it died is waited for until then
    local_fleet.prepare(data)
    app = local_fleet.server.app / "fairfold_app" / "server_app.py"
    app.write_text(app.read_text() + SERVER.replace("{folder!r}", repr(str(place))))
    return local_fleet


def killing(local_fleet: LocalFleet, programs: dict[int, Program], killed: Iterable[int]) -> list[int]:
    """Kill every node that has come to the place where it is to end."""
    found = [number for number in killed if number in programs and (local_fleet.node(number) / "here").exists()]
    for number in found:
        programs.pop(number).kill()
    return found


def test_a_node_is_killed_in_every_phase(tmp_path: Path) -> None:
    local_fleet = trial_with(KILLED, "1x*4,4x*4,16x*4", tmp_path, 4)
    local_fleet.wait_for = 7  # those who are left
    with stop_on_exit(local_fleet.programs):
        local_fleet.start_server()
        local_fleet.enrol_all()
        assert len(read_roster(local_fleet.roster)) == 12
        nodes = {number: local_fleet.start_node(number) for number in range(12)}
        job = local_fleet.start_run("--wait-for", "12")
        deadline = time.monotonic() + 3_000
        while job.status() is None:
            killing(local_fleet, nodes, KILLED.values())
            assert time.monotonic() < deadline, job.tail(40)
            time.sleep(0.2)
    assert (local_fleet.run_folder / "result.json").exists(), job.tail(60)
    assert sorted(set(range(12)) - nodes.keys()) == sorted(KILLED.values())  # each was killed where it should be
    assert [updates for _, updates in local_fleet.server.completed_rounds()] == [9, 7]
    for purpose, number, survivors in (("statistics", 0, 12), ("train", 0, 9), ("train", 1, 7)):
        compare(
            local_fleet, json.loads((tmp_path / f"sum-{purpose}-{number}.json").read_text()), purpose, number, survivors
        )


def test_statistics_lost_by_a_kill_are_asked_for_again_when_the_node_is_back(tmp_path: Path) -> None:
    """Too few are left without it: nothing counts until it is there again, and nobody has to do anything."""
    local_fleet = trial_with({"statistics": 2}, "1x*5", tmp_path, 5)
    with stop_on_exit(local_fleet.programs):
        local_fleet.start_server()
        local_fleet.enrol_all()
        nodes = {number: local_fleet.start_node(number) for number in range(5)}
        job = local_fleet.start_run("--wait-for", "5")
        deadline, killed = time.monotonic() + 1_200, list[int]()
        while job.status() is None:
            for number in [] if killed else killing(local_fleet, nodes, [2]):
                killed.append(number)
                nodes[number] = local_fleet.start_node(number)
            assert time.monotonic() < deadline, job.tail(40)
            time.sleep(0.2)
    assert killed == [2]
    assert (local_fleet.run_folder / "result.json").exists(), job.tail(60)
    log = (local_fleet.run_folder / "run.log").read_text()
    assert "round 1: no usable update (the statistics before it are lost: " in log
    assert [updates for _, updates in local_fleet.server.completed_rounds()] == [5, 5]
    for purpose, number in (("statistics", 0), ("train", 0), ("train", 1)):
        compare(local_fleet, json.loads((tmp_path / f"sum-{purpose}-{number}.json").read_text()), purpose, number, 5)


def compare(local_fleet: LocalFleet, found: dict[str, Any], purpose: str, number: int, survivors: int) -> None:
    """The server's sums are the plain integer sums of what the survivors wrote down."""
    output = {
        path.name.split("-")[3]: (int(path.name.split("-")[4]), numpy.fromfile(path, dtype=numpy.uint32))
        for path in local_fleet.folder.glob(f"nodes/*/said-{purpose}-{number}-*")
    }
    assert len(found["survivors"]) == survivors
    sums = [numpy.zeros(length, dtype=numpy.uint32) for length in found["lengths"]]
    for name in found["survivors"]:
        size, words = output[str(name)]
        for segment in found["sizes"][size]:
            length = found["lengths"][segment]
            sums[segment] += words[:length]
            words = words[length:]
    for total, plain in zip(found["totals"], sums, strict=True):
        assert total == plain.tolist()
