"""Models of the paper's experiments, as plain modules of standard layers; their losses; the recommenders' base."""

from fairfold.models.images import MLP, LeNet
from fairfold.models.losses import sampled_bpr, sampled_softmax, sampled_squares
from fairfold.models.mf import MF
from fairfold.models.neumf import NeuMF, NeuMFMLP
from fairfold.models.recommender import Recommender
from fairfold.models.scoring import predictor, scorer

__all__ = [
    "MF", "MLP", "LeNet", "NeuMF", "NeuMFMLP", "Recommender", "predictor", "sampled_bpr", "sampled_softmax",
    "sampled_squares", "scorer",
]  # fmt: skip
