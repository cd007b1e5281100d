"""Models of the paper's experiments, as plain modules of standard layers; their losses; the recommenders' base."""

from fairfold.models.lenet import LeNet
from fairfold.models.losses import bpr_loss, sampled_softmax, sampled_squares
from fairfold.models.mf import MF
from fairfold.models.mlp import MLP
from fairfold.models.neumf import NeuMF
from fairfold.models.neumf_mlp import NeuMFMLP
from fairfold.models.recommender import Recommender
from fairfold.models.scoring import predictor, scorer

__all__ = [
    "MF",
    "MLP",
    "LeNet",
    "NeuMF",
    "NeuMFMLP",
    "Recommender",
    "bpr_loss",
    "predictor",
    "sampled_softmax",
    "sampled_squares",
    "scorer",
]
