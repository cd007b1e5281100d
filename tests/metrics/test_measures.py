"""Metrics by name: they agree with trec_eval, and with the definitions by hand."""

import math
from typing import Any

import pytest
import pytrec_eval
import torch

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidSettings
from fairfold.metrics.ranking import Measure, measure_ranking, paired_test
from tests.metrics.test_agreement import random_case

TREC = {
    "ndcg@5": "ndcg_cut_5", "recall@20": "recall_20", "precision@5": "P_5", "hit@5": "success_5", "mrr": "recip_rank",
    "map": "map", "map@20": "map_cut_20", "recall@200": "recall_200",
}  # fmt: skip


def measured(names: list[str], scores: torch.Tensor, train: Interactions, test: Interactions) -> Any:
    measures = [Measure.parse(name, 20) for name in names]
    return measure_ranking(lambda users: scores[users], train, test, measures, torch.arange(test.num_users))


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_those_of_trec_eval_for_every_user(seed: int) -> None:
    scores, train, test = random_case(seed)
    found = measured(list(TREC), scores, train, test)
    wanted: dict[str, dict[str, int]] = {}
    for user, item in zip(test.users.tolist(), test.items.tolist(), strict=True):
        wanted.setdefault(str(user), {})[str(item)] = 1
    run = {
        user: {
            str(item): float(score)
            for item, score in enumerate(scores[int(user)])
            if item not in set(train.of(int(user)).tolist())
        }
        for user in wanted
    }
    expected = pytrec_eval.RelevanceEvaluator(wanted, set(TREC.values())).evaluate(run)
    users = [str(user) for user in sorted(map(int, wanted))]
    for mine, theirs in TREC.items():
        values = torch.tensor([expected[user][theirs] for user in users], dtype=torch.float64)
        assert torch.allclose(found[mine].by_user, values, atol=1e-6), mine
        assert found[mine].value == pytest.approx(float(values.mean()), abs=1e-6)


def test_coverage_and_novelty_by_hand() -> None:
    train = Interactions.from_pairs(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 0, 1]), 4, 4)
    test = Interactions.from_pairs(torch.tensor([0, 3]), torch.tensor([1, 2]), 4, 4)
    scores = torch.tensor([[9.0, 8, 7, 6]]).expand(4, -1)
    found = measured(["coverage@1", "coverage@2", "novelty@1"], scores, train, test)
    assert found["coverage@1"].by_user.numel() == 0, "it is of all users together"
    assert found["coverage@1"].value == 2 / 4  # user 0 gets item 1, user 3 item 0; the others have no test items
    assert found["coverage@2"].value == 3 / 4  # and items 2 and 2
    assert found["novelty@1"].by_user.tolist() == pytest.approx([2.0, -math.log2(3 / 4)])


def test_an_interval_is_the_standard_error_of_the_mean_over_users() -> None:
    scores, train, test = random_case(7)
    found = measured(["recall@10"], scores, train, test)["recall@10"]
    values = found.by_user.tolist()
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    assert found.half_width == pytest.approx(1.96 * deviation / math.sqrt(len(values)), rel=1e-4)


@pytest.mark.parametrize(("name", "message"), [
    ("ndgc@10", r"metric 'ndgc@10' \(did you mean 'ndcg'\?\)"), ("recall@0", "recall@0"), ("ndcg@ten", "Write ndcg@10"),
])  # fmt: skip
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        Measure.parse(name, 20)


def test_names_are_read_as_people_write_them() -> None:
    assert str(Measure.parse("NDCG@20", 5)) == "ndcg@20"
    assert Measure.parse("coverage", 5) == Measure("coverage", 5)
    assert Measure.parse("mrr", 5) == Measure("mrr", None)


def test_the_p_value_is_the_share_of_signs_that_are_as_far() -> None:
    first, second = torch.tensor([3.0, 1, 2, 5], dtype=torch.float64), torch.tensor([1.0, 2, 0, 2], dtype=torch.float64)
    difference = [2.0, -1, 2, 3]
    signs = [[1 - 2 * (number >> place & 1) for place in range(4)] for number in range(16)]
    means = [abs(sum(sign * of for sign, of in zip(one, difference, strict=True))) for one in signs]
    exact = sum(mean >= 6 for mean in means) / 16
    found, p_value = paired_test(first, second, draws=20_000)
    assert found.value == 1.5
    assert p_value == pytest.approx(exact, abs=0.01)
    assert paired_test(first, first)[1] == 1
