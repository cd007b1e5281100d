"""What training makes small: BPR for rankings, squared error for ratings, cross-entropy for classes."""

from collections.abc import Iterable

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


def squared_error(predicted: Tensor, given: Tensor) -> Tensor:
    """Mean squared difference of predicted and given ratings."""
    return functional.mse_loss(predicted, given)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over samples of -log of the probability given to the label."""
    return functional.cross_entropy(logits, labels)
