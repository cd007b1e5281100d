"""Faults against real programs on loopback: the run ends well, no wrong value enters, the log says who and why.

One federation serves all kinds of bad clients at once: each node fails in its own way, and the model must come out as
if only the good ones had taken part.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fairfold.flower.client_store import ClientStore
from fairfold.flower.fleet.local_fleet import LocalFleet, make_local_fleet
from fairfold.flower.fleet.processes import Program, stop_on_exit
from fairfold.flower.strategy import FairStrategy
from fairfold.runs import checkpoint
from tests.support.settings import make_settings

pytestmark = pytest.mark.slow

WORLD = {"users": 24, "items": 80, "interactions_per_user": 12}

BAD_CLIENT = """
import errno, os, random, signal, threading, time
from pathlib import Path
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp
from fairfold.flower import make_client_app

KINDS = {kinds!r}
inner = make_client_app()
app = ClientApp()


def kind_of(context: Context) -> str:
    return KINDS[int(Path(context.node_config["state"]).parent.name)]


@app.query("capacity")
def capacity(message: Message, context: Context) -> Message:
    return inner(message, context)


@app.query("statistics")
def statistics(message: Message, context: Context) -> Message:
    return inner(message, context)


@app.query("numbering")
def numbering(message: Message, context: Context) -> Message:
    return inner(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return inner(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    kind = kind_of(context)
    Path(context.node_config["state"]).parent.joinpath("training").touch()
    if kind == "raises":
        raise RuntimeError("no electricity")
    if kind == "hangs":
        time.sleep(100_000)
    if kind == "slow":
        time.sleep(15)
    if kind == "disk full":
        from fairfold import atomic_io

        class Full(atomic_io.Disk):
            def write(self, descriptor, piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        atomic_io.disk = Full()
    if kind == "mortal" and message.metadata.group_id in "23":
        Path(context.node_config["state"]).parent.joinpath("killed-in-" + message.metadata.group_id).touch()
        moment = random.Random(f"{context.node_config['state']} {message.metadata.group_id}").uniform(0, 0.5)
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    reply = inner(message, context)
    if kind == "mortal" and message.metadata.group_id in "23":
        time.sleep(0.5)  # whenever the end comes, it comes
    if kind == "killed" and message.metadata.group_id == "2":
        os.kill(os.getpid(), signal.SIGKILL)  # what it would remember is on its disk, and nobody has received it
    arrays, facts = reply.content["arrays"], reply.content["fairfold"]
    name = next(iter(arrays))
    values = arrays[name].numpy().copy()
    if kind == "NaN":
        arrays[name] = Array(values * float("nan"))
    elif kind == "wrong size":
        arrays[name] = Array(values[:-1].copy())
    elif kind == "another update":
        facts["update_id"] = "0" * 16
    elif kind == "another version":
        facts["version"] = 99
    return reply
"""

REASONS = {
    "raises": "the device failed",
    "NaN": "NaN or infinity",
    "wrong size": "wrong size",
    "another update": "a reply to another round",
    "another version": "another version of the protocol",
    "disk full": "the device failed",
}


def made(folder: Path, kinds: list[str], rounds: int, timeout: float, wait_for: int = 0, **changes: Any) -> LocalFleet:
    """A federation whose nodes behave as their kinds say; all hold the full model."""
    keys: dict[str, Any] = {"rounds": rounds, "evaluate_every": 100, "data": WORLD, "factors": 4}
    settings = make_settings(**keys | (changes or {"algorithm": "closed_form", "server_optimizer": "sgd"}))
    local_fleet, data = make_local_fleet(
        settings, ",".join(["1x", "2x"][number % 2] for number in range(len(kinds))), folder
    )
    local_fleet.round_timeout, local_fleet.wait_for = timeout, wait_for
    local_fleet.prepare(data)
    (folder / "bad_client.py").write_text(BAD_CLIENT.replace("{kinds!r}", repr(kinds)))
    local_fleet.app, local_fleet.variables = "bad_client:app", {"PYTHONPATH": str(folder)}
    return local_fleet


def started(local_fleet: LocalFleet, *options: str) -> Program:
    """Everything is started; returns the run."""
    local_fleet.start_server()
    for number in range(len(local_fleet.capacities)):
        local_fleet.enrol(number)
    for number in range(len(local_fleet.capacities)):
        local_fleet.start_node(number)
    return local_fleet.start_run(*options)


def wait_for(condition: Callable[[], bool], job: Program, seconds: float = 1800.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert job.status() is None, job.tail(40)
        assert time.monotonic() < deadline, job.tail(40)
        time.sleep(0.2)


def nothing_private(local_fleet: LocalFleet) -> None:
    """What the server has written, and what its programs and Flower's said, holds no user's vector and no secret."""
    seen = [path.read_bytes() for path in local_fleet.run_folder.rglob("*") if path.is_file()]
    seen += [(local_fleet.folder / "logs" / f"{name}.log").read_bytes() for name in ("server", "run")]
    looked = 0
    for number in range(len(local_fleet.capacities)):
        kept = ClientStore(local_fleet.node(number) / "state").load()
        known = [vectors for vectors in kept.acknowledged.local_state.values() if vectors.any()]
        rows = [row for vectors in known for row in (vectors if vectors.shape[-1] > 1 else [vectors])]  # marks together
        private = [row.numpy().tobytes() for row in rows] + [f"{kept.secret:x}".encode(), str(kept.secret).encode()]
        assert not any(secret in content for secret in private for content in seen), f"of node {number}"
        looked += len(rows)
    assert looked
    assert len(seen) > 5


def ended(local_fleet: LocalFleet, job: Program, seconds: float = 3600.0) -> dict[str, torch.Tensor]:
    """The model, once the run has ended well and nothing private is where the server can see it."""
    assert job.wait(seconds) is not None, job.tail(40)
    assert (local_fleet.run_folder / "result.json").exists(), job.tail(60)
    model = load_file(local_fleet.run_folder / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in model.values())
    nothing_private(local_fleet)
    return model


def log_of(local_fleet: LocalFleet) -> str:
    return (local_fleet.run_folder / "run.log").read_text()


def test_clients_that_fail_in_every_way_are_left_out_by_name(tmp_path: Path) -> None:
    kinds = ["good", "good", *REASONS]
    local_fleet = made(tmp_path / "trial", kinds, rounds=2, timeout=1800)
    with stop_on_exit(local_fleet.programs):
        model = ended(local_fleet, started(local_fleet))
    counts = json.loads((local_fleet.run_folder / "result.json").read_text())["rejections"]
    expected: dict[str, int] = {}
    for reason in REASONS.values():
        expected[reason] = expected.get(reason, 0) + 2
    assert {reason: counts[reason] for reason in expected} == expected
    assert [updates for _, updates in local_fleet.server.completed_rounds()] == [2, 2]
    log = log_of(local_fleet)
    assert "no electricity" in log
    for reason in REASONS.values():
        assert f"left out: {reason}" in log
    # What came out is what the two good nodes alone make of it.
    alone = made(tmp_path / "alone", ["good", "good"], rounds=2, timeout=1800)
    for number in range(2):  # the same files: users of the first two nodes of eight
        for part in ("train.csv", "test.csv"):
            (alone.node(number) / part).write_bytes((local_fleet.node(number) / part).read_bytes())
    with stop_on_exit(alone.programs):
        expected_model = ended(alone, started(alone))
    for name, tensor in expected_model.items():
        torch.testing.assert_close(model[name], tensor, rtol=0, atol=0)
    assert "CannotWrite on the device" in log
    # The device whose disk was full has its name, and nothing half-written; others have kept what they learned.
    kept = (local_fleet.node(kinds.index("disk full")) / "state").glob("*")
    assert [path.name for path in kept] == ["name"]
    assert ClientStore(local_fleet.node(0) / "state").load().acknowledged.update_id


def test_a_client_that_hangs_is_left_out_when_the_time_is_over(tmp_path: Path) -> None:
    local_fleet = made(tmp_path / "trial", ["good", "hangs"], rounds=1, timeout=240)
    with stop_on_exit(local_fleet.programs):
        ended(local_fleet, started(local_fleet))
    assert local_fleet.server.completed_rounds() == [(1, 1)]
    assert "left out: no update in time" in log_of(local_fleet)


def test_a_node_killed_while_it_trains_and_one_that_joins_late(tmp_path: Path) -> None:
    """The killed one is left out, and comes back with its key and its vectors; the late one joins between rounds."""
    local_fleet = made(tmp_path / "trial", ["good", "slow", "good"], rounds=6, timeout=1800, wait_for=1)
    with stop_on_exit(local_fleet.programs):
        local_fleet.start_server()
        for number in range(3):
            local_fleet.enrol(number)
        nodes = [local_fleet.start_node(number) for number in range(2)]
        job = local_fleet.start_run("--wait-for", "2")  # the third comes late
        wait_for((local_fleet.node(1) / "training").exists, job)
        nodes[1].kill()
        wait_for(lambda: len(local_fleet.server.completed_rounds()) >= 1, job)
        assert local_fleet.server.completed_rounds()[0] == (1, 1)
        local_fleet.start_node(2)
        again = local_fleet.start_node(1)  # it waits while the server still believes the first one alive
        deadline = time.monotonic() + 1800
        while len({node["node"] for node in local_fleet.participants() if node["rounds"]}) < 3:
            assert again.status() is None, again.tail()
            assert time.monotonic() < deadline, log_of(local_fleet)
            if job.status() is not None:
                break
            time.sleep(0.5)
        ended(local_fleet, job)
    took_part = local_fleet.participants()
    assert len(took_part) == 3, "the same key is the same node"
    assert all(node["rounds"] >= 1 for node in took_part), log_of(local_fleet)
    assert "left out" in log_of(local_fleet)


def test_a_server_killed_in_a_round_loses_that_round_and_no_other(tmp_path: Path) -> None:
    local_fleet = made(tmp_path / "trial", ["good", "slow"], rounds=4, timeout=1800)
    with stop_on_exit(local_fleet.programs):
        job = started(local_fleet)
        wait_for(lambda: len(local_fleet.server.completed_rounds()) >= 2, job)
        (local_fleet.node(1) / "training").unlink(missing_ok=True)
        wait_for((local_fleet.node(1) / "training").exists, job)  # a round is open
        done = len(local_fleet.server.completed_rounds())
        local_fleet.programs[0].kill()  # the server, its SuperLink, and the server app that runs there
        before = checkpoint.load_newest(local_fleet.run_folder / "checkpoints").progress
        assert before.state.round_number == done
        with stop_on_exit(local_fleet.programs[1:]):
            pass
        local_fleet.programs.clear()
        data_items = before.state.full["item.weight"].numel() // local_fleet.settings.model.factors
        # In this process, to look; then by a new run of the app.
        resumed = FairStrategy(local_fleet.settings, data_items, folder=local_fleet.run_folder, resume=True)
        assert resumed.progress.state.round_number == done
        ended(local_fleet, started(local_fleet, "--resume"))
    assert [number for number, _ in local_fleet.server.completed_rounds()] == [1, 2, 3, 4]
    assert log_of(local_fleet).count("updates used") == 4
    assert ClientStore(local_fleet.node(0) / "state").load().acknowledged.update_id
