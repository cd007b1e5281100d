"""The ranking metrics agree with scikit-learn and with trec_eval, which the field compares itself to."""

import pytest
import pytrec_eval
import torch
from sklearn.metrics import ndcg_score
from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.metrics.ranking import evaluate_ranking


def random_case(seed: int, users: int = 12, items: int = 120) -> tuple[Tensor, Interactions, Interactions]:
    """Distinct scores (the other programs break ties otherwise) and disjoint train and test sets."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(users, items, generator=generator).argsort(1).float()
    owner = torch.randint(5, (users, items), generator=generator)
    parts = [(owner == part).nonzero() for part in (0, 1)]
    train, test = (Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items) for pairs in parts)
    return scores, train, test


@pytest.mark.parametrize("k", [1, 5, 20, 100])
@pytest.mark.parametrize("seed", range(5))
def test_ndcg_equals_that_of_scikit_learn(seed: int, k: int) -> None:
    scores, train, test = random_case(seed)
    result = evaluate_ranking(lambda users: scores[users], train, test, k)
    for row, user in enumerate(result.users.tolist()):
        candidates = torch.ones(test.num_items, dtype=torch.bool)
        candidates[train.of(user)] = False
        relevant = torch.zeros(test.num_items)
        relevant[test.of(user)] = 1
        expected = ndcg_score(relevant[candidates][None].numpy(), scores[user][candidates][None].numpy(), k=k)
        assert float(result.ndcg_by_user[row]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("k", [5, 20])
@pytest.mark.parametrize("seed", range(5))
def test_ndcg_equals_that_of_trec_eval(seed: int, k: int) -> None:
    scores, train, test = random_case(seed)
    result = evaluate_ranking(lambda users: scores[users], train, test, k)
    wanted = {str(user): {str(item): 1 for item in test.of(user).tolist()} for user in range(test.num_users)}
    run = {}
    for user in range(test.num_users):
        unseen = set(range(test.num_items)) - set(train.of(user).tolist())
        run[str(user)] = {str(item): float(scores[user, item]) for item in unseen}
    found = pytrec_eval.RelevanceEvaluator(wanted, {f"ndcg_cut.{k}"}).evaluate(run)
    for row, user in enumerate(result.users.tolist()):
        assert float(result.ndcg_by_user[row]) == pytest.approx(found[str(user)][f"ndcg_cut_{k}"], abs=1e-9)
