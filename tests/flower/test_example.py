"""The example is a Flower app: small, by Flower's conventions, and it learns in a simulation of a hundred nodes."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fairfold.backends.batched import batched
from fairfold.data.synthetic import SyntheticDataset
from fairfold.federation.federation import Federation, number_items
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.federation.updates import PublicStatistics
from fairfold.flower.fleet.processes import (
    OFFLINE,
    Program,
    find_command,
    free_ports,
    search_path,
    stop_on_exit,
    wait_for_port,
)
from fairfold.flower.grid import InProcessGrid
from fairfold.runs.loaded import with_device_data
from fairfold.typing import Weights
from tests.support.settings import make_settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


def test_each_side_is_under_forty_lines_and_light() -> None:
    for name in ("client_app.py", "server_app.py"):
        text = (EXAMPLE / "fairfold_example" / name).read_text()
        ast.parse(text)
        assert len(text.splitlines()) < 40
    program = (
        "import sys; import fairfold_example.client_app;"
        "heavy = {'torch', 'polars', 'pydantic', 'safetensors'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], cwd=EXAMPLE, check=True)


def test_a_device_trains_without_the_engine_that_reads_data_sets() -> None:
    script = "import sys, fairfold.flower.client_tasks; assert 'polars' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both apps as they are, in one process."""
    from flwr.app import Context, RecordDict

    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("HOME", str(tmp_path))
    from fairfold_example import client_app, server_app  # type: ignore[import-not-found]

    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"num-rounds": 3, "num-items": 300, "folder": str(tmp_path / "run")}
    grid = InProcessGrid(client_app.app, [{"partition-id": number, "num-partitions": 8} for number in range(8)])
    server_app.main(grid, Context(1, 1, {}, RecordDict(), config))
    before, after = (float(value) for value in re.findall(r"at the \w+: (0\.\d+)", capsys.readouterr().out))
    assert after > before
    assert len(list((tmp_path / ".local/state/fairfold").iterdir())) == 8


@pytest.mark.slow
def test_flwr_runs_it_with_a_hundred_virtual_nodes(tmp_path: Path) -> None:
    app = tmp_path / "app"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    (port,) = free_ports(1)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    environment = OFFLINE | {"FLWR_HOME": str(home), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [
        find_command("flower-superlink"),
        "--insecure",
        "--simulation",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with stop_on_exit([]) as programs:
        programs.append(Program("superlink", command, tmp_path / "superlink.log", environment))
        wait_for_port(port, programs[0])
        nodes = "num-supernodes=100 client-resources-num-cpus=1 init-args-num-cpus=1"
        folder = tmp_path / "run"
        done = subprocess.run(
            [find_command("flwr"), "run", str(app), "here", "--stream", "--federation-config", nodes,
             "-c", f'num-rounds=5 folder="{folder}"'],
            capture_output=True, text=True, timeout=1200, check=False,
            env=os.environ | environment | {"PATH": search_path()},
        )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    before, after = (float(value) for value in re.findall(r"at the \w+: (0\.\d+)", output))
    assert after > before
    lines = (folder / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines[1:]] == ["100"] * 5
    # The simulator's numbers; sums of other orders differ in their last digits, and rounds amplify that. Which of two
    # pairs of items that are equally strong is listed depends on these.
    found, expected = load_file(folder / "model.safetensors"), simulated(rounds=5, nodes=100)
    assert {name: vector.shape for name, vector in found.items()} == {name: of.shape for name, of in expected.items()}
    for name in ("rows", "neighbors"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=5e-4)


def simulated(rounds: int, nodes: int) -> Weights:
    """What the example's settings, world and sizes come to in the simulator, from the strategy's own start."""
    settings = with_device_data(make_settings(capacities="1x-4x-16x-64x", rounds=rounds, clients_per_round=None), 2000)
    world = Federation.of(settings, number_items(SyntheticDataset(users=400, items=2000).dataset(), settings))
    fleet = replace(world.sampler, size=(torch.arange(400) * nodes // 400) % 4)
    state, alone = world.initial(), Plan.of(settings, PublicStatistics(2000, statistics=world.plan.public.statistics))
    state = replace(state, full=alone.initial()[0].full)
    for _ in range(rounds):
        state = run_round(state, fleet, world.clients, Rejections(), batched)
    return state.full
