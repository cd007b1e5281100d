"""A scorer for LensKit: a federation of devices in the place of a model that sees all data.

python examples/lenskit_scorer.py    # needs `pip install lenskit pandas`; a synthetic world
"""

from typing import Any

import numpy
from lenskit.batch import recommend
from lenskit.data import Dataset, ItemList, ItemListCollection, RecQuery, from_interactions_df
from lenskit.metrics import NDCG, RunAnalysis
from lenskit.pipeline import Component, topn_pipeline
from lenskit.splitting import SampleFrac, crossfold_users
from lenskit.training import Trainable, TrainingOptions
from pydantic import BaseModel

import fairfold


class FairfoldConfig(BaseModel):
    """What a model is trained by, and whose model scores: that of the server, or of a device of some size."""

    capacities: str = "1x-4x-16x"
    recipe: str = "default"
    settings: dict[str, Any] = {}
    scored_by: str | None = None


class FairfoldScorer(Component[ItemList], Trainable):  # type: ignore[misc]
    """Scores items for a user of the training data, or for another one by the items of the query."""

    config: FairfoldConfig

    def train(self, data: Dataset, options: TrainingOptions | None = None) -> None:
        """Train on all interactions: LensKit has split them already."""
        if hasattr(self, "model") and options is not None and not options.retrain:
            return
        chosen, table = self.config, data.interactions().pandas(ids=True)[["user_id", "item_id"]]
        self.model = fairfold.fit(
            table, chosen.capacities, recipe=chosen.recipe, settings=chosen.settings, split=1.0, progress=False
        )

    def __call__(self, query: RecQuery, items: ItemList) -> ItemList:
        """Scores of items; NaN for what the user has already, or the model does not know."""
        if query.query_items is None or not len(query.query_items):
            return ItemList(items, scores=numpy.nan)
        history = [item for item in query.query_items.ids().tolist() if item in self.model.item_index]
        found = self.model.recommend(history, k=self.model.data.num_items, capacity=self.config.scored_by)
        scores = dict(zip(found.items.tolist(), found.scores.tolist(), strict=True))
        return ItemList(items, scores=[scores.get(item, numpy.nan) for item in items.ids().tolist()])


def main(table: Any) -> float:
    """NDCG@10, as LensKit measures it, of a fifth of every user's items."""
    (split,) = crossfold_users(from_interactions_df(table), 1, SampleFrac(0.2), rng=0)
    pipeline = topn_pipeline(FairfoldScorer(), n=10)
    pipeline.train(split.train)
    analysis = RunAnalysis()
    analysis.add_metric(NDCG(10))
    run: ItemListCollection = recommend(pipeline, split.test.keys(), 10, n_jobs=1)
    return float(analysis.measure(run, split.test).list_metrics().mean().iloc[0])


if __name__ == "__main__":
    import pandas

    from fairfold.data.synthetic import SyntheticDataset

    world = SyntheticDataset(users=200, items=400, interactions_per_user=40).dataset().train
    print(f"NDCG@10 {main(pandas.DataFrame({'user_id': world.users.numpy(), 'item_id': world.items.numpy()})):.4f}")
