"""User-kNN: what users with similar shelves have."""

from torch import Tensor

from fairfold.data.interactions import Interactions
from fairfold.metrics.references.matrix import BinaryMatrix


class UserNeighbours:
    """Scores an item by the users that have it, each weighted by its cosine similarity to a power.

    Every other user is a neighbour; the power (3) makes the near ones count. The user itself is left out.
    Similarities are computed for the users asked for, so memory grows with the batch and not with users².
    """

    name = "user-kNN"

    def __init__(self, train: Interactions, power: float = 3.0) -> None:
        self._matrix = BinaryMatrix(train)
        self._lengths = train.counts_by_user.clamp(min=1).sqrt()
        self._power = power

    def __call__(self, users: Tensor) -> Tensor:
        """Scores of all items, [users, items]."""
        common = self._matrix.times(self._matrix.rows(users).T)  # [all users, users]
        cosine = common / (self._lengths[:, None] * self._lengths[users])
        cosine[users, range(len(users))] = 0
        return self._matrix.transposed_times(cosine**self._power).T
