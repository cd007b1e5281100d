"""The command as a person meets it."""

import csv
import errno
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from fairfold import atomic_io as files
from fairfold.cli import app
from fairfold.errors import CannotWrite
from tests.support.commands import works

runner = CliRunner()
SMALL = ["--rounds", "4", "--set", "data.users=40", "--set", "data.items=200", "--set", "fleet.clients_per_round=20",
         "--set", "data.interactions_per_user=20", "--set", "run.evaluate_every=2",
         "--set", "subspace.support=0"]  # fmt: skip


def test_train_leaves_a_folder_that_can_be_read(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = runner.invoke(app, ["train", *SMALL, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "by device size" in done.output
    assert "server's" in done.output
    assert str(out) in done.output.replace("\n", "")
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints", "metrics.csv", "model.safetensors", "result.json", "run.log", "settings.toml"
    ]  # fmt: skip
    assert tomllib.loads((out / "settings.toml").read_text())["data"]["users"] == 40
    rows = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    assert [row["round"] for row in rows if row["server"]] == ["2", "4"]
    groups = json.loads((out / "result.json").read_text())["groups"]
    assert all(0 < group["everybody"] < 1 for group in groups)
    assert all(f"{group['everybody']:.3f}" in done.output for group in groups)
    result = json.loads((out / "result.json").read_text())
    assert [group["capacity"] for group in result["groups"]] == ["1x", "4x", "16x"]
    assert [group["bytes_held"] for group in result["groups"]] == [6_400, 1_536, 384]
    with safe_open(out / "model.safetensors", "pt") as model:
        assert model.get_tensor("item.weight").shape == (200 * 8,)
        assert model.metadata()["round"] == "4"
    again = runner.invoke(app, ["train", str(out / "settings.toml"), "--out", str(tmp_path / "again")])
    assert again.exit_code == 0
    assert json.loads((tmp_path / "again" / "result.json").read_text())["groups"] == result["groups"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "model.factor=3"], "did you mean 'factors'"),
        (["--model", "neumff"], "did you mean 'neumf'"),
        (["--data", "ml100k"], "Did you mean one of: ml-100k?"),
        (["--data", "goodread-100"], "Did you mean one of: goodreads-100"),
        (["--set", "data.user=3"], "did you mean 'users'"),
        (["--set", "algorithms.ridge=3"], "did you mean 'algorithm'"),
        (["--set", "ridge=2"], "unknown key 'ridge' (did you mean 'algorithm.ridge'?)"),
        (["--set", "epochs=3"], "did you mean 'algorithm.local_epochs'"),
        (["--set", "datas.users=3"], "did you mean 'data'"),
        (["--set", "model.factors"], "TABLE.KEY=VALUE"),
        (["--set", "model.factors=many"], "model.factors"),
        (["--set", "run.rounds.first=1"], "run.rounds"),
        (["--capacities", "1x-0.3x"], "1x or more"),
        (["--rounds", "0"], "greater than or equal to 1"),
        (["--set", "algorithm.kind=closed_form", "--method", "fedhm"], "use 'gradient'"),
        (["--set", "algorithm.server_lr=nan"], "unknown key 'algorithm.server_lr'"),
        (["--set", "algorithm.kind=gradient", "--set", "algorithm.server_lr=nan"], "finite number"),
        (["--recipe", "ratings", "--set", "algorithm.server_lr=1"], "unknown key 'algorithm.server_lr'"),
        (["no-such-file.toml"], "Check the path"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["train", *arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Recipe: default (co_occurrence, 1x-4x-16x)"),
        (["--recipe", "paper", "--capacities", "1x-4x"], "Recipe: paper (gradient, 1x-4x)"),
        (["--recipe", "authors", "--capacities", "1x-4x"], "Recipe: authors (gradient, 1x-4x)"),
        (["--recipe", "fair"], "Recipe: fair (closed_form, 1x-4x-16x)"),
        (["--model", "neumf"], "Settings: the defaults (gradient, 1x-4x-16x)"),
        (["--method", "central"], "Settings: the defaults (central, 1x-4x-16x)"),
        (["--set", "algorithm.kind=closed_form"], "Settings: the defaults (closed_form, 1x-4x-16x)"),
        (["FILE"], "run.toml (gradient, 1x-2x)"),
    ],
)
def test_train_prints_where_its_settings_come_from(arguments: list[str], line: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('algorithm = { kind = "gradient" }\nfleet = { capacities = "1x-2x" }\n')
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    sizes = [argument for argument in SMALL if argument != "subspace.support=0"][:-1]
    done = runner.invoke(app, ["train", *given, *sizes, "--rounds", "1", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert line in done.output
    again = runner.invoke(app, ["train", "--resume", "--rounds", "2", "--out", str(tmp_path / "run")])
    assert f"Settings: of the run in {tmp_path / 'run'} ({line.partition('(')[2]}" in again.output


def test_show_settings_prints_where_each_value_comes_from(tmp_path: Path) -> None:
    def sources(*arguments: str) -> dict[str, tuple[str, str]]:
        lines = [
            line.split("│")[1:4] for line in works("train", "--show-settings", *arguments).splitlines() if "│" in line
        ]
        return {key.strip(): (value.strip(), source.strip()) for key, value, source in lines}

    ratings = sources("--recipe", "ratings", "--data", "ml-1m", "--rounds", "3", "--set", "model.factors=16")
    assert ratings["run.rounds"] == ("3", "command")
    assert ratings["model.factors"] == ("16", "command")
    assert ratings["data.resplit"] == ("true", "data set ml-1m")
    assert ratings["fleet.capacities"] == ("8x-16x", "recipe ratings")
    assert ratings["subspace.tail_share"] == ("0.125", "algorithm ratings")
    assert ratings["run.seed"] == ("0", "default")
    file = tmp_path / "run.toml"
    file.write_text('algorithm = "gradient"\nfleet = { capacities = "1x-2x" }\n')
    gradient = sources(str(file))
    assert gradient["algorithm.kind"] == ("gradient", f"file {file}")
    assert gradient["fleet.capacities"][1] == f"file {file}"


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    done = runner.invoke(app, ["train", str(tmp_path / "bad.toml")])
    assert done.exit_code == 2
    assert "bad.toml" in done.output.replace("\n", "")


def test_a_folder_with_content_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = runner.invoke(app, ["train", *SMALL, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_doctor_names_every_part() -> None:
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 0
    for part in ("fairfold", "torch", "native kernels", "GPU", "matplotlib", "triton"):
        assert part in done.output


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def disk_full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(CannotWrite, match=r"No space left.*3 bytes for this file"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "77"}])
def test_threads_that_wait_sleep_unless_somebody_says_otherwise(given: dict[str, str]) -> None:
    """As OpenMP says itself of what it found when torch loaded it."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    others = {name: value for name, value in os.environ.items() if name not in names}
    program = "import sys; from fairfold.cli import app; sys.argv[1:] = ['doctor']; app()"
    command = [sys.executable, "-c", program]
    environment = others | {"OMP_DISPLAY_ENV": "VERBOSE"} | given
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    displayed = dict(line.strip().split(" = ") for line in done.stderr.splitlines() if " = '" in line)
    if not displayed.keys() >= set(names):
        pytest.skip("torch without GNU's OpenMP")
    wanted = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"} | given
    assert {name: displayed[name].strip("'") for name in given or wanted} == {
        name: wanted[name] for name in given or wanted
    }
