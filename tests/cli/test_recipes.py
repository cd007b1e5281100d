"""The recipes: listed in a line each, what they say, and that each trains by its name alone."""

from pathlib import Path
from typing import Any

import numpy
import polars
import pytest

import fairfold
from fairfold.config.files import DEFAULT_RECIPE, load_settings, recipe_summary, recipes
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidSettings
from fairfold.methods import Fair
from tests.support.commands import WORLD, fails, works

CELLS = {
    "authors": ("hashed", "local SGD"),
    "default": ("truncated", "co-occurrence"),
    "fair": ("ranked", "closed form"),
    "paper": ("hashed", "local SGD"),
    "ratings": ("ranked", "ratings"),
}
"""Subspace and update of each recipe."""


def test_the_command_lists_each_with_its_cell_and_a_line() -> None:
    output = works("recipes")
    lines = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    listed = list[list[str]]()
    for cells in ([cell.strip() for cell in line] for line in lines):
        if cells[0]:
            listed.append(cells)
        else:  # a long line goes on
            listed[-1][-1] += f" {cells[-1]}"
    assert {name: (subspace, update) for name, subspace, update, _ in listed} == CELLS
    assert {name: text for name, *_, text in listed} == {name: recipe_summary(name) for name in recipes()}
    assert listed[0][0] == DEFAULT_RECIPE


@pytest.mark.parametrize("name", recipes())
def test_a_summary_is_a_short_sentence(name: str) -> None:
    summary = recipe_summary(name)
    assert summary[0].isupper()
    assert summary.endswith(".")
    assert len(summary) <= 105


def test_paper_is_algorithm_1() -> None:
    settings = load_settings(None, {}, "paper")
    method, algorithm = settings.subspace, settings.plain()["algorithm"]
    assert isinstance(method, Fair)
    assert (method.mapping, method.chunk, method.rehash) == ("chunk", 8, True)
    assert (settings.model.kind, settings.model.factors) == ("neumf", 8)
    wanted: dict[str, Any] = {
        "aggregation": "paper", "weighting": "data", "local_epochs": 5, "num_negatives": 1, "l2": 1e-6,
        "batch_size": 512, "objective": "bpr",
    }  # fmt: skip
    assert {key: algorithm[key] for key in wanted} == wanted
    assert settings.fleet.clients_per_round == 10
    amazon = load_settings(None, {"data.name": "amazon-products-100"}, "paper").plain()
    assert amazon["algorithm"]["local_epochs"] == 1


def test_authors_hash_single_weights_once() -> None:
    method = load_settings(None, {}, "authors").subspace
    assert isinstance(method, Fair)
    assert (method.mapping, method.rehash) == ("element", False)


def test_fair_has_nothing_for_single_data_sets() -> None:
    assert load_settings(None, {"data.name": "ml-100k"}, "fair").algorithm == load_settings(None, {}, "fair").algorithm
    assert "[for." not in recipes()["fair"].read_text(encoding="utf-8")
    settings = load_settings(None, {}, "fair")
    assert settings.plain()["algorithm"]["server_optimizer"] == "newton"
    assert isinstance(settings.subspace, Fair)
    assert settings.subspace.ranked


@pytest.mark.parametrize("name", recipes())
def test_fit_takes_every_recipe(name: str) -> None:
    world = SyntheticDataset(users=40, items=60, interactions_per_user=20).dataset()
    frame = polars.DataFrame(
        {
            "user": world.train.users.numpy(),
            "item": world.train.items.numpy(),
            "rating": numpy.arange(len(world.train)) % 5 + 1.0,
        }
    )
    model = fairfold.fit(frame, recipe=name, rounds=1, progress=False)
    assert model.result.quality > 0
    assert model.result.settings.algorithm == load_settings(None, {}, name).algorithm


def test_fair_is_far_above_popularity() -> None:
    data = SyntheticDataset(users=600, items=1000, interactions_per_user=60).dataset()  # 16x has room for 62 rows
    result = fairfold.simulate(load_settings(None, {"data.name": "x"}, "fair"), data=data)
    assert result.quality > 1.3 * result.baselines["popularity"]
    assert all((group.quality or 0) > result.baselines["popularity"] for group in result.groups)


@pytest.mark.parametrize("name", [name for name in recipes() if name != "ratings"])
def test_train_takes_every_recipe(name: str, tmp_path: Path) -> None:
    output = works("train", "--recipe", name, *WORLD, "--rounds", "1", "--out", str(tmp_path / "run"))
    assert f"Recipe: {name} (" in output


@pytest.mark.parametrize(
    ("recipe", "changes", "works"),
    [
        ("fair", {"model.kind": "neumf"}, ["authors", "paper", None]),
        ("fair", {"subspace.method": "fedhm"}, ["authors", "paper", None]),
        ("ratings", {"model.kind": "neumf"}, ["authors", "paper", None]),
        ("paper", {"model.kind": "lenet", "data.name": "mnist"}, [None]),
    ],
)
def test_a_recipe_that_does_not_go_with_a_model_names_what_does(
    recipe: str, changes: dict[str, Any], works: list[str | None]
) -> None:
    """One sentence, and what it names works with the same changes."""
    with pytest.raises(InvalidSettings) as refused:
        load_settings(None, changes, recipe)
    named = [f"--recipe {name}" if name else "no recipe at all" for name in works]
    assert refused.value.remedy == f"Take {' or '.join(named)}."
    assert refused.value.given.startswith(f"recipe {recipe} with ")
    assert "\n" not in str(refused.value)
    for name in works:
        load_settings(None, changes, name)


def test_a_key_that_no_recipe_has_is_named_itself() -> None:
    with pytest.raises(InvalidSettings, match=r"unknown key 'model.factor' \(did you mean 'factors'"):
        load_settings(None, {"model.factor": 3}, "fair")


def test_ratings_on_data_without_them_name_a_recipe_that_ranks(tmp_path: Path) -> None:
    assert "rank items: --recipe fair" in fails("train", "--recipe", "ratings")
    (tmp_path / "own.csv").write_text("user,item\n1,2\n1,3\n2,2\n")
    assert "--recipe fair" in fails("train", "--recipe", "ratings", "--data", str(tmp_path / "own.csv"))
