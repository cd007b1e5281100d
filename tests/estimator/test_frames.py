"""Splits of other programs come in, and recommendations go out to be evaluated by them."""

from pathlib import Path
from typing import Any

import numpy
import pytest

import fairfold
from fairfold.errors import InvalidData, InvalidSettings
from tests.estimator.test_fit import QUICK, fitted, rows

pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")


@pytest.fixture(scope="module")
def split() -> tuple[Any, Any]:
    """A split that somebody else has made: every user's last three interactions."""
    table = pandas.DataFrame(rows().to_dicts())
    place = table.groupby("user_id").cumcount(ascending=False)
    return table[place >= 3], table[place < 3]


def pairs(table: Any) -> set[tuple[Any, Any]]:
    return set(zip(table["user_id"].tolist(), table["item_id"].tolist(), strict=True))


def test_a_split_from_elsewhere_is_kept(split: tuple[Any, Any]) -> None:
    train, test = split
    model = fitted(train, test=test)
    assert pairs(model.to_qrels()) == pairs(test)
    assert len(model.data.train) == len(train)
    assert not pairs(model.to_run(5)) & pairs(train)


OF_TREC = {
    "ndcg@20": "ndcg_cut_20",
    "recall@20": "recall_20",
    "precision@5": "P_5",
    "hit@5": "success_5",
    "mrr": "recip_rank",
    "map": "map",
}


@pytest.mark.parametrize("capacity", [None, "16x"])
def test_trec_eval_finds_the_same_six_metrics(split: tuple[Any, Any], capacity: str | None) -> None:
    trec = pytest.importorskip("pytrec_eval", reason="pytrec_eval is not installed: pip install pytrec_eval-terrier")
    model = fitted(split[0], test=split[1], capacities="1x-16x")
    mine = model.evaluate(metrics=list(OF_TREC)).loc[capacity or "server"]
    qrels: dict[str, dict[str, int]] = {}
    for user, item in pairs(model.to_qrels()):
        qrels.setdefault(str(user), {})[str(item)] = 1
    run: dict[str, dict[str, float]] = {}
    for row in model.to_run(80, capacity=capacity).itertuples():
        run.setdefault(str(row.user_id), {})[str(row.item_id)] = -float(row.rank)  # scores may be equal, ranks not
    evaluated = trec.RelevanceEvaluator(qrels, set(OF_TREC.values())).evaluate(run)
    for name, theirs in OF_TREC.items():
        assert 0 < mine[name] < 1
        assert numpy.mean([of[theirs] for of in evaluated.values()]) == pytest.approx(mine[name], abs=1e-6), name


def test_the_tables_have_the_columns_of_lenskit(split: tuple[Any, Any]) -> None:
    run = fitted(split[0], test=split[1]).to_run(4)
    assert list(run.columns) == ["user_id", "item_id", "rank", "score"]
    assert run["user_id"].dtype == numpy.int64
    assert (run.groupby("user_id")["rank"].max() == 4).all()
    assert run.groupby("user_id")["score"].apply(lambda scores: scores.is_monotonic_decreasing).all()


@pytest.mark.parametrize("package", ["lenskit", "ranx"])
@pytest.mark.filterwarnings("ignore")
def test_the_programs_themselves(package: str, split: tuple[Any, Any]) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    model = fitted(split[0], test=split[1])
    wanted, run, qrels = model.evaluate().loc["server", "ndcg@20"], model.to_run(20), model.to_qrels()
    if package == "lenskit":
        from lenskit.data import ItemListCollection
        from lenskit.metrics import NDCG, RunAnalysis

        analysis = RunAnalysis()
        # At its defaults LensKit counts the second place as much as the first.
        analysis.add_metric(NDCG(20, discount=lambda rank: numpy.log2(rank + 1)))
        lists = ItemListCollection.from_df(run, ["user_id"]), ItemListCollection.from_df(qrels, ["user_id"])
        found = float(analysis.measure(*lists).list_metrics().mean().iloc[0])
    else:
        import ranx

        texts, plain = {"user_id": str, "item_id": str}, {"user_id": object, "item_id": object}  # not of pandas 3
        ranked = run.astype(texts).astype(plain).assign(score=-run["rank"].astype(float))
        evaluated = qrels.astype(texts).astype(plain | {"rating": int})
        found = ranx.evaluate(
            ranx.Qrels.from_df(evaluated, q_id_col="user_id", doc_id_col="item_id", score_col="rating"),
            ranx.Run.from_df(ranked, q_id_col="user_id", doc_id_col="item_id", score_col="score"), "ndcg@20",
        )  # fmt: skip
    assert found == pytest.approx(wanted, abs=1e-6)


def test_recbole_splits_in_a_folder(split: tuple[Any, Any], tmp_path: Path) -> None:
    train, test = split
    folder = tmp_path / "books"
    folder.mkdir()
    names = {"user_id": "user_id:token", "item_id": "item_id:token"}
    for name, part in (("train", train), ("test", test)):
        part.rename(columns=names).to_csv(folder / f"books.{name}.inter", sep="\t", index=False)
    (folder / "books.item").write_text("item_id:token\tmovie_title:token_seq\ni3\tThe Third\n")
    model = fairfold.fit(folder, settings=QUICK, progress=False)
    assert pairs(model.to_qrels()) == pairs(test)
    assert model.data.titles is not None
    assert "The Third" in model.data.titles


def test_what_does_not_go_together_is_refused(split: tuple[Any, Any], tmp_path: Path) -> None:
    train, test = split
    with pytest.raises(InvalidSettings, match="split or resplit beside test"):
        fitted(train, test=test, split=0.5)
    with pytest.raises(InvalidData, match="both as tables"):
        fitted(tmp_path / "some.csv", test=test)
