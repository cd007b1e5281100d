"""The command as a person meets it."""

import csv
import errno
import json
import os
import tomllib
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from fairfold import files
from fairfold.cli import app
from fairfold.errors import CannotWrite

runner = CliRunner()
SMALL = ["--rounds", "4", "--set", "world.users=40", "--set", "world.items=200", "--set", "clients_per_round=20",
         "--set", "world.interactions_per_user=20", "--set", "evaluate_every=2", "--set", "support=0"]  # fmt: skip


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
    assert tomllib.loads((out / "settings.toml").read_text())["world"]["users"] == 40
    rows = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    assert [row["round"] for row in rows if row["server"]] == ["2", "4"]
    groups = json.loads((out / "result.json").read_text())["groups"]
    assert all(0 < group["everybody"] < 1 for group in groups)
    assert all(f"{group['everybody']:.3f}" in done.output for group in groups)
    result = json.loads((out / "result.json").read_text())
    assert [group["capacity"] for group in result["groups"]] == ["1x", "4x", "16x"]
    assert [group["bytes_held"] for group in result["groups"]] == [13_824, 4_224, 1_792]  # with the Gram matrix
    with safe_open(out / "model.safetensors", "pt") as model:
        assert model.get_tensor("item.weight").shape == (200 * 16,)
        assert model.metadata()["round"] == "4"
    again = runner.invoke(app, ["train", str(out / "settings.toml"), "--out", str(tmp_path / "again")])
    assert again.exit_code == 0
    assert json.loads((tmp_path / "again" / "result.json").read_text())["groups"] == result["groups"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "factor=3"], "did you mean 'factors'"),
        (["--set", "world.user=3"], "did you mean 'users'"),
        (["--set", "factors"], "KEY=VALUE"),
        (["--set", "factors=many"], "factors"),
        (["--set", "rounds.first=1"], "rounds"),
        (["--capacities", "1x-0.3x"], "1x or more"),
        (["--rounds", "0"], "greater than or equal to 1"),
        (["--set", "method=fedhm"], "solver"),
        (["--set", "server_step=nan"], "server_step"),
        (["--set", "server_optimiser=sgd"], "server_optimiser with solver='least_squares'"),
        (["--set", "server_optimiser=sgd", "--set", "server_step=1"], "leave them out"),
        (["--recipe", "ratings", "--set", "server_step=1"], "server_step with solver='least_squares'"),
        (["no-such-file.toml"], "Check the path"),
    ],
)
def test_bad_arguments_are_told_before_any_work(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["train", *arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
    assert not (tmp_path / "run").exists()


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
