"""What training makes small where items are ranked, for every sample: an item the user has, and some drawn for it."""

import torch
from torch import Tensor
from torch.nn import functional


def sampled_bpr(scores: Tensor) -> Tensor:
    """Bayesian personalised ranking (Rendle et al. 2009): the first item of [samples, 1 + drawn] should score highest.

    The mean over those drawn of -log σ(first - drawn).
    """
    return -functional.logsigmoid(scores[:, :1] - scores[:, 1:]).mean(1)


def sampled_softmax(scores: Tensor) -> Tensor:
    """-log of the probability that the first item of [samples, 1 + drawn] is the one chosen among them.

    Which of some candidates a user touched has the odds P(item | user) / Q(item) if the others were drawn by Q, so
    scores are log P after log Q is taken off. Where all items are drawn with the same chance, as here, log Q is one
    constant for all candidates, which a softmax does not see: nothing has to be corrected, however few are drawn.
    With one of them this is BPR.
    """
    return torch.logsumexp(scores, 1) - scores[:, 0]


def sampled_squares(scores: Tensor, weight: Tensor) -> Tensor:
    """Half the squared error: 1 is wanted for the first item of [samples, 1 + drawn], 0 for the others.

    A user with c of n items has c samples, with m drawn each from the n - c others. If a drawn item has the weight
    w·(n - c) / (c·m), the sum over the samples is in expectation half of Σ⁺ (1 - s)² + w·Σ⁻ s², over all n items: each
    of the others is drawn c·m / (n - c) times in the mean.
    """
    return 0.5 * ((1 - scores[:, 0]).square() + weight * scores[:, 1:].square().sum(1))
