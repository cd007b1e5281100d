"""Cells are run once, go on after an interruption, and say so where they cannot run."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fairfold
from experiments.cells import MemorySettings, largest_compression
from experiments.execute import execute_all
from experiments.experiment import Cell, Experiment, read_experiment
from experiments.kinds import KINDS
from experiments.records import Outcome, Records, Watcher, commit, new_record, save_record
from tests.support.experiments import SMALL, write


def execute(experiment: Experiment, *given: Any, **named: Any) -> dict[Cell, Outcome]:
    return execute_all([experiment], *given, **named)[0]


class Listener(Watcher):
    """Remembers its calls, and may stop everything at some point of some cell."""

    def __init__(self, stop_at: float = 2.0) -> None:
        self.kept = self.lacking = 0
        self.planned: list[Cell] = []
        self.shares: list[float] = []
        self.notes: list[str] = []
        self._stop_at = stop_at

    def on_plan(self, kept: int, lacking: int, to_run: list[Cell]) -> None:
        self.kept, self.lacking, self.planned = kept, lacking, to_run

    def on_progress(self, cell: Cell, share: float) -> None:
        self.shares.append(share)
        if share >= self._stop_at and cell.column == "FAIR":
            raise KeyboardInterrupt

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def without_time(outcomes: dict[Cell, Outcome]) -> dict[str, Any]:
    return {cell.label: (one.state, one.reason, one.curve, one.data) for cell, one in outcomes.items()}


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return read_experiment(write(tmp_path), seeds=1)


def test_a_table_on_request_is_run_where_it_is_named_and_shown_ever_after(tmp_path: Path) -> None:
    asked = read_experiment(write(tmp_path, SMALL.replace("baselines = true", "on_request = true")), seeds=1)
    listener = Listener()
    assert execute(asked, tmp_path, 1, listener) == {}
    assert listener.planned == []
    found = execute(asked, tmp_path, 1, listener, only=["one/1x"])
    assert [cell.row for cell in listener.planned] == ["1x"]
    assert execute(asked, tmp_path, 1, listener) == found
    assert len(found) == 1


def test_a_finished_cell_is_not_run_again(experiment: Experiment, tmp_path: Path) -> None:
    first, again = Listener(), Listener()
    outcomes = execute(experiment, tmp_path, 1, first)
    assert len(first.planned) == len(experiment.cells) == 4
    assert (first.kept, first.lacking) == (0, 0)
    assert without_time(execute(experiment, tmp_path, 1, again)) == without_time(outcomes)
    assert (again.kept, again.lacking, again.planned) == (4, 0, [])
    changed = SMALL.replace('FAIR = { subspace.method = "fair" }', "FAIR = { algorithm.local_epochs = 2 }")
    other = read_experiment(write(tmp_path, changed), seeds=1)
    execute(other, tmp_path, 1, again)
    assert [cell.column for cell in again.planned] == ["FAIR"]


def test_what_only_describes_an_experiment_leaves_its_cells_as_they_are(experiment: Experiment, tmp_path: Path) -> None:
    execute(experiment, tmp_path, 1)
    described = SMALL.replace('title = "Small"', 'title = "Renamed"\ngroup = "all"')
    execute(read_experiment(write(tmp_path, described), seeds=1), tmp_path, 1, listener := Listener())
    assert listener.planned == []


def test_a_cell_of_another_experiment_is_taken_over(experiment: Experiment, tmp_path: Path) -> None:
    first = execute(experiment, tmp_path, jobs=1)
    text = SMALL.replace('mapping = "element"', 'mapping = "element", sign = true')  # the default, in words
    other = read_experiment(write(tmp_path, text, name="other"), seeds=1)
    listener = Listener()
    again = execute(other, tmp_path, jobs=1, watcher=listener)
    assert not [cell for cell in listener.planned if cell.kind == "federated"]
    assert without_time(again) == without_time(first)
    different = read_experiment(write(tmp_path, SMALL.replace("rounds = 4", "rounds = 3"), name="third"), seeds=1)
    execute(different, tmp_path, jobs=1, watcher=(listener := Listener()))
    assert [cell.column for cell in listener.planned if cell.kind == "federated"] == ["FedAvg", "FAIR", "HeteroFL"]


def test_several_experiments_run_what_they_share_once(experiment: Experiment, tmp_path: Path) -> None:
    more = SMALL.replace("rounds = 4", "rounds = 3")
    others = [read_experiment(write(tmp_path, text, name=n), seeds=1) for n, text in (("twin", SMALL), ("more", more))]
    listener = Listener()
    together = execute_all([experiment, *others], tmp_path / "together", jobs=2, watcher=listener)
    assert (
        sorted(cell.experiment for cell in listener.planned if cell.kind == "federated") == ["more"] * 3 + ["small"] * 3
    )
    for each, outcomes in zip([experiment, *others], together, strict=True):
        assert without_time(outcomes) == without_time(execute(each, tmp_path / "alone" / each.name, jobs=1))
        kept = execute(each, tmp_path / "together", watcher=(again := Listener()), jobs=1)
        assert again.planned == []
        assert without_time(kept) == without_time(outcomes)


def test_a_cell_that_breaks_costs_no_other(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = KINDS["federated"].run

    def breaks(values: dict[str, Any], *others: Any) -> Outcome:
        if values["subspace"]["method"] == "fair":
            raise RuntimeError("a kernel failed")
        return runs(values, *others)

    monkeypatch.setattr(KINDS["federated"], "run", breaks)
    states = {cell.column: one for cell, one in execute(experiment, tmp_path, 1).items()}
    assert {column: one.state for column, one in states.items()} == {
        "FedAvg": "done", "FAIR": "broken", "HeteroFL": "N/A", "": "done",
    }  # fmt: skip
    text = Path(states["FAIR"].reason.split("see ")[1]).read_text()
    assert text.rstrip().endswith("RuntimeError: a kernel failed")
    monkeypatch.undo()
    again = execute(experiment, tmp_path, 1, listener := Listener())
    assert [cell.column for cell in listener.planned] == ["FAIR"]
    assert without_time(again) == without_time(execute(experiment, tmp_path / "unbroken", 1))
    assert not any((tmp_path / "small").glob(".under-way"))


def test_what_is_kept_can_be_shown_without_running(experiment: Experiment, tmp_path: Path) -> None:
    assert execute(experiment, tmp_path, 1, run=False) == {}
    with pytest.raises(KeyboardInterrupt):
        execute(experiment, tmp_path, 1, Listener(stop_at=0.5))
    assert [cell.column for cell in execute(experiment, tmp_path, 1, run=False)] == ["FedAvg"]


def test_outcomes_tell_what_was_found(experiment: Experiment, tmp_path: Path) -> None:
    outcomes = {(cell.row, cell.column): one for cell, one in execute(experiment, tmp_path, 1).items()}
    fair = outcomes["1x-16x", "FAIR"]
    assert fair.state == "done"
    assert [number for number, _ in fair.curve] == [2, 4]
    assert fair.best == max(value for _, value in fair.curve)
    assert (fair.last, fair.last_round) == (fair.curve[-1][1], 4)
    assert set(fair.facts["devices"]) == {"1x", "16x"}
    refused = outcomes["1x-16x", "HeteroFL"]
    assert refused.state == "N/A"
    assert "needs at least 60 numbers" in refused.reason
    assert outcomes["baselines", ""].facts["baselines"]["popularity"] > 0


def test_an_interrupted_cell_goes_on_from_its_checkpoint(experiment: Experiment, tmp_path: Path) -> None:
    unbroken = execute(experiment, tmp_path / "unbroken", 1)
    with pytest.raises(KeyboardInterrupt):
        execute(experiment, tmp_path / "broken", 1, Listener(stop_at=0.75))
    listener = Listener()
    resumed = execute(experiment, tmp_path / "broken", 1, listener)
    assert [cell.column for cell in listener.planned] == ["FAIR", "HeteroFL", ""]
    assert listener.shares[0] > 0  # of FAIR: not from the start
    assert without_time(resumed) == without_time(unbroken)
    assert not any((tmp_path / "broken" / "small").glob(".under-way"))


@pytest.mark.parametrize("damage", ["", '{"fingerprint": ', "[]", '{"fingerprint": 1}', "<<<<<<< HEAD"])
def test_damaged_lines_are_run_again(experiment: Experiment, tmp_path: Path, damage: str) -> None:
    outcomes = execute(experiment, tmp_path, 1)
    path = tmp_path / "small" / "cells.csv"
    whole = path.read_text()
    rows = list(csv.DictReader(whole.splitlines()))
    assert [row["label"] for row in rows] == sorted(cell.label for cell in experiment.cells)
    path.write_text("\n".join([damage if ",FAIR," in line else line for line in whole.split("\n")]))
    listener = Listener()
    assert without_time(execute(experiment, tmp_path, 1, listener)) == without_time(outcomes)
    assert [cell.column for cell in listener.planned] == ["FAIR"]
    again = csv.DictReader(path.read_text().splitlines())
    assert [row["fingerprint"] for row in again] == [row["fingerprint"] for row in rows]
    assert len(listener.notes) == 1
    assert "line 3" in listener.notes[0]


def test_records_of_a_former_version_are_not_left_out_without_a_word(experiment: Experiment, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "cells.jsonl").write_text("{}\n")
    execute(experiment, tmp_path, 1, listener := Listener(), only=["one/1x"])
    assert listener.notes == ["cells.jsonl is of a former version, and not read: what it held is run again"]


def test_a_record_says_what_made_it(experiment: Experiment, tmp_path: Path) -> None:
    execute(experiment, tmp_path, 1)
    record = Records(tmp_path / "small").by_label["one 1x-16x FAIR seed 0"]
    assert (record["fairfold"], record["torch"]) == (fairfold.__version__, torch.__version__)
    assert record["commit"] == commit(Path(__file__).parents[2])
    assert commit(tmp_path) is None
    assert (record["kind"], record["seed"], record["settings"]["subspace"]["method"]) == ("federated", 0, "fair")


def test_finished_cells_that_nobody_joined_are_found(experiment: Experiment, tmp_path: Path) -> None:
    place = tmp_path / "small"
    whole = execute(experiment, tmp_path, 1)
    lines = (place / "cells.csv").read_text()
    for record in Records(place).by_label.values():  # as after a kill: everything waits, nothing is joined
        save_record(place, record)
    (place / "cells.csv").unlink()
    assert execute(experiment, tmp_path, run=False) == whole
    assert not (place / "cells.csv").exists()
    execute(experiment, tmp_path, 1, listener := Listener())
    assert listener.planned == []
    assert (place / "cells.csv").read_text() == lines
    assert not (place / ".under-way").exists()


def test_processes_that_join_at_once_lose_nothing(tmp_path: Path) -> None:
    readers = [Records(tmp_path) for _ in range(3)]
    for number, records in enumerate(readers):
        save_record(tmp_path, new_record(f"cell {number}", f"mark {number}", {}, Outcome()))
        records.join([new_record(f"taken {number}", "mark", {}, Outcome())])
    found = [row["label"] for row in csv.DictReader((tmp_path / "cells.csv").read_text().splitlines())]
    assert found == ["cell 0", "cell 1", "cell 2", "taken 0", "taken 1", "taken 2"]


def test_a_damaged_run_starts_anew(experiment: Experiment, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(experiment, tmp_path, 1, Listener(stop_at=0.5))
    for path in (tmp_path / "small" / ".under-way").rglob("*.safetensors"):
        path.write_bytes(b"half")
    outcomes = execute(experiment, tmp_path, 1)
    assert {one.state for one in outcomes.values()} == {"done", "N/A"}


@pytest.mark.slow  # each process imports everything anew
def test_processes_give_the_same_numbers(experiment: Experiment, tmp_path: Path) -> None:
    here = execute(experiment, tmp_path / "here", 1)
    listener = Listener()
    there = execute(experiment, tmp_path / "there", 2, listener)
    assert without_time(here) == without_time(there)
    assert listener.shares


def test_missing_data_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRFOLD_DATA", raising=False)
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))
    text = re.sub(r"^data = .*$", 'data.name = "amazonproducts-100"', SMALL, flags=re.MULTILINE)
    listener = Listener()
    outcomes = execute(read_experiment(write(tmp_path, text), seeds=1), tmp_path, 1, listener)
    assert {one.state for one in outcomes.values()} == {"no data"}
    assert (listener.kept, listener.lacking, listener.planned) == (0, len(outcomes), [])
    assert "train.txt, test.txt in" in next(iter(outcomes.values())).reason


def test_the_slope_of_the_convex_case(tmp_path: Path) -> None:
    values = {"full_size": 20, "size": 5, "rounds": (20, 40, 80), "problems": 2}
    slope = KINDS["convex"].run(values, 0, tmp_path, lambda *_: None)
    assert slope.best is not None
    assert slope.best < -0.3
    assert [number for number, _ in slope.curve] == [20, 40, 80]


FAIR = {"method": "fair", "mapping": "element"}


@pytest.mark.parametrize(
    ("subspace", "most"), [({"method": "fedhm"}, 7), ({"method": "heterofl"}, 8), (FAIR, 8000)], ids=lambda v: str(v)
)
def test_the_largest_compression_is_found_by_asking(subspace: dict[str, Any], most: int) -> None:
    assert largest_compression(MemorySettings(subspace, items=1000, dim=8)) == most
