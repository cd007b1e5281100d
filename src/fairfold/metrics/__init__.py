"""How good a model is: ranking, rating and classification metrics, and reference recommenders beside them."""

from fairfold.metrics.ranking import RankingResult, evaluate_ranking
from fairfold.metrics.rating import accuracy, evaluate_ratings

__all__ = ["RankingResult", "accuracy", "evaluate_ranking", "evaluate_ratings"]
