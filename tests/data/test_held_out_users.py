"""Users held out whole (split="users"): they do not train, and are ranked for from a part of their histories."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars
import pytest
import torch

import fairfold
from fairfold.data import Interactions
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.metrics.ranking_baselines import Ease, ImplicitALS, ItemNeighbors, Ridge
from tests.estimator.test_fit import QUICK, fitted, rows


@pytest.fixture(scope="module")
def model() -> Any:
    return fitted(rows(), capacities="1x-4x", split="users", titles={"i3": "The Third"})


def pairs(part: Interactions, users: list[str], items: list[str]) -> set[tuple[str, str]]:
    return {(users[user], items[item]) for user, item in zip(part.users.tolist(), part.items.tolist(), strict=True)}


def test_a_tenth_of_the_users_do_not_train(model: Any) -> None:
    data, new = model.data, model.data.held_out_users
    assert (data.num_users, new.num_users) == (54, 6)
    assert not set(data.user_ids) & set(new.user_ids)
    assert not len(data.test)
    given = {(str(user), item) for user, item in rows().unique().iter_rows()}
    parts = [pairs(data.train, data.user_ids, data.item_ids)]
    parts += [pairs(part, new.user_ids, new.item_ids) for part in (new.train, new.test)]
    assert set.union(*parts) == given
    assert sum(map(len, parts)) == len(given)
    owned = new.train.counts_by_user + new.test.counts_by_user
    assert torch.equal(new.train.counts_by_user, (0.7 * owned + 0.5).floor().long())
    assert new.titles == data.titles
    note = "Split: 0.1 of the users held out, with 0.7 of their interactions as histories, at random with seed 0."
    assert note in model.notes


def test_quality_is_that_of_histories_which_are_given(model: Any) -> None:
    new = model.data.held_out_users
    table = model.evaluate(metrics=["ndcg@20", "recall@20"], baselines=True)
    assert (table["users"] == 6).all()
    assert table.loc["server", "ndcg@20"] == pytest.approx(model.result.quality)
    assert table.loc["4x", "ndcg@20"] == pytest.approx(model.result.groups[1].everybody)
    wanted = model.to_qrels().groupby("user_id")["item_id"].apply(set)
    recalls = []
    for user in range(new.num_users):
        history = [new.item_ids[item] for item in new.train.of(user).tolist()]
        found, truth = set(model.recommend(history, k=20).items), wanted[int(new.user_ids[user])]
        recalls.append(len(found & truth) / len(truth))
    assert table.loc["server", "recall@20"] == pytest.approx(sum(recalls) / len(recalls))
    hits = model.to_run(20).merge(model.to_qrels(), on=["user_id", "item_id"]).groupby("user_id").size()
    assert (hits / wanted.map(len)).fillna(0).mean() == pytest.approx(table.loc["server", "recall@20"])


def test_who_is_held_out_changes_no_model(model: Any) -> None:
    alone = fitted(replace(model.data, held_out_users=None), capacities="1x-4x")
    assert all(torch.equal(vector, alone.result.state.full[name]) for name, vector in model.result.state.full.items())


def test_it_is_kept_in_a_folder_and_another_seed_holds_out_others(model: Any, tmp_path: Path) -> None:
    again = fairfold.load(model.save(tmp_path / "run"))
    assert again.data.fingerprint() == model.data.fingerprint()
    assert again.evaluate().equals(model.evaluate())
    assert again.data.held_out_users is not None
    assert again.data.held_out_users.user_ids == model.data.held_out_users.user_ids
    other = fitted(rows(), capacities="1x-4x", split="users", split_seed=1)
    assert other.data.fingerprint() != model.data.fingerprint()
    with pytest.raises(InvalidData, match="that are not the same"):
        model.compare(other)
    with pytest.raises(InvalidData, match="Give the items of a new user"):
        model.recommend(model.data.held_out_users.user_ids[0])


@pytest.mark.parametrize("recipe", ["fair", "paper"])
def test_recipes_that_train_users_vectors_fold_new_ones_in(recipe: str) -> None:
    found = fitted(rows(20, 40), recipe=recipe, capacities="1x-2x", split="users", settings={"run.rounds": 1})
    table = found.evaluate(metrics="ndcg@20")
    assert table.loc["server", "users"] == 2
    assert table.loc["server", "ndcg@20"] == pytest.approx(found.result.quality)


@pytest.mark.parametrize("users", [12, 60])  # either side of EASE
@pytest.mark.parametrize("build", [Ridge, Ease, ItemNeighbors, ImplicitALS])
def test_baselines_fold_a_history_in_as_they_score_it(build: Any, users: int) -> None:
    pairs = (torch.rand(users, 30, generator=torch.Generator().manual_seed(users)) < 0.3).nonzero()
    train = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, 30)
    score, everybody = build(train), torch.arange(users)
    again = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, 30)
    assert torch.allclose(score.fold_in(again)(everybody), score(everybody), atol=1e-4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidData, match=r"split = 'users' of 2 users, 0 of them"):
        fitted([("a", "x"), ("b", "y")], split="users")
    rated = rows().with_columns(rating=polars.lit(3.0))
    with pytest.raises(InvalidSettings, match="held out, and algorithm"):
        fitted(rated, recipe="ratings", split="users", settings={})
    with pytest.raises(InvalidSettings, match="where users are held out"):
        fairfold.Model("1x", settings=QUICK).partial_fit(rows(), split="users", progress=False).partial_fit(rows())
