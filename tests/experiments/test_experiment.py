"""Experiments are read and checked whole, before anything runs."""

from pathlib import Path

import pytest

from experiments.experiment import GROUPS, known_experiments, named, read_experiment
from experiments.records import file_name
from fairfold.config import read_settings
from fairfold.config.files import load_settings
from fairfold.errors import InvalidSettings
from tests.support.experiments import SMALL, write


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", known_experiments())
def test_all_that_come_with_the_package_can_be_read(name: str, quick: bool) -> None:
    experiment = read_experiment(name, quick=quick)
    assert experiment.cells
    labels = [cell.label for cell in experiment.cells]
    assert len(labels) == len(set(labels))
    for table, file in experiment.file.tables.items():
        places = {(cell.row, cell.column) for cell in experiment.cells if cell.table == table}
        rows = file.paper.keys() if not quick or file.quick_rows is None else file.paper.keys() & set(file.quick_rows)
        assert {(row, column) for row in rows for column in file.paper[row]} <= places


@pytest.mark.parametrize("name", known_experiments())
def test_every_cell_has_a_file_of_its_own(name: str) -> None:
    cells = read_experiment(name).cells
    assert len({file_name(cell.label) for cell in cells}) == len({cell.label for cell in cells})


def test_the_tables_of_the_paper_are_there() -> None:
    wanted = {"memory", "ranking", "data-loss", "ratings", "embedding-dim", "general", "subspaces", "convergence"}
    wanted |= {"amazon"}  # in the place of a data set of the paper
    assert set(named("all")) == wanted


def test_every_experiment_is_in_one_group() -> None:
    assert sorted(name for group in GROUPS for name in named(group)) == known_experiments()
    assert not set(GROUPS) & set(known_experiments())
    assert named("ranking") == ["ranking"]
    assert named("mine.toml") == ["mine.toml"]


def test_cells_are_rows_times_columns_with_their_settings(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path))
    places = {(cell.row, cell.column): cell for cell in experiment.cells if cell.seed == 0}
    assert set(places) == {("1x", "FedAvg"), ("1x-16x", "FAIR"), ("1x-16x", "HeteroFL"), ("baselines", "")}
    fair = places["1x-16x", "FAIR"]
    assert fair.values["subspace"] == {"method": "fair", "mapping": "element"}
    assert (fair.values["fleet"]["capacities"], fair.values["run"]["rounds"]) == ("1x-16x", 4)
    assert places["1x", "FedAvg"].values["subspace"] == {"method": "fedavg"}  # another method starts anew
    assert "columns" not in places["1x", "FedAvg"].values
    assert sum(cell.row == "baselines" for cell in experiment.cells) == 1  # no seed, no training: once


def test_the_tables_of_a_recipe_have_its_settings() -> None:
    """So a recipe that is changed has to be run again: its records are of other settings."""
    mixed = [cell for cell in read_experiment("fair").cells if cell.row == "mixed"]
    assert mixed
    for cell in mixed:
        data = {f"data.{key}": value for key, value in cell.values["data"].items()}
        recipe = load_settings(None, data | {"run.evaluate_every": 1000}, "fair")
        assert read_settings(cell.values) == recipe


def test_references_are_those_of_the_data_and_of_the_measure() -> None:
    for experiment, table in (("ratings", "goodreads"), ("beyond", "ratings-goodreads")):  # two algorithms, one answer
        (cell,) = [one for one in read_experiment(experiment).cells if one.kind == "baselines" and one.table == table]
        assert cell.values == {
            "data": {"name": "goodreads-interactions-200k", "top_users": 100}, "model": {"kind": "neumf-mlp"}
        }  # fmt: skip
        assert cell.column == "goodreads-interactions-200k"


def test_a_single_cell_may_have_settings_of_its_own(tmp_path: Path) -> None:
    own = '\n[tables.one.cells]\n"1x-16x" = { FAIR = { algorithm.local_lr = 0.5, run.rounds = 9 } }\n'
    for quick, rounds in ((False, 9), (True, 2)):
        cells = read_experiment(write(tmp_path, SMALL + own), quick=quick, seeds=1).cells
        steps = {
            cell.column: (cell.values["algorithm"]["local_lr"], cell.values["run"]["rounds"])
            for cell in cells
            if cell.row == "1x-16x"
        }
        assert steps["FAIR"] == (0.5, rounds)
        assert steps["HeteroFL"][0] == 0.01
    with pytest.raises(InvalidSettings, match="cells names 'FEAR'"):
        read_experiment(write(tmp_path, SMALL + own.replace("FAIR", "FEAR")))


