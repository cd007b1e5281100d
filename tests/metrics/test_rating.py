"""Squared error, accuracy, and breakdowns by group, against sums anyone can check."""

import pytest
import torch

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData, InvalidVector
from fairfold.metrics import accuracy, by_group, evaluate_ranking, evaluate_ratings


def rated() -> Interactions:
    users, items = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 3, 0, 1, 2])
    return Interactions.from_pairs(users, items, 4, 5, torch.tensor([5.0, 3.0, 1.0, 2.0, 4.0]))


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_squared_error_over_ratings_and_by_user(batch: int) -> None:
    result = evaluate_ratings(lambda users, items: torch.full((len(users),), 3.0), rated(), batch=batch)
    assert result.mse == pytest.approx((4 + 0 + 4 + 1 + 1) / 5)
    assert result.rmse == pytest.approx(2.0**0.5)
    assert (result.ratings, result.left_out, result.users.tolist()) == (5, 2, [0, 2])
    assert result.mse_by_user.tolist() == [2.0, 2.0]


def test_ratings_that_cannot_be_compared_are_refused() -> None:
    implicit = Interactions.from_pairs(torch.tensor([0]), torch.tensor([0]), 1, 1)
    nothing = torch.tensor([]).long()
    empty = Interactions.from_pairs(nothing, nothing, 1, 1, torch.tensor([]))
    with pytest.raises(InvalidData, match="implicit"):
        evaluate_ratings(lambda users, items: users.float(), implicit)
    with pytest.raises(InvalidData, match="no test ratings"):
        evaluate_ratings(lambda users, items: users.float(), empty)
    with pytest.raises(InvalidVector, match="shape"):
        evaluate_ratings(lambda users, items: torch.zeros(len(users), 1), rated())
    with pytest.raises(InvalidVector, match="NaN"):
        evaluate_ratings(lambda users, items: torch.full((len(users),), torch.nan), rated())


def test_accuracy_counts_the_lowest_class_among_equals() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 3.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
    assert accuracy(logits, torch.tensor([1, 0, 2, 2])) == 0.75
    with pytest.raises(InvalidVector, match="NaN"):
        accuracy(logits * torch.nan, torch.tensor([1, 0, 2, 2]))
    with pytest.raises(InvalidVector, match="labels"):
        accuracy(logits, torch.tensor([1, 0, 2]))


def test_a_breakdown_has_the_means_of_each_group() -> None:
    train = Interactions.from_pairs(torch.tensor([0]), torch.tensor([0]), 5, 6)
    test = Interactions.from_pairs(torch.tensor([0, 1, 3, 4, 4]), torch.tensor([5, 4, 0, 5, 3]), 5, 6)
    result = evaluate_ranking(lambda users: torch.arange(6.0).expand(len(users), -1), train, test, 2)
    groups = by_group(result, torch.tensor([0, 7, 1, 7, 0]))
    assert [(group.group, group.users) for group in groups] == [(0, 2), (7, 2)]
    for group, rows in zip(groups, ([0, 3], [1, 2]), strict=True):
        assert group.means["ndcg"] == pytest.approx(float(result.ndcg_by_user[rows].mean()))
        assert group.means["recall"] == pytest.approx(float(result.recall_by_user[rows].mean()))
        assert group.means["mrr"] == pytest.approx(float(result.mrr_by_user[rows].mean()))
    ratings = evaluate_ratings(lambda users, items: torch.full((len(users),), 3.0), rated())
    assert by_group(ratings, torch.tensor([1, 1, 2, 2]))[1].means == {"mse": 2.0}
    with pytest.raises(InvalidVector, match="user 4"):
        by_group(result, torch.tensor([0, 1]))
