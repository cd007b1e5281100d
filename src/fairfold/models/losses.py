"""Ranking losses of samples: an item that the user has, and sampled negatives."""

import torch
from torch import Tensor
from torch.nn import functional


def sampled_bpr(scores: Tensor) -> Tensor:
    """Bayesian personalised ranking (Rendle et al. 2009): mean of -log σ(first - drawn) of [samples, 1 + drawn]."""
    return -functional.logsigmoid(scores[:, :1] - scores[:, 1:]).mean(1)


def sampled_softmax(scores: Tensor) -> Tensor:
    """-log of the probability that the first item of [samples, 1 + drawn] is the one chosen among them.

    Items are drawn with equal chance, so log Q is a constant that a softmax does not see: nothing has to be corrected,
    however few are drawn. With one of them this is BPR.
    """
    return torch.logsumexp(scores, 1) - scores[:, 0]


def sampled_squares(scores: Tensor, weight: Tensor) -> Tensor:
    """Half the squared error: 1 is wanted for the first item of [samples, 1 + drawn], 0 for the others.

    A user with c of n items has c samples, with m drawn each from the n - c others. With a weight of w·(n - c) / (c·m)
    the sum over the samples is in expectation half of Σ⁺ (1 - s)² + w·Σ⁻ s², over all n items.
    """
    return 0.5 * ((1 - scores[:, 0]).square() + weight * scores[:, 1:].square().sum(1))
