"""Runs killed with SIGKILL end, once resumed, with the numbers of runs that were left alone."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairfold.runs import checkpoint
from fairfold.runs.read import read_result

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills by forking")


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """In memory where there is such a place: SIGKILL spares what the system has taken, so nothing depends on a disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        yield Path(folder)


def kill_and_resume(folder: Path, random_kills: int) -> dict[str, int]:
    """How often runs were killed, in which way; every one of them ended as the unbroken one, or this fails."""
    command = [sys.executable, "-W", "error", "-m", "tests.runs.killing", str(folder), str(random_kills)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, int] = json.loads(done.stdout)
    # Four checkpoints of two files, each created, written, flushed, renamed, and its folder flushed.
    assert report["before"] >= 4 * 2 * 5
    assert report["within"] >= 4 * 6
    return report


def test_killed_at_every_call_that_reaches_the_disk(quick_folder: Path) -> None:
    assert kill_and_resume(quick_folder, 6)["random"] == 6


@pytest.mark.slow
def test_killed_at_every_call_on_a_disk_and_at_many_moments(tmp_path: Path) -> None:
    assert kill_and_resume(tmp_path, 60)["random"] == 60


def test_the_command_killed_and_resumed(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from fairfold.cli import app; app()", "train", "--rounds", "160"]
    command += [
        "--set",
        "data.users=60",
        "--set",
        "data.items=400",
        "--set",
        "data.interactions_per_user=20",
    ]
    command += ["--set", "fleet.clients_per_round=30", "--set", "fleet.faults.nan=0.1", "--out"]
    subprocess.run([*command, str(tmp_path / "unbroken")], env=environment, check=True, capture_output=True)
    with subprocess.Popen([*command, str(tmp_path / "killed")], env=environment, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "killed" / "checkpoints").glob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert not (tmp_path / "killed" / "result.json").exists(), "it ended before it could be killed"
    again = [*command[:3], "train", "--out", str(tmp_path / "killed"), "--resume"]
    done = subprocess.run(again, env=environment, check=True, capture_output=True, text=True)
    assert "Going on after round" in done.stdout
    first, second = tmp_path / "unbroken", tmp_path / "killed"
    for name in ("model.safetensors", "settings.toml"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    tensors = [(path / "checkpoints" / "round-00000160.safetensors").read_bytes() for path in (first, second)]
    assert tensors[0] == tensors[1]
    results = [read_result(path) | {"seconds": 0} for path in (first, second)]
    assert results[0] == results[1]
    assert checkpoint.require(second / "checkpoints").progress.rejections.counts["NaN or infinity"] > 0
    lines = (second / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [str(number) for number in range(1, 161)]
