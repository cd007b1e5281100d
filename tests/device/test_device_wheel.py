"""The small wheel: built from this repository, it enrols, trains and recommends without the rest of fairfold."""

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fairfold.flower.fleet.local_fleet import LocalFleet, make_local_fleet
from fairfold.flower.fleet.processes import stop_on_exit
from tests.support.settings import make_settings

SCRIPT = Path(__file__).parents[2] / "deploy" / "device_wheel.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that has the small wheel, and of others its two requirements alone."""
    folder = tmp_path_factory.mktemp("wheel")
    spec = importlib.util.spec_from_file_location("device_wheel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = script.build(folder / "dist")
    assert path.stat().st_size < 300_000
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder / "site")
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
    assert metadata.count("Requires-Dist") == 2
    for name in ("cryptography", "tomli_w", "cffi", "_cffi_backend"):
        origin = Path(str(importlib.import_module(name).__file__))  # wherever this Python has it
        found = origin.parent if origin.stem == "__init__" else origin
        os.symlink(found, folder / "site" / found.name)
    return os.environ | {"PYTHONPATH": str(folder / "site")}


def device(installed: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with nothing else of fairfold in reach."""
    command = [sys.executable, "-S", "-m", "fairfold.flower.fleet.device_command", *words]
    return subprocess.run(command, env=installed, capture_output=True, text=True, check=False, timeout=120)


def test_its_command_says_what_is_wrong(installed: dict[str, str], tmp_path: Path) -> None:
    assert "enrol" in device(installed, "--help").stdout
    done = device(installed, "recommend", "--folder", str(tmp_path))
    assert done.returncode == 2
    assert "node.toml" in done.stderr
    where = [sys.executable, "-S", "-c", "import fairfold.device.tasks as one; print(one.__file__)"]
    found = subprocess.run(where, env=installed, capture_output=True, text=True, check=True).stdout
    assert found.startswith(installed["PYTHONPATH"])


def test_what_is_imported_when_a_task_comes_is_there(installed: dict[str, str]) -> None:
    site = Path(installed["PYTHONPATH"])
    asked = set()
    for path in (site / "fairfold" / "device").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fairfold"):
                asked |= {f"import {node.module}", *(f"from {node.module} import {one.name}" for one in node.names)}
    assert len(asked) > 50
    program = "\n".join(sorted(asked))
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env=installed, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_enrols_trains_and_recommends(installed: dict[str, str], tmp_path: Path) -> None:
    few = {"name": "synthetic", "users": 4, "items": 200, "interactions_per_user": 20}
    fleet: LocalFleet
    fleet, data = make_local_fleet(make_settings(rounds=2, evaluate_every=2, data=few), "1x", tmp_path)
    fleet.prepare(data)
    with stop_on_exit(fleet.programs):
        fleet.start_server()
        token = str(fleet.server.invite(600.0, 4))
        home = tmp_path / "device"
        words = ["--server", f"127.0.0.1:{fleet.port}", "--data", str(fleet.node(0) / "train.csv"), "--capacity", "1x"]
        done = device(installed, "enrol", token, *words, "--folder", str(home))
        assert done.returncode == 0, done.stderr
        command = [sys.executable, "-S", "-m", "fairfold.flower.fleet.device_command", "start", "--folder", str(home)]
        node = subprocess.Popen(command, env=installed, stderr=subprocess.DEVNULL)
        try:
            job = fleet.start_run()
            assert job.wait(240) == 0
        finally:
            node.terminate()
            node.wait(20)
    rows = [line.split(",") for line in (fleet.node(0) / "train.csv").read_text().splitlines()[1:]]
    user = rows[0][0]
    done = device(installed, "recommend", "--folder", str(home), "--user", user)
    assert done.stdout.splitlines(), done.stderr
    assert not set(done.stdout.splitlines()) & {row[1] for row in rows if row[0] == user}
