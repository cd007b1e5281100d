"""Kept cells run again: which ones, and what counts as the same."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.check import Recheck, check, chosen, join
from experiments.execute import execute_all
from experiments.experiment import Cell, read_experiment
from experiments.records import Outcome, Records, save_record
from tests.support.experiments import write


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An experiment that was run, and where."""
    folder = tmp_path_factory.mktemp("kept")
    path = write(folder)
    execute_all([read_experiment(path, seeds=1)], folder / "out", 1)
    return path, folder / "out"


def test_cells_run_again_are_the_same_and_records_stay(kept: tuple[str, Path]) -> None:
    path, out = kept
    before = (out / "small" / "cells.csv").read_bytes()
    found = check([read_experiment(path, seeds=1)], out, 2, jobs=1)
    assert len(found) == 2
    assert all(one.same and one.now > 0 for one in found)
    assert (out / "small" / "cells.csv").read_bytes() == before


def test_what_comes_out_otherwise_is_reported(kept: tuple[str, Path], tmp_path: Path) -> None:
    path, out = kept
    for record in Records(out / "small").by_label.values():
        (tmp_path / "small").mkdir(exist_ok=True)
        best = record["outcome"]["best"]
        moved = {} if best is None else {"best": best + 0.01}
        save_record(tmp_path / "small", record | {"outcome": record["outcome"] | moved})
    arguments = [path, "--seeds", "1", "--jobs", "1"]
    ended = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--check", "9"])
    assert ended.exit_code == 1
    assert "DIFFERS" in ended.output
    assert "0 of 2 agree" in ended.output
    ended = CliRunner().invoke(app, [*arguments, "--out", str(out), "--check", "1"])
    assert ended.exit_code == 0
    assert "1 of 1 agree: 1 to four digits" in ended.output


def test_names_choose_and_nobody_else() -> None:
    cells = [Cell("t", f"row {number}", "", "memory", {}, 0, "e") for number in range(9)]
    found = {cell: Outcome.of_value(1.0, 0.0, seconds=10.0 * number) for number, cell in enumerate(cells)}
    found[cells[3]] = replace(found[cells[3]], state="N/A")
    found[cells[4]] = replace(found[cells[4]], data={"sha256": "of other data"})
    first = chosen(found, 3, 60.0)
    known = [cell for number, cell in enumerate(cells) if number not in (3, 4, 7, 8)]
    assert first == sorted(known, key=lambda cell: hashlib.sha256(f"e {cell.label}".encode()).hexdigest())[:3]


def test_seeds_say_how_far_apart_is_the_same() -> None:
    cell = Cell("t", "row", "", "memory", {}, 0, "e")
    assert Recheck(cell, 0.5, 0.50004, (0.5,)).same
    assert not Recheck(cell, 0.5, 0.5002, (0.5,)).agrees
    assert Recheck(cell, 0.5, 0.5002, (0.5, 0.501)).agrees
    assert not Recheck(cell, 0.5, 0.502, (0.5, 0.501)).agrees
    assert Recheck(cell, 0.5, 0.5, (0.5, 0.52, 0.51)).spread == pytest.approx(0.01)


def test_records_of_another_folder_take_the_place_of_older_ones(kept: tuple[str, Path], tmp_path: Path) -> None:
    path, out = kept
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    moved = {"one 1x FedAvg seed 0": 0.25}
    for label, record in Records(out / "small").by_label.items():
        for folder, commit, add in ((mine, None, moved.get(label, 0.0)), (theirs, "abc", 0.0)):
            (folder / "small").mkdir(parents=True, exist_ok=True)
            outcome = record["outcome"]
            best = None if outcome["best"] is None else outcome["best"] + add
            save_record(folder / "small", record | {"commit": commit, "outcome": outcome | {"best": best}})
    changed = next(record for record in Records(theirs / "small").by_label.values() if record["kind"] == "baselines")
    save_record(theirs / "small", changed | {"fingerprint": "of other settings"})
    arguments = [path, "--seeds", "1", "--out", str(mine), "--join"]
    ended = CliRunner().invoke(app, [*arguments, str(theirs)])
    assert ended.exit_code == 0
    assert "1 of 2 agree: 1 to four digits" in ended.output
    lines = (mine / "again.csv").read_text().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("small,one 1x FedAvg seed 0,")
    assert ",DIFFERS," in lines[1]
    held = Records(mine / "small").by_label
    assert {label for label, record in held.items() if record["commit"] == "abc"} == set(held) - {changed["label"]}
    ended = CliRunner().invoke(app, [*arguments, str(theirs)])
    assert "No kept cell was run again." in ended.output
    ended = CliRunner().invoke(app, [*arguments, str(tmp_path / "nowhere")])
    assert ended.exit_code != 0
    assert "that holds small" in " ".join(ended.output.split())


def test_what_lacks_something_replaces_nothing_that_is_whole(kept: tuple[str, Path], tmp_path: Path) -> None:
    path, out = kept
    for record in Records(out / "small").by_label.values():
        for folder, commit in (("mine", "abc"), ("theirs", None)):
            (tmp_path / folder / "small").mkdir(parents=True, exist_ok=True)
            save_record(tmp_path / folder / "small", record | {"commit": commit})
    assert join([read_experiment(path, seeds=1)], tmp_path / "mine", tmp_path / "theirs") == []
    held = Records(tmp_path / "mine" / "small").by_label.values()
    assert {record["commit"] for record in held} == {"abc"}


def test_a_cell_of_other_settings_is_replaced_and_not_compared(kept: tuple[str, Path], tmp_path: Path) -> None:
    path, out = kept
    for record in Records(out / "small").by_label.values():
        for folder, mark in (("mine", "of other settings"), ("theirs", record["fingerprint"])):
            (tmp_path / folder / "small").mkdir(parents=True, exist_ok=True)
            save_record(tmp_path / folder / "small", record | {"fingerprint": mark, "commit": "abc"})
    assert join([read_experiment(path, seeds=1)], tmp_path / "mine", tmp_path / "theirs") == []
    theirs = Records(tmp_path / "theirs" / "small").by_label
    assert Records(tmp_path / "mine" / "small").by_label == theirs
    lacking = [read_experiment("memory"), read_experiment(path, seeds=1)]  # a folder may hold some of them
    assert join(lacking, tmp_path / "mine", tmp_path / "theirs") == []
