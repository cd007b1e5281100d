"""Programs beside ours: LensKit's pipelines and RecBole's evaluator use our models, and MLflow keeps their picture."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.estimator.test_fit import QUICK, rows

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("recipe", ["default", "fair", "paper"])
def test_lenskit_trains_and_asks_the_scorer(recipe: str) -> None:
    pytest.importorskip("lenskit", reason="lenskit is not installed: pip install lenskit")
    from lenskit import recommend
    from lenskit.data import ItemList, from_interactions_df
    from lenskit.pipeline import topn_pipeline

    from examples.lenskit_scorer import FairfoldConfig, FairfoldScorer, main

    table = rows().to_pandas()
    settings = QUICK if recipe == "default" else {"run.rounds": 1}
    chosen = FairfoldConfig(capacities="1x-4x", recipe=recipe, settings=settings, scored_by="4x")
    scorer = FairfoldScorer(chosen)
    pipeline = topn_pipeline(scorer, n=5)
    pipeline.train(from_interactions_df(table))
    model = scorer.model
    assert len(model.data.train) == len(table)
    history = table[table["user_id"] == 7]["item_id"].tolist()
    expected = model.recommend(history, k=5, capacity="4x")
    found = recommend(pipeline, 7)
    assert sorted(found.ids().tolist()) == sorted(expected.items.tolist())
    assert found.scores().tolist() == pytest.approx(expected.scores.tolist())
    other = recommend(pipeline, ItemList(["i3"]))
    assert other.scores().tolist() == pytest.approx(model.recommend(["i3"], k=5, capacity="4x").scores.tolist())
    if recipe == "default":
        assert 0 < main(table) < 1


@pytest.mark.parametrize("recipe", ["default", "fair"])
def test_recboles_evaluator_finds_the_same_quality(recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("recbole", reason="recbole is not installed: make test-others installs it")
    for name in ("float_", "complex_", "unicode_"):  # RecBole asks numpy 2 for names that it has no more
        monkeypatch.setattr(numpy, name, float, raising=False)
    from examples.recbole_model import main

    (tmp_path / "books").mkdir()
    table = rows().to_pandas().rename(columns={"user_id": "user_id:token", "item_id": "item_id:token"})
    table.to_csv(tmp_path / "books" / "books.inter", sep="\t", index=False)
    monkeypatch.chdir(tmp_path)  # RecBole writes where it runs
    settings = QUICK if recipe == "default" else {"run.rounds": 1}
    ours, test, found = main(str(tmp_path), "books", recipe=recipe, capacities="1x-4x", settings=settings)
    pairs = list(zip(test.inter_feat["user_id"].tolist(), test.inter_feat["item_id"].tolist(), strict=True))
    mine = ours.model.evaluate(pairs, ["ndcg@10", "recall@10"]).loc["server"]
    assert found["ndcg@10"] == pytest.approx(mine["ndcg@10"], abs=1e-6)
    assert found["recall@10"] == pytest.approx(mine["recall@10"], abs=1e-6)


def test_mlflow_keeps_the_picture(tmp_path: Path, monkeypatch: Any) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'fairfold[mlflow]'")
    from examples.with_mlflow import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'runs'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = main(rows(), rounds=2, progress=False)
    client = mlflow.MlflowClient()
    assert "quality.png" in [file.path for file in client.list_artifacts(run)]
    assert client.get_run(run).data.metrics["quality/server"] > 0
