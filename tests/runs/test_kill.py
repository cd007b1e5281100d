"""Runs killed with SIGKILL end, once resumed, with the numbers of runs that were left alone."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairfold.runs import checkpoint
from fairfold.runs.folder import read_result

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
FAIRFOLD = [sys.executable, "-c", "from fairfold.cli import app; app()"]
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


def command_to(out: Path) -> list[str]:
    """A run of the command that takes long enough to be ended."""
    sizes = ["data.users=60", "data.items=400", "data.interactions_per_user=20", "fleet.clients_per_round=30"]
    changes = [part for size in [*sizes, "fleet.faults.nan=0.1"] for part in ("--set", size)]
    return [*FAIRFOLD, "train", "--rounds", "60", *changes, "--out", str(out)]


def ended_by(signal_number: int, out: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Its exit status and what it said, sent a signal once it has a checkpoint."""
    with subprocess.Popen(command_to(out), env=environment, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list((out / "checkpoints").glob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal_number)
        output, _ = process.communicate(timeout=200)
    assert not (out / "result.json").exists(), "it ended before it could be killed"
    return process.returncode, output


def test_the_command_asked_to_end_says_how_to_go_on(tmp_path: Path) -> None:
    status, output = ended_by(signal.SIGTERM, tmp_path / "run", os.environ | {"OMP_NUM_THREADS": "1"})
    assert status == 143
    assert f"Go on with: fairfold train --out {tmp_path / 'run'} --resume" in output


def test_the_command_killed_and_resumed(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command_to(tmp_path / "unbroken"), env=environment, check=True, capture_output=True)
    ended_by(signal.SIGKILL, tmp_path / "killed", environment)
    again = [*FAIRFOLD, "train", "--out", str(tmp_path / "killed"), "--resume"]
    done = subprocess.run(again, env=environment, check=True, capture_output=True, text=True)
    assert "Resuming after round" in done.stdout
    first, second = tmp_path / "unbroken", tmp_path / "killed"
    for name in ("model.safetensors", "settings.toml"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    tensors = [(path / "checkpoints" / "round-00000060.safetensors").read_bytes() for path in (first, second)]
    assert tensors[0] == tensors[1]
    results = [read_result(path) | {"seconds": 0} for path in (first, second)]
    assert results[0] == results[1]
    assert checkpoint.load_newest(second / "checkpoints").progress.rejections.counts["NaN or infinity"] > 0
    lines = (second / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [str(number) for number in range(1, 61)]
