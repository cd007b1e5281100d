"""Metrics by group of users, e.g. by size of device: does everyone gain, or only those with large ones?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.metrics.ranking import RankingResult
from fairfold.metrics.rating import RatingResult


@dataclass(frozen=True)
class GroupMeans:
    """Means over the evaluated users of one group.

    Attributes:
        group: The group's number.
        users: How many users of it were evaluated; groups without any are not listed.
        means: Mean of each metric over these users.
    """

    group: int
    users: int
    means: dict[str, float]


def by_group(result: RankingResult | RatingResult, groups: Tensor) -> tuple[GroupMeans, ...]:
    """Break a result down by group.

    Args:
        result: What :func:`~fairfold.metrics.evaluate_ranking` or :func:`~fairfold.metrics.evaluate_ratings`
            gave.
        groups: int64, the group of every user, evaluated or not.

    Returns:
        One entry a group that has evaluated users, by ascending number. For ratings each user counts the
        same, whereas the result's own ``mse`` counts each rating the same.
    """
    if groups.ndim != 1 or len(groups) <= int(result.users.max()):
        raise InvalidVector(
            f"groups of shape {list(groups.shape)}",
            f"one group a user, with user {int(result.users.max())} among them",
            "Give the group of every user of the data set.",
        )
    if isinstance(result, RankingResult):
        values = {
            "ndcg": result.ndcg_by_user,
            "recall": result.recall_by_user,
            "hit_rate": result.hit_by_user,
            "mrr": result.mrr_by_user,
        }
    else:
        values = {"mse": result.mse_by_user}
    numbers, member, counts = torch.unique(groups[result.users], return_inverse=True, return_counts=True)
    sums = {
        name: torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, member, column)
        for name, column in values.items()
    }
    return tuple(
        GroupMeans(int(number), int(count), {name: float(total[row] / count) for name, total in sums.items()})
        for row, (number, count) in enumerate(zip(numbers, counts, strict=True))
    )
