"""Differences between models user by user, and cells that keep what each user got."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from experiments.cells import outcome_of_run
from experiments.combine import differences, mean_over_seeds, pack_per_user, unpack_per_user
from experiments.execute import execute_all, matches_patterns
from experiments.experiment import Cell, read_experiment
from experiments.output import paired_differences, paired_views
from experiments.records import Outcome, Records, is_complete, is_of_this_code
from experiments.tables import ResultTable, result_tables
from fairfold.federation.simulation import simulate
from tests.support import pictures
from tests.support.experiments import SMALL, write
from tests.support.settings import make_settings


def test_what_is_packed_comes_back() -> None:
    each = numpy.random.default_rng(0).random(500) ** 4
    assert numpy.abs(unpack_per_user(pack_per_user(each)) - each).max() <= 0.5001 / (2**16 - 1)
    assert mean_over_seeds([pack_per_user([0.0, 1.0]), pack_per_user([1.0, 1.0])]) == pytest.approx(
        [0.5, 1.0], abs=1e-4
    )


def test_shares_in_an_error_may_be_above_one() -> None:
    each = [0.0, 3.5, 12.25]
    assert unpack_per_user(pack_per_user(each)) == pytest.approx(numpy.array(each), abs=1e-4 * 12.25)


def test_an_interval_is_that_of_the_normal_distribution_where_users_are_many() -> None:
    random = numpy.random.default_rng(1)
    each = random.random(4000)
    other = each - 0.01 + 0.1 * random.standard_normal(4000)
    (found,) = differences(each, [other])
    apart = each - other
    assert found.mean == pytest.approx(apart.mean())
    error = apart.std() / 4000**0.5
    assert found.low == pytest.approx(apart.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(apart.mean() + 1.96 * error, abs=0.15 * error)
    assert found.beyond_chance
    assert not differences(each, [each])[0].beyond_chance


def test_other_users_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="3 and 2 users"):
        differences(numpy.zeros(3), [numpy.zeros(2)])


def grid_of(tmp_path: Path, against: str, by_user: dict[str, list[float]]) -> ResultTable:
    """A table of made up cells: what each user got, by column, or by reference."""
    text = SMALL.replace("baselines = true", f'baselines = true\nvalue = "last"\nagainst = ["{against}"]')
    experiment = read_experiment(write(tmp_path, text), seeds=1)
    found: dict[Cell, Outcome] = {}
    for cell in experiment.cells:
        if cell.kind == "baselines":
            names = {name: pack_per_user(each) for name, each in by_user.items() if "(" in name}
            found[cell] = Outcome(facts={"baselines": {}}, by_user=names)
        elif cell.column in by_user:
            found[cell] = replace(Outcome.of_value(0.5, 1.0), by_user={"last": pack_per_user(by_user[cell.column])})
    return result_tables(experiment, found)[0]


def test_columns_and_references_are_what_others_are_compared_with(tmp_path: Path) -> None:
    each = {"FAIR": [0.5, 0.5, 1.0], "HeteroFL": [0.0, 0.0, 0.0], "ridge (penalty 10)": [0.5, 0.5, 0.5]}
    ((name, apart),) = paired_differences(grid_of(tmp_path, "ridge", each))
    assert name == "ridge"
    assert apart["1x-16x", "FAIR"].mean == pytest.approx(1 / 6, abs=1e-4)
    (view,) = paired_views(grid_of(tmp_path, "HeteroFL", each))
    assert view.heading == ["", "FAIR"]
    assert view.rows[0][1].startswith("+0.6667 [+0.5000, +1.0000]")
    assert paired_views(grid_of(tmp_path, "HeteroFL", {"FAIR": [1.0]})) == []


def test_rows_of_other_users_are_compared_among_themselves(tmp_path: Path) -> None:
    each = {
        "FAIR": [0.5, 0.5, 1.0],
        "HeteroFL": [0.0, 0.0, 0.0],
        "FedAvg": [0.75, 1.0],
        "ridge (penalty 10)": [0.5, 0.5],
    }
    found = dict(paired_differences(grid_of(tmp_path, 'HeteroFL", "ridge', each)))
    assert found.keys() == {"HeteroFL", "ridge"}
    assert found["HeteroFL"].keys() == {("1x-16x", "FAIR")}
    assert found["ridge"].keys() == {("1x", "FedAvg")}
    alone = dict(paired_differences(grid_of(tmp_path, "ridge", each)))
    assert found["ridge"] == alone["ridge"]
    assert found["ridge"]["1x", "FedAvg"].mean == pytest.approx(0.375, abs=1e-4)


def test_a_column_of_one_cell_is_compared_with_all_rows(tmp_path: Path) -> None:
    ((_, apart),) = paired_differences(grid_of(tmp_path, "FedAvg", {"FAIR": [0.5, 1.0], "FedAvg": [0.0, 0.5]}))
    assert apart.keys() == {("1x-16x", "FAIR")}  # FedAvg is in another row, 1x
    assert apart["1x-16x", "FAIR"].mean == pytest.approx(0.5, abs=1e-4)


def test_seeds_that_do_not_say_what_users_got_are_left_out_on_both_sides(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "HeteroFL", {"FAIR": [0.5, 1.0], "HeteroFL": [0.25, 0.5]})
    other = pack_per_user([1.0, 1.0])

    def with_two_seeds(values: str) -> ResultTable:
        entries = [
            replace(entry, by_user=(*entry.by_user, values if entry.column == "FAIR" else other), seeds=(0, 1))
            for entry in grid.entries
            if entry.by_user
        ]
        return replace(grid, entries=tuple(entries))

    ((_, apart),) = paired_differences(with_two_seeds(""))
    assert apart["1x-16x", "FAIR"].mean == pytest.approx(0.375, abs=1e-4)
    ((_, apart),) = paired_differences(with_two_seeds(pack_per_user([0.5, 0.5])))
    assert apart["1x-16x", "FAIR"].mean == pytest.approx((0.375 - 0.5) / 2, abs=1e-4)


def test_a_cell_keeps_what_each_user_got_and_by_which_code(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path), quick=True)
    (outcomes,) = execute_all([experiment], tmp_path, 1, only=["one/1x-16x/FAIR"])
    (cell,) = outcomes
    each = unpack_per_user(outcomes[cell].by_user["last"])
    assert each.mean() == pytest.approx(outcomes[cell].last, abs=1e-4)
    (record,) = Records(tmp_path / experiment.folder).by_label.values()
    assert record["torch"]
    assert is_complete(record) == bool(record["commit"])
    assert not is_complete({key: value for key, value in record.items() if key != "torch"})
    assert not is_complete(record | {"outcome": record["outcome"] | {"facts": {"metric": "NDCG@20"}}}), "no hardware"
    for metric in ("NDCG@20", "MSE", "accuracy", "slope"):
        outcome = record["outcome"] | {"by_user": {}, "facts": record["outcome"]["facts"] | {"metric": metric}}
        assert is_complete(record | {"outcome": outcome}) == (metric == "slope" and bool(record["commit"])), metric


def test_of_images_a_cell_keeps_which_were_classified_right() -> None:
    data = pictures.pictures(side=28)
    outcome = outcome_of_run(simulate(make_settings(**pictures.SMALL), data=data), 0.0)
    for name, value in (("best", outcome.best), ("last", outcome.last)):
        each = unpack_per_user(outcome.by_user[name])
        assert len(each) == len(data.test.labels)
        assert set(each) <= {0.0, 1.0}
        assert each.mean() == pytest.approx(value)


def test_what_lacks_something_is_run_again_when_asked(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path), quick=True)
    only = ["one/1x/FedAvg"]
    execute_all([experiment], tmp_path, 1, only=only)
    records = Records(tmp_path / experiment.folder)
    (record,) = records.by_label.values()
    old = {key: value for key, value in record.items() if key not in ("torch", "checksum")}
    records.join([old | {"outcome": old["outcome"] | {"best": 0.123}}])
    (kept,) = execute_all([experiment], tmp_path, 1, only=only)
    assert [outcome.best for outcome in kept.values()] == [0.123]
    (new,) = execute_all([experiment], tmp_path, 1, only=only, holds=is_complete)
    assert [outcome.best for outcome in new.values()] == [record["outcome"]["best"]]


def test_cells_of_another_commit_are_run_again_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, only = read_experiment(write(tmp_path), quick=True), ["one/1x/FedAvg"]
    execute_all([experiment], tmp_path, 1, only=only)
    records = Records(tmp_path / experiment.folder)
    (record,) = records.by_label.values()
    for commit, now, same in (("abc", "abc", True), ("abc", "abd", False), ("abc-changed", "abc-changed", False)):
        monkeypatch.setattr("experiments.records.software", lambda now=now: {"commit": now, "torch": "2"})
        records.join([record | {"commit": commit, "outcome": record["outcome"] | {"best": 0.123}}])
        (new,) = execute_all([experiment], tmp_path, 1, only=only, holds=is_of_this_code)
        assert [outcome.best for outcome in new.values()] == [0.123 if same else record["outcome"]["best"]]


def test_cells_are_named_by_patterns(tmp_path: Path) -> None:
    cells = read_experiment(write(tmp_path), seeds=1).cells
    for pattern, many in (("one", 4), ("one/1x", 1), ("one/*/FAIR", 1), ("one/1x-16x/*", 2), ("other", 0)):
        assert sum(matches_patterns(cell, [pattern]) for cell in cells) == many, pattern
    assert all(matches_patterns(cell, ()) for cell in cells)
