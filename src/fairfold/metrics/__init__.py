"""How good a model is: ranking, rating and classification metrics, and reference recommenders beside them."""

from fairfold.metrics.groups import GroupMeans, by_group
from fairfold.metrics.ranking import RankingResult, evaluate_ranking
from fairfold.metrics.rating import RatingResult, accuracy, evaluate_ratings

__all__ = [
    "GroupMeans",
    "RankingResult",
    "RatingResult",
    "accuracy",
    "by_group",
    "evaluate_ranking",
    "evaluate_ratings",
]
