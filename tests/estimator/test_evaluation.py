"""Evaluation of fitted models: tables with intervals, other interactions, paired comparison, several splits."""

from typing import Any

import numpy
import polars
import pytest
import torch

import fairfold
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.estimator import Model
from tests.estimator.test_fit import QUICK, fitted, rows

pandas = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def model() -> Model:
    return fitted(rows(), capacities="1x-4x")


def test_a_row_per_model_and_an_interval_beside_each_metric(model: Model) -> None:
    table = model.evaluate(metrics=["NDCG@20", "recall@5", "coverage@10"], baselines=True)
    assert list(table.index[:4]) == ["server", "1x", "4x", "popularity"]
    assert [name.split(" of")[0] for name in table.index[4:]] == ["EASE", "iALS", "item-kNN"]
    assert list(table.columns) == ["users", "ndcg@20", "ndcg@20 ±", "recall@5", "recall@5 ±", "coverage@10"]
    assert table.loc["server", "ndcg@20"] == pytest.approx(model.result.quality)
    assert table.loc["4x", "ndcg@20"] == pytest.approx(model.result.groups[1].everybody)
    assert table.loc["popularity", "ndcg@20"] == pytest.approx(model.result.baselines["popularity"])
    assert (table["users"] == 60).all()


def test_other_interactions_in_place_of_the_held_out_ones(model: Model) -> None:
    wanted = model.evaluate().loc["server", "ndcg@20"]
    data = model.data
    test = polars.DataFrame({
        "user": [data.user_ids[user] for user in data.test.users.tolist()] + ["nobody"],  # type: ignore[index]
        "item": [data.item_ids[item] for item in data.test.items.tolist()] + ["i1"],  # type: ignore[index]
    })  # fmt: skip
    with pytest.warns(UserWarning, match="1 are left out"):
        assert model.evaluate(test).loc["server", "ndcg@20"] == pytest.approx(wanted)
    one = test.filter(polars.col("user") == test["user"][0])
    assert set(model.evaluate(one).index) == {"server", "1x", "4x", "popularity"}
    trained = data.train.users.tolist()[:3], data.train.items.tolist()[:3]
    seen = [(data.user_ids[user], data.item_ids[item]) for user, item in zip(*trained, strict=True)]  # type: ignore[index]
    with pytest.raises(InvalidData, match="a test of 3 interactions"):
        model.evaluate(seen)
    with pytest.raises(InvalidData, match=r"split=0\.7"):
        fitted(rows(), split=1.0).evaluate()


def test_a_size_that_serves_its_own_users_alone_is_evaluated_for_them() -> None:
    given: dict[str, Any] = {"recipe": "paper", "capacities": "1x-2x", "settings": {"run.rounds": 1}}
    found = fitted(rows(20, 60), **given)
    table = found.evaluate(metrics="hit@5")
    assert table.loc["1x", "users"] + table.loc["2x", "users"] == table.loc["server", "users"] == 20
    data = found.data
    first = [(data.user_ids[0], data.item_ids[item]) for item in data.test.of(0).tolist()]  # type: ignore[index]
    alone = found.evaluate(first, "hit@5")
    assert sorted(alone.loc[["1x", "2x"], "users"]) == [0, 1]


def test_errors_of_ratings() -> None:
    table = rows().with_columns(rating=polars.Series(numpy.random.default_rng(1).integers(1, 6, rows().height)))
    found = fitted(table, recipe="ratings", settings={"run.rounds": 2, "fleet.capacities": "1x"})
    errors = found.evaluate(metrics=["mse", "rmse", "mae"])
    assert errors.loc["server", "mse"] == pytest.approx(found.result.quality)
    assert errors.loc["server", "rmse"] == pytest.approx(found.result.quality**0.5)
    assert errors.loc["server", "mae"] <= errors.loc["server", "rmse"]
    with pytest.raises(InvalidSettings, match=r"metric 'ndcg@10' of a model of ratings; needed: one of mse, rmse, mae"):
        found.evaluate(metrics="ndcg@10")


def test_two_models_on_the_same_held_out_items(model: Model) -> None:
    weaker = fitted(rows(), capacities="64x")
    table = model.compare(weaker, ["ndcg@20", "recall@20"])
    row = table.loc["ndcg@20"]
    assert row["difference"] == pytest.approx(model.result.quality - weaker.result.quality)
    assert row["users"] == 60
    assert model.compare(model)["p"].tolist() == [1.0]
    assert -weaker.compare(model).loc["ndcg@20", "difference"] == pytest.approx(row["difference"])
    with pytest.raises(InvalidData, match="that are not the same"):
        model.compare(fitted(rows(), split=0.5))
    with pytest.raises(InvalidSettings, match="a value per user"):
        model.compare(weaker, "coverage@5")


def test_several_splits_have_a_row_per_split_and_model() -> None:
    table = fairfold.cross_validate(rows(), "1x", splits=2, metrics="recall@5", settings=QUICK, progress=False)
    assert list(table.index.names) == ["split", "model"]
    assert table.loc[(0, "server"), "recall@5"] != table.loc[(1, "server"), "recall@5"]
    first = fitted(rows(), capacities="1x").evaluate(metrics="recall@5")
    assert table.loc[(0, "server"), "recall@5"] == first.loc["server", "recall@5"]
    with pytest.raises(InvalidSettings, match="splits = 0"):
        fairfold.cross_validate(rows(), splits=0)


