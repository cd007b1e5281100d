"""Squared error and accuracy, against sums anyone can check."""

import pytest
import torch

from fairfold.data.interactions import Interactions
from fairfold.errors import InvalidData, InvalidVector
from fairfold.metrics import accuracy, evaluate_ratings, rating


def rated() -> Interactions:
    users, items = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 3, 0, 1, 2])
    return Interactions.from_pairs(users, items, 4, 5, torch.tensor([5.0, 3.0, 1.0, 2.0, 4.0]))


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_squared_error_over_ratings(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rating, "BATCH_PAIRS", batch)
    found = evaluate_ratings(lambda users, items: torch.full((len(users),), 3.0), rated())
    assert found == pytest.approx((4 + 0 + 4 + 1 + 1) / 5)


def test_shares_of_users_have_the_mean_of_the_errors() -> None:
    errors = rating.rating_errors(lambda users, items: torch.full((len(users),), 3.0), rated())
    shares = rating.error_shares(errors, rated().users)
    assert shares.tolist() == pytest.approx([4 * 2 / 5, 6 * 2 / 5])  # of two users with ratings
    assert float(shares.mean()) == pytest.approx(float(errors.mean()))


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
