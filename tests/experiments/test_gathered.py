"""References over several splits, rows per size, and an order of popularity that few users give."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from experiments.cells import with_partial_counts
from experiments.combine import combine_splits, mean_over_seeds, pack_per_user, split_by_size, with_seed
from experiments.experiment import Cell, read_experiment
from experiments.output import paired_differences
from experiments.records import Outcome
from experiments.tables import result_tables
from fairfold.errors import InvalidSettings
from tests.support.experiments import SMALL, write
from tests.support.federations import tiny_data


def of_split(name: str, each: list[float], seed: int = 1) -> Outcome:
    facts = {"baselines": {"popularity": 0.25, name: sum(each) / 2}}
    return with_seed(Outcome(facts=facts, by_user={name: pack_per_user(each)}), seed)


def test_references_of_several_splits_are_one_row_under_all_that_was_chosen() -> None:
    found = [of_split("EASE (penalty 100)", [0.5, 1.0]), of_split("EASE (penalty 300)", [0.0, 0.5], 2)]
    means, each = combine_splits(found, splits=True)
    assert means == {"popularity": 0.25, "EASE (penalty 100 / penalty 300)": 0.5}
    by_split = each["EASE (penalty 100 / penalty 300)"]
    assert list(by_split) == [1, 2]
    assert mean_over_seeds(by_split.values()) == pytest.approx(numpy.array([0.25, 0.75]), abs=1e-4)
    assert "popularity" not in each  # which does not say what each user got
    means, each = combine_splits(found, splits=False)
    assert set(means) == {"popularity", "EASE (penalty 100)", "EASE (penalty 300)"}


def test_a_reference_that_one_split_lacks_says_so() -> None:
    without = with_seed(Outcome(facts={"baselines": {"EASE": "not computed"}}), 2)
    found = [of_split("EASE (penalty 100)", [0.5, 1.0]), without]
    means, each = combine_splits(found, splits=True)
    assert means["EASE (penalty 100)"] == "not computed"
    assert list(each["EASE (penalty 100)"]) == [1]


def test_a_cell_is_a_row_per_size_with_what_that_holds() -> None:
    devices = {
        "1x": {"users": 3, "numbers held": 8, "bytes held": 9, "everybody": 0.5},
        "4x": {"users": 2, "numbers held": 2, "bytes held": 3, "everybody": 0.25},
    }
    by_user = {"last": pack_per_user([0.9]), "size 1x": pack_per_user([0.5]), "size 4x": pack_per_user([0.25])}
    whole = Outcome.of_value(0.9, 15.0, facts={"devices": devices}, by_user=by_user)
    (first, _, (large,)), (second, _, (small,)) = split_by_size("1x-4x", "best", [whole])
    assert (first, second) == ("1x-4x: 1x", "1x-4x: 4x")
    assert (large.last, small.last) == (0.5, 0.25)
    assert small.facts["devices"] == {"4x": devices["4x"]}
    assert mean_over_seeds([small.by_user["last"]]) == pytest.approx(numpy.array([0.25]), abs=1e-4)
    alone = Outcome.of_value(0.9, 15.0, facts={"devices": {"1x": devices["1x"]}})
    ((row, _, _),) = split_by_size("1x", "best", [alone])
    assert row == "1x"


def test_every_seed_has_a_split_of_its_own_and_references_for_it() -> None:
    cells = [cell for cell in read_experiment("beyond").cells if cell.table == "ml-100k"]
    assert all(cell.values["data"]["split_seed"] == cell.seed for cell in cells)
    baselines = [cell for cell in cells if cell.kind == "baselines"]
    assert {cell.seed for cell in baselines} == {cell.seed for cell in cells}
    assert len(baselines) == 3
    assert all(cell.values["baselines"] == "strong" for cell in baselines)


def test_an_order_from_few_users_counts_each_of_them_for_several() -> None:
    data = tiny_data(3, 40, 30)
    whole, some = with_partial_counts(data, 1.0, 0), with_partial_counts(data, 0.25, 0)
    counts = data.train.counts_by_item.sort(descending=True).values
    assert whole.counted is not None
    assert some.counted is not None
    assert torch.equal(whole.counted.counts, counts)
    assert torch.equal(whole.train.counts_by_item, counts)
    assert bool((some.counted.counts % 4 == 0).all())
    assert some.counted.devices == 10
    assert bool((some.counted.counts[:-1] >= some.counted.counts[1:]).all())
    assert not torch.equal(some.train.counts_by_item, counts)  # the order is another one
    alike = [some.counted.leading[some.counted.counts == many].tolist() for many in set(some.counted.counts.tolist())]
    assert max(map(len, alike)) > 3
    assert any(items != sorted(items) for items in alike)  # numbers at hand may show everybody's order
    with pytest.raises(InvalidSettings, match="order_from"):
        with_partial_counts(data, 0.0, 0)


def test_only_the_same_splits_are_compared(tmp_path: Path) -> None:
    text = SMALL.replace("baselines = true", 'baselines = true\nvalue = "last"\nsplits = true\nagainst = ["EASE"]')
    text = text.replace("data = { users = 12, items = 60, interactions_per_user = 10 }", 'data = { name = "ml-100k" }')
    experiment, found = read_experiment(write(tmp_path, text)), dict[Cell, Outcome]()
    for cell in experiment.cells:
        if cell.kind == "baselines":
            found[cell] = of_split("EASE (penalty 1)", [0.5, 0.5] if cell.seed == 0 else [1.0, 1.0])
        elif (cell.column, cell.seed) == ("FAIR", 0):  # the other split is not run
            found[cell] = replace(Outcome.of_value(0.75, 1.0), by_user={"last": pack_per_user([0.75, 0.75])})
    (grid,) = result_tables(experiment, found)
    ((_, apart),) = paired_differences(grid)
    assert apart["1x-16x", "FAIR"].mean == pytest.approx(0.25, abs=1e-4)
