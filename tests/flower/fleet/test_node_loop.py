"""A node's process: retries, polls and its worker."""

import base64
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fairfold import atomic_io as files
from fairfold.errors import InvalidState
from fairfold.flower.fleet import node_loop
from fairfold.flower.fleet.connection import (
    RefusedByServer,
)
from fairfold.flower.fleet.credentials import (
    make_node_key,
)
from fairfold.flower.fleet.node import NodeFolder
from tests.vectors.make import FOLDER

EXCHANGE = json.loads((FOLDER / "transport.json").read_text())["exchange"]
PULLED = base64.b64decode(EXCHANGE["pull-messages"])


class FakeConnection:
    """A server that does, in turn, what the test says; then the device is asked to end."""

    def __init__(self, *turns: object) -> None:
        self.turns, self.calls = list(turns), list[str]()

    def _turn(self, name: str) -> Any:
        self.calls.append(name)
        if not self.turns:
            raise KeyboardInterrupt
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn

    heartbeat_interval, poll_interval = 30.0, 0.0

    def activate(self) -> Any:
        return self._turn("activate")

    def send_heartbeat(self, _node: int) -> Any:
        return self._turn("heartbeat")

    def pull(self, _node: int) -> Any:
        return self._turn("pull")

    def call(self, name: str, body: bytes) -> bytes:
        assert node_loop.DIED.encode() in body
        self.calls.append(name)
        return b""

    def deactivate(self, _node: int) -> None:
        self.calls.append("deactivate")

    def close(self) -> None:
        self.calls.append("close")


class FakeWorker:
    """A worker that says, in turn, what the test says."""

    events: ClassVar[list[dict[str, Any]]] = []
    given: ClassVar[list[bytes]] = []

    def __init__(self, _folder: Path) -> None:
        self.message: bytes | None = None
        self.deadline, self.last_used = float("inf"), time.monotonic()

    def submit(self, message: bytes) -> None:
        self.message = message
        self.given.append(message)

    def poll(self, _seconds: float) -> list[dict[str, Any]]:
        facts = self.events.pop(0)
        if facts.get("done"):
            self.message = None
        return [facts]

    def end(self) -> None:
        self.given.append(b"ended")


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("fairfold.flower.fleet.node_loop.time.sleep", found.append)
    monkeypatch.setattr("fairfold.flower.fleet.node_loop.random.uniform", lambda _low, _high: 1.0)
    monkeypatch.setattr(node_loop, "WorkerProcess", FakeWorker)
    FakeWorker.events, FakeWorker.given = [], []
    return found


def run_node(
    folder: Path, connected: FakeConnection, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], dict[str, Any]]:
    node = NodeFolder(folder, "localhost:9", "mine.csv", "1x", app="mine:app")  # of which a worker takes all messages
    if not node.key.exists():
        make_node_key(node.key)
    shown: list[str] = []
    monkeypatch.setattr(node_loop, "NodeConnection", lambda *_: connected)
    with pytest.raises(KeyboardInterrupt):
        node_loop.NodeLoop(node, shown.append).run()
    assert connected.calls[-1] == "close"
    return shown, json.loads((folder / "status.json").read_text())


def test_a_device_retries_with_growing_pauses_and_shows_a_message_once(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    early, unknown = RefusedByServer("early", "too early"), RefusedByServer("unregistered", "unregistered")
    gone = RefusedByServer("unreachable", "gone")
    connected = FakeConnection(early, early, early, *[unknown] * 9, 7, True, gone, gone, gone, gone, True, None)
    shown, status = run_node(tmp_path, connected, monkeypatch)
    assert shown == [
        "too early",
        "unregistered",
        "connected to localhost:9 as node 7",
        "gone",
        "connected again",
        "stopped",
    ]
    assert waited[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert waited[11:16] == [node_loop.MAX_RETRY_SECONDS, 1.0, 2.0, 4.0, 8.0]
    assert connected.calls.count("activate") == 13, "a connected that broke is no reason to come in anew"
    assert connected.calls[-2:] == ["deactivate", "close"]
    assert (status["state"], status["node"]) == ("stopped", "7")


def test_a_device_that_the_server_has_lost_comes_in_again(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = FakeConnection(7, False, 8, RefusedByServer("lost", "who?"), 9)
    run_node(tmp_path, connected, monkeypatch)
    assert connected.calls == [
        "activate",
        "heartbeat",
        "activate",
        "heartbeat",
        "activate",
        "heartbeat",
        "deactivate",
        "close",
    ]


def test_a_worker_gets_messages_and_its_death_is_reported_to_the_server_once(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWorker.events = [
        {"kind": "train", "round": "3", "deadline": 1e12}, {"done": True, "seconds": 2.0, "peak": 5, "problem": ""},
        {"died": -9}, {"died": 1},
    ]  # fmt: skip
    connected = FakeConnection(7, True, b"one", PULLED, b"no message")
    shown, status = run_node(tmp_path, connected, monkeypatch)
    assert FakeWorker.given == [b"one", PULLED, b"ended", b"no message", b"ended"]
    assert (status["replies"], status["failures"]) == (1, 2)
    assert connected.calls.count("push-messages") == 1
    assert "works on train of round 3" in shown


def test_a_device_that_was_killed_at_work_replies_with_an_error_when_it_is_back(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and before it asks for more: nobody waits for an answer that nobody works on."""
    FakeWorker.events = [{"kind": "train", "round": "3", "deadline": 1e12}]
    poll = FakeWorker.poll

    def killed(self: FakeWorker, seconds: float) -> list[dict[str, Any]]:
        if not FakeWorker.events:
            raise KeyboardInterrupt
        return poll(self, seconds)

    monkeypatch.setattr(FakeWorker, "poll", killed)
    run_node(tmp_path, FakeConnection(7, True, PULLED), monkeypatch)
    assert (tmp_path / node_loop.OPEN_MESSAGE).read_bytes() == PULLED
    FakeWorker.events, FakeWorker.given = [{"done": True, "problem": ""}], []
    connected = FakeConnection(RefusedByServer("early", "too early"), 7, True, b"two")
    shown, status = run_node(tmp_path, connected, monkeypatch)
    assert connected.calls.index("push-messages") < connected.calls.index("pull")
    assert FakeWorker.given == [b"two", b"ended"], "a refusal needs no worker"
    assert "ended at work" in " ".join(shown)
    assert status["replies"] == 1
    assert not (tmp_path / node_loop.OPEN_MESSAGE).exists()
    run_node(tmp_path, FakeConnection(7, True), monkeypatch)
    assert FakeWorker.given[2:] == []


def test_a_worker_that_hangs_or_has_nothing_to_do_is_ended(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWorker.events = [{"deadline": 0.0}]
    monkeypatch.setattr(FakeWorker, "deadline", property(lambda _: 0.0, lambda *_: None), raising=False)
    shown, status = run_node(tmp_path, FakeConnection(7, True, b"one", None), monkeypatch)
    assert "no reply to a message in its time" in " ".join(shown)
    assert status["failures"] == 1
    assert FakeWorker.given[-1] == b"ended"


def test_a_folder_has_one_device(tmp_path: Path) -> None:
    with files.locked(tmp_path):
        node = NodeFolder(tmp_path, "localhost:9", "mine.csv", "1x")
        assert node.running()
        with pytest.raises(InvalidState, match="is running"):
            node_loop.NodeLoop(node, lambda _: None).run()
    assert not node.running()
