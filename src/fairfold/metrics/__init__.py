"""How good a model is: ranking, rating and classification metrics, and reference recommenders beside them."""

from fairfold.metrics.ranking import RankingResult, evaluate_ranking

__all__ = ["RankingResult", "evaluate_ranking"]
