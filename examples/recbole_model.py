"""A model for RecBole: a federation of devices, trained on RecBole's split and measured by its evaluator.

python examples/recbole_model.py FOLDER DATASET    # needs `pip install recbole`; FOLDER/DATASET/DATASET.inter is there
"""

import sys
from typing import Any

import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.abstract_recommender import GeneralRecommender
from recbole.trainer import Trainer
from recbole.utils import InputType, ModelType
from torch import Tensor

import fairfold

OPTIONS = {"capacities": "1x-4x-16x", "recipe": "default"}


class Fairfold(GeneralRecommender):  # type: ignore[misc]
    """Trains when it is made, as RecBole's EASE does; its epochs have nothing left to do."""

    input_type = InputType.POINTWISE
    type = ModelType.TRADITIONAL

    def __init__(self, config: Any, dataset: Any, **options: Any) -> None:
        super().__init__(config, dataset)
        observed = dataset.inter_matrix(form="coo")
        self.nothing = torch.nn.Parameter(torch.zeros(1))
        self.model = fairfold.fit((observed.row, observed.col), split=1.0, progress=False, **OPTIONS | options)

    def calculate_loss(self, _: Any) -> Tensor:
        """No step follows from it."""
        return self.nothing.sum()

    def full_sort_predict(self, interaction: Any) -> Tensor:
        """Scores of all items, a row per user; what the model does not recommend is last."""
        users = interaction[self.USER_ID].tolist()
        scores = torch.full((len(users), self.n_items), -torch.inf)
        for row, user in zip(scores, users, strict=True):
            items, found = self.model.recommend(user, k=self.n_items)
            row[torch.from_numpy(items)] = torch.from_numpy(found)
        return scores.view(-1)

    def predict(self, interaction: Any) -> Tensor:
        """The score of one item for each user."""
        scores = self.full_sort_predict(interaction).view(-1, self.n_items)
        return scores.gather(1, interaction[self.ITEM_ID].view(-1, 1).cpu()).flatten()


def main(folder: str, dataset: str, **options: Any) -> tuple[Fairfold, Any, dict[str, float]]:
    """The model, the test interactions and RecBole's figures."""
    settings = {
        "data_path": folder, "load_col": {"inter": ["user_id", "item_id"]}, "metrics": ["NDCG", "Recall"], "topk": 10,
        "eval_args": {"split": {"RS": [0.7, 0.0, 0.3]}, "order": "RO", "group_by": "user", "mode": "full"},
        "valid_metric": "NDCG@10", "metric_decimal_place": 8, "show_progress": False, "use_gpu": False,
    }  # fmt: skip
    config = Config(model=Fairfold, dataset=dataset, config_dict=settings)
    train, _, test = data_preparation(config, create_dataset(config))
    model = Fairfold(config, train.dataset, **options)
    return model, test.dataset, Trainer(config, model).evaluate(test, load_best_model=False)


if __name__ == "__main__":
    print(main(*sys.argv[1:3])[2])
