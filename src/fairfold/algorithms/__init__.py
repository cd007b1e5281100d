"""Algorithms, one per file or package: one from outside registers itself (:mod:`fairfold.federation.plugins`)."""

from fairfold.algorithms.closed_form import ClosedForm
from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.gradient import Central, Gradient, ImageGradient
from fairfold.algorithms.ratings import BayesianRatings
from fairfold.federation.algorithm import Algorithm

ALGORITHMS: tuple[type[Algorithm], ...] = (
    Gradient, ClosedForm, BayesianRatings, ImageGradient, Central, CoOccurrence
)  # fmt: skip

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BayesianRatings",
    "Central",
    "ClosedForm",
    "CoOccurrence",
    "Gradient",
    "ImageGradient",
]
