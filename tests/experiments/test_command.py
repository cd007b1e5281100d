"""``python -m experiments`` as a person meets it."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from tests.support.experiments import SMALL, write

run = CliRunner()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FAIRFOLD_DATA", raising=False)


def test_an_experiment_of_ones_own(tmp_path: Path) -> None:
    arguments = [write(tmp_path), "--seeds", "1", "--jobs", "1", "--out", str(tmp_path / "out")]
    first = run.invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "0 cells kept, 4 to run" in first.output
    assert "[4/4]" in first.output
    assert "N/A" in first.output
    assert "popularity" in first.output
    assert (tmp_path / "out" / "small" / "results.html").is_file()
    again = run.invoke(app, arguments)
    assert "4 cells kept, 0 to run" in again.output
    found = run.invoke(app, [*arguments, "--search"])
    assert "local_lr 0.001" in found.output
    assert (tmp_path / "out" / "small" / "search.csv").is_file()


def test_the_list_names_all() -> None:
    listed = run.invoke(app, ["--list"])
    assert listed.exit_code == 0
    for name in ("ranking", "ratings", "memory", "beyond", "python -m experiments all", "python -m experiments ours"):
        assert name in listed.output


def test_a_group_runs_its_own_experiments_and_has_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"ours": [write(tmp_path), write(tmp_path, name="other")]}
    monkeypatch.setattr("experiments.experiment.named", groups.__getitem__)
    out = tmp_path / "out"
    shown = run.invoke(app, ["ours", "--show", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert (out / "ours.html").is_file()
    assert sorted(folder.name for folder in out.iterdir() if folder.is_dir()) == ["other", "small"]


def test_bad_input(tmp_path: Path) -> None:
    assert run.invoke(app, []).exit_code == 2
    unknown = run.invoke(app, ["rating"])
    assert unknown.exit_code == 2
    assert "did you mean 'ratings'" in unknown.output
    text = re.sub(r"^data = .*$", 'data.name = "amazonproducts-100"', SMALL, flags=re.MULTILINE)
    missing = run.invoke(app, [write(tmp_path, text), "--jobs", "1", "--out", str(tmp_path / "out")])
    assert missing.exit_code == 2
    assert "train.txt, test.txt in" in missing.output
    (tmp_path / "file").write_text("")
    blocked = run.invoke(app, [write(tmp_path), "--out", str(tmp_path / "file")])
    assert blocked.exit_code == 2
    assert "a folder to write to" in blocked.output
