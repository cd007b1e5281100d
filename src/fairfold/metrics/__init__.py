"""Metrics of rankings, ratings and classes, and central baselines."""

from fairfold.metrics.ranking import RankingResult, evaluate_ranking
from fairfold.metrics.rating import accuracy, evaluate_ratings

__all__ = ["RankingResult", "accuracy", "evaluate_ranking", "evaluate_ratings"]