def test_quick_and_seeds(tmp_path: Path) -> None:
    quick = read_experiment(write(tmp_path), quick=True)
    assert {cell.seed for cell in quick.cells} == {0}
    assert {cell.values["run"]["rounds"] for cell in quick.cells if cell.kind == "federated"} == {2}
    assert {cell.seed for cell in read_experiment(write(tmp_path), seeds=4).cells} == {0, 1, 2, 3}
    with pytest.raises(InvalidSettings, match="at least 1"):
        read_experiment(write(tmp_path), seeds=0)


def test_the_quick_version_can_do_without_references(tmp_path: Path) -> None:
    path = write(tmp_path)
    without = Path(path).read_text().replace("baselines = true", "baselines = true\nquick_baselines = false")
    Path(path).write_text(without)
    assert any(cell.row == "baselines" for cell in read_experiment(path).cells)
    assert not any(cell.row == "baselines" for cell in read_experiment(path, quick=True).cells)


def test_like_takes_over_the_settings_of_another(tmp_path: Path) -> None:
    base = write(tmp_path, name="base")
    text = f'title = "Other"\nlike = "{base}"\n[set]\nmodel.factors = 2\n'
    text += '[tables.t]\ntitle = "T"\n[tables.t.rows]\na = {}\n[tables.t.columns]\nb = {}\n'
    (cell,) = read_experiment(write(tmp_path, text, "other"), seeds=1).cells
    assert cell.values["model"] == {"kind": "mf", "factors": 2}
    assert cell.values["algorithm"]["local_lr"] == 0.01


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("factors = 4", "factor = 4", "did you mean 'factors'"),
        ("[set]", "[set]\nmapping = 'chunk'", "did you mean 'subspace.mapping'"),
        (
            'subspace.method = "fair"',
            'subspace.method = "fare"',
            "row '1x-16x', column 'FAIR': subspace.method = 'fare'",
        ),
        ('FAIR = { subspace.method = "fair" }', 'FAIR = { kind = "federate" }', "did you mean 'federated'"),
        ("FAIR = 0.25", "FEAR = 0.25", "paper names 'FEAR'"),
        ("baselines = true", 'against = ["on/1x-16x"]', "against names 'on'.*did you mean 'one'"),
        ("baselines = true", 'against = ["one/1x-61x"]', "against names '1x-61x'.*did you mean '1x-16x'"),
        ("baselines = true", 'against = ["one/*/FEAR"]', "against names 'FEAR'"),
        ("baselines = true", "baseline = true", "did you mean 'baselines'"),
        ('title = "Small"', "", "title: Field required"),
        ('title = "Small"', "title = ", "a TOML file"),
    ],
)
def test_bad_files_are_refused_with_place_and_reason(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(InvalidSettings, match=message):
        read_experiment(write(tmp_path, SMALL.replace(old, new, 1)))


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="did you mean 'ranking'"):
        read_experiment("rankign")
    with pytest.raises(InvalidSettings, match="--list"):
        read_experiment("xyz")
    with pytest.raises(InvalidSettings, match="Check the path"):
        read_experiment(str(tmp_path / "none.toml"))


def test_a_row_may_have_a_quick_version_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("""
title = "t"
set = { kind = "fedrec", rounds = 9 }
quick = { rounds = 3, search_rounds = 0 }
[tables.one]
title = "one"
measures = ["NDCG@10"]
[tables.one.rows]
FedMF = { method = "fedmf", tried = { server_lr = [0.1, 0.3] }, quick.tried = { server_lr = [0.3] } }
popularity = { method = "popularity" }
""")
    whole, small = (read_experiment(str(tmp_path / "mine.toml"), quick=quick).cells for quick in (False, True))
    cells = {cell.row: cell.values for cell in whole if not cell.is_trial}
    assert cells["FedMF"] == {"rounds": 9, "method": "fedmf", "tried": {"server_lr": [0.1, 0.3]}}
    quick = {cell.row: cell.values for cell in small}
    assert (quick["FedMF"]["rounds"], quick["FedMF"]["tried"]) == (3, {"server_lr": [0.3]})
    assert quick["popularity"] == {"rounds": 3, "search_rounds": 0, "method": "popularity"}
