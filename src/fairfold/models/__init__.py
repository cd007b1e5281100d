"""Models of the paper's experiments as plain torch modules, their losses, and the base class of recommenders."""

from fairfold.models.factorization import MF, NeuMF, NeuMFMLP
from fairfold.models.images import MLP, LeNet
from fairfold.models.recommender import Recommender, predictor, sampled_bpr, sampled_softmax, sampled_squares, scorer

__all__ = [
    "MF", "MLP", "LeNet", "NeuMF", "NeuMFMLP", "Recommender", "predictor", "sampled_bpr", "sampled_softmax",
    "sampled_squares", "scorer",
]  # fmt: skip
