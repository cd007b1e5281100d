"""What training makes small: BPR and others for rankings."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional


def bpr_loss(positive: Tensor, negative: Tensor, embeddings: Iterable[Tensor] = (), weight: float = 1e-6) -> Tensor:
    """Bayesian personalised ranking (Rendle et al. 2009): a positive should score above a negative.

    The mean over pairs of -log σ(positive - negative), plus ``weight`` times the regulariser: half the squared norm
    of the embeddings the batch used, per sample. The paper uses a weight of 1e-6.

    The authors' released code means to sum the norms of six embeddings (user, positive and negative item, for both
    branches) but adds the norm of the user's embedding six times. Here each embedding given counts once.

    Args:
        positive: Scores of items users have, [batch] or [batch, 1].
        negative: Scores of items they do not have, [batch] or [batch, negatives per positive].
        embeddings: The embedding vectors the batch looked up, each [..., factors].
        weight: Weight of the regulariser.
    """
    if negative.ndim > positive.ndim:
        positive = positive[:, None]
    loss = -functional.logsigmoid(positive - negative).mean()
    if weight:
        samples = len(positive)
        for vectors in embeddings:
            loss = loss + weight * 0.5 * vectors.square().sum() / samples
    return loss


def sampled_softmax(scores: Tensor) -> Tensor:
    """For every sample -log of the probability that its first item is the one chosen among it and those drawn for it.

    Which of some candidates a user touched has the odds P(item | user) / Q(item) if the others were drawn by Q, so
    scores are log P after log Q is taken off. Where all items are drawn with the same chance, as here, log Q is one
    constant for all candidates, which a softmax does not see: nothing has to be corrected, however few are drawn.
    With one of them this is BPR.

    Args:
        scores: [samples, 1 + drawn].
    """
    return torch.logsumexp(scores, 1) - scores[:, 0]


def sampled_squares(scores: Tensor, weight: Tensor) -> Tensor:
    """Half the squared error of every sample: 1 is wanted for its first item, 0 for those drawn for it.

    A user with c of n items has c samples, with m drawn each from the n - c others. If a drawn item counts
    w·(n - c) / (c·m), the sum over the samples is in expectation half of Σ⁺ (1 - s)² + w·Σ⁻ s², over all n items: each
    of the others is drawn c·m / (n - c) times in the mean.

    Args:
        scores: [samples, 1 + drawn].
        weight: What a drawn item counts, [samples].
    """
    return 0.5 * ((1 - scores[:, 0]).square() + weight * scores[:, 1:].square().sum(1))
