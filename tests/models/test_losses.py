"""Losses against their formulas, one sample at a time."""

import math

import pytest
import torch

from fairfold.models import sampled_bpr, sampled_softmax, sampled_squares


def test_bpr_is_the_mean_over_pairs_of_the_log_sigmoid() -> None:
    scores = torch.tensor([[1.0, 0.5, 3.0], [-2.0, -2.0, -4.0]])
    expected = [
        sum(math.log(1 + math.exp(-(first - below))) for below in drawn) / 2 for first, *drawn in scores.tolist()
    ]
    assert sampled_bpr(scores).tolist() == pytest.approx(expected, rel=1e-6)


def test_extreme_scores_stay_finite() -> None:
    assert sampled_bpr(torch.tensor([[-1e4, 1e4]])).tolist() == pytest.approx([2e4])
    assert sampled_softmax(torch.tensor([[-1e4, 1e4, 0.0]])).tolist() == pytest.approx([2e4])


def test_the_softmax_is_a_choice_among_the_candidates() -> None:
    scores = torch.tensor([[1.0, 0.5, 3.0], [-2.0, -2.0, -4.0]])
    expected = [-math.log(math.exp(row[0]) / sum(map(math.exp, row))) for row in scores.tolist()]
    assert sampled_softmax(scores).tolist() == pytest.approx(expected, rel=1e-6)
    pairs = scores[:, :2]
    assert sampled_softmax(pairs).tolist() == pytest.approx(sampled_bpr(pairs).tolist(), rel=1e-6)


def test_sampled_squares_weigh_what_is_drawn() -> None:
    scores, weight = torch.tensor([[0.5, 1.0, -2.0], [2.0, 0.0, 0.1]]), torch.tensor([0.3, 7.0])
    expected = [(0.25 + 0.3 * 5) / 2, (1 + 7 * 0.01) / 2]
    assert sampled_squares(scores, weight).tolist() == pytest.approx(expected, rel=1e-6)
