"""A short walk over the points at which runs are killed, refused or lose power; ``make test-faults`` takes them all."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.disk import MKDIR, OPEN, RENAME, SYNC, UNLINK, WRITE, Call, Disk, Tree

ROOT = Path(__file__).parents[2]
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
STEPS = {"default": 29, "tables": 41, "paper": 31, "images": 37, "server": 61, "device": 11}
"""One point in so many, coprime with the calls of a round: all kinds of calls have their turn."""


def after(*calls: Call) -> Disk:
    disk = Disk()
    for call in calls:
        disk.follow(call)
    return disk


def call(kind: int, first: str, second: str = "", number: int = 0, data: bytes = b"") -> Call:
    return Call(kind, number, first, second, data)


OLD = (call(OPEN, "a", number=CREATE), call(WRITE, "a", data=b"old"), call(SYNC, "a"), call(SYNC, ""))
NEW = (call(OPEN, "t", number=CREATE), call(WRITE, "t", data=b"newer"))
FLUSHED, RENAMED, SAFE = call(SYNC, "t"), call(RENAME, "t", "a"), call(SYNC, "")


def losses(disk: Disk, how: str, times: int = 1) -> list[Tree]:
    return [disk.lost_power(how, random.Random(seed)) for seed in range(times)]


def test_the_model_of_a_disk_keeps_what_was_flushed_and_nothing_else() -> None:
    assert losses(after(*OLD[:2]), "all lost") == [{}]
    assert losses(after(*OLD), "all lost") == [{"a": b"old"}]
    assert losses(after(*OLD, *NEW, RENAMED), "names kept") == [{"a": b""}], "a name without its content"
    whole = after(*OLD, *NEW, FLUSHED, RENAMED)
    assert whole.killed() == {"a": b"newer"}
    assert losses(whole, "all lost") == [{"a": b"old"}]
    assert {tree["a"] for tree in losses(whole, "some lost", 40)} == {b"old", b"newer"}
    assert losses(after(*OLD, *NEW, FLUSHED, RENAMED, SAFE), "all lost") == [{"a": b"newer"}]
    below = after(call(MKDIR, "f"), call(OPEN, "f/b", number=CREATE), call(SYNC, "f/b"), call(SYNC, "f"))
    assert losses(below, "all lost") == [{}], "a folder whose own name was not flushed"
    assert losses(after(*OLD, call(UNLINK, "a")), "all lost") == [{"a": b"old"}]


def test_the_model_of_a_disk_tears_what_was_appended() -> None:
    appended = after(*OLD, call(WRITE, "a", number=3, data=b"1234"), call(WRITE, "a", number=7, data=b"5678"))
    found = {tree["a"] for tree in losses(appended, "some lost", 200)}
    assert {b"old", b"old1234", b"old12345678", b"old\0\0\0\0005678"} < found
    assert any(content is not None and 3 < len(content) < 7 for content in found)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="preloads a library that is built")
def test_a_walk_over_some_points() -> None:
    kinds = [f"{kind}:{step}" for kind, step in STEPS.items()]
    command = [sys.executable, "tests/faults/walk.py", *kinds, "--losses", "1", "--kills", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    *found, total = map(json.loads, done.stdout.splitlines())
    assert [one["kind"] for one in found] == list(STEPS)
    assert total["failed"] == 0
    assert {"killed", "torn", "broken once", "killed at random", "power lost, all lost"} <= total["tried"].keys()
