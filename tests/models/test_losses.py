"""Losses against their formulas, one sample at a time."""

import math

import pytest
import torch

from fairfold.models import bpr_loss, sampled_softmax, sampled_squares


def test_bpr_is_the_mean_over_pairs_of_the_log_sigmoid() -> None:
    positive, negative = torch.tensor([1.0, -2.0]), torch.tensor([[0.5, 3.0], [-2.0, -4.0]])
    expected = [
        math.log(1 + math.exp(-(above - below)))
        for above, row in zip(positive.tolist(), negative.tolist(), strict=True)
        for below in row
    ]
    assert float(bpr_loss(positive, negative)) == pytest.approx(sum(expected) / 4, rel=1e-6)
    single = bpr_loss(positive, negative[:, 0])
    assert float(single) == pytest.approx((expected[0] + expected[2]) / 2, rel=1e-6)


def test_the_regulariser_counts_every_embedding_once_per_sample() -> None:
    scores = torch.zeros(2)
    vectors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])]
    plain = float(bpr_loss(scores, scores, vectors, weight=0))
    assert plain == pytest.approx(math.log(2))
    penalised = float(bpr_loss(scores, scores, vectors, weight=0.1))
    assert penalised - plain == pytest.approx(0.1 * 0.5 * (30 + 2) / 2, rel=1e-5)


def test_extreme_scores_stay_finite() -> None:
    loss = bpr_loss(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert float(loss) == pytest.approx(2e4)
    assert sampled_softmax(torch.tensor([[-1e4, 1e4, 0.0]])).tolist() == pytest.approx([2e4])


def test_the_softmax_is_a_choice_among_the_candidates() -> None:
    scores = torch.tensor([[1.0, 0.5, 3.0], [-2.0, -2.0, -4.0]])
    expected = [-math.log(math.exp(row[0]) / sum(map(math.exp, row))) for row in scores.tolist()]
    assert sampled_softmax(scores).tolist() == pytest.approx(expected, rel=1e-6)
    pairs = scores[:, :2]
    assert float(sampled_softmax(pairs).mean()) == pytest.approx(float(bpr_loss(pairs[:, 0], pairs[:, 1])), rel=1e-6)


def test_sampled_squares_weigh_what_is_drawn() -> None:
    scores, weight = torch.tensor([[0.5, 1.0, -2.0], [2.0, 0.0, 0.1]]), torch.tensor([0.3, 7.0])
    expected = [(0.25 + 0.3 * 5) / 2, (1 + 7 * 0.01) / 2]
    assert sampled_squares(scores, weight).tolist() == pytest.approx(expected, rel=1e-6)