def test_habits_of_scikit_learn() -> None:
    from sklearn.base import clone

    first = fairfold.Model("1x-4x", rounds=1, settings={"algorithm.tune": False})
    assert repr(first) == "fairfold.Model(capacities='1x-4x', rounds=1, settings={'algorithm.tune': False})"
    with pytest.raises(InvalidSettings, match="a model that is not fitted"):
        first.recommend(3)
    copy = clone(first).set_params(capacities="1x")
    assert copy.get_params() == first.get_params() | {"capacities": "1x"}
    assert copy.fit(rows(), progress=False) is copy
    assert repr(copy) == repr(fitted(rows(), capacities="1x"))
    with pytest.raises(InvalidSettings, match=r"parameter 'capacity' \(did you mean 'capacities'\?\)"):
        copy.set_params(capacity="1x")


def test_partial_fit_goes_on_with_new_users_and_interactions() -> None:
    both = rows()
    early, late = both.filter(polars.col("user_id") < 40), both.filter(polars.col("user_id") >= 40)
    grown = fairfold.Model("1x", settings=QUICK).partial_fit(early, progress=False, split=1.0)
    assert grown.partial_fit(late, progress=False, split=1.0) is grown
    whole = fitted(both, capacities="1x", split=1.0)
    found, expected = (dict(zip(*one.recommend(50, k=80), strict=True)) for one in (grown, whole))
    assert found.keys() == expected.keys()
    # Items of equal popularity have other numbers, and are cut otherwise.
    assert all(abs(found[item] - expected[item]) < 0.01 for item in expected)


def test_an_explanation_is_what_the_score_loses_without_an_item(model: Model) -> None:
    mine = [model.data.item_ids[item] for item in model.data.train.of(4).tolist()]  # type: ignore[index]
    user = model.data.user_ids[4]  # type: ignore[index]
    best, scores = model.recommend(user, k=1)
    items, changes = model.explain(user, best[0], k=3)
    assert set(items) <= set(mine)
    assert (numpy.diff(changes) <= 0).all()
    without = model.recommend([item for item in mine if item != items[0]], k=80)
    now = dict(zip(without.items, without.scores, strict=True))[best[0]]
    assert scores[0] - now == pytest.approx(changes[0], abs=1e-5)
    assert list(model.explain(mine, best[0], k=3).items) == list(items)


def test_unknown_items_of_a_history_are_skipped_with_a_warning_or_refused(model: Model) -> None:
    with pytest.warns(UserWarning, match="1 of 2 items are not of the data and are skipped: 'none'"):
        found = model.recommend(["i3", "none"], k=3)
    assert list(found.items) == list(model.recommend(["i3"], k=3).items)
    with pytest.raises(InvalidData, match="item 'none'"):
        model.recommend(["i3", "none"], unknown="error")
    with pytest.warns(UserWarning, match="'7' \\(the id of a user; ask for several by users="):
        model.recommend(["7", "i3"])


def test_notes_of_repairs_survive_saving(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    twice = polars.concat([rows(), rows().head(3)])
    found = fairfold.fit(twice, "1x", settings=QUICK)
    printed = capsys.readouterr().out
    (note,) = [line for line in found.notes if line.startswith("3 ")]
    assert note in printed
    assert note in fairfold.load(found.save(tmp_path / "kept")).notes
    assert torch.equal(found.data.train.items, fitted(rows(), capacities="1x").data.train.items)


def test_a_file_and_a_table_tell_the_same_of_themselves(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    twice = polars.concat([rows(), rows().head(3)])
    twice.write_csv(tmp_path / "ratings.csv")
    from_file = fairfold.fit(tmp_path / "ratings.csv", "1x", settings=QUICK)
    printed = capsys.readouterr().out
    facts = [line for line in from_file.notes if line.startswith(("Split: ", "3 "))]
    assert len(facts) == 2
    assert all(line in printed for line in facts)
    assert facts == [line for line in fairfold.fit(twice, "1x", settings=QUICK).notes if line in facts]
    more = fairfold.fit(twice.head(3), settings=QUICK, start=from_file, split=1.0)
    assert "; then 1 of every user's interactions to train on" in "".join(more.notes)
    assert "3 duplicate pairs, the last one kept." in more.notes


@pytest.mark.parametrize(("column", "options"), [("timestamp", {}), ("member", {"time_column": "member"})])
def test_it_is_said_whether_the_times_of_a_table_are_used(column: str, options: dict[str, Any]) -> None:
    timed = rows().with_columns(polars.Series(column, range(rows().height)))
    unused = f"; the times in column {column!r} are not used (split = 'newest' would)."
    found = fairfold.fit(timed, "1x", settings=QUICK, progress=False, **options)
    assert sum(line.endswith(unused) for line in found.notes) == 1
    assert torch.equal(found.data.train.items, fitted(rows(), capacities="1x").data.train.items)
    newest = fairfold.fit(timed, "1x", settings=QUICK, progress=False, split="newest", **options)
    assert any(line.endswith(f"held out, by the times in column {column!r}.") for line in newest.notes)
