"""What devices compute and what the server makes of it, one algorithm per file.

A new algorithm of fairfold's own is a file here and a line in :data:`ALGORITHMS`; one from outside registers itself
(:mod:`fairfold.protocol.plugins`).
"""

from fairfold.algorithms.central import Central
from fairfold.algorithms.closed_form import ClosedForm
from fairfold.algorithms.correlations import Correlations
from fairfold.algorithms.gradient import Gradient
from fairfold.algorithms.images import Images
from fairfold.algorithms.ratings import RatingSquares
from fairfold.protocol.algorithm import Algorithm

ALGORITHMS: tuple[type[Algorithm], ...] = (
    Gradient, ClosedForm, RatingSquares, Images, Central, Correlations
)  # fmt: skip

__all__ = [
    "ALGORITHMS", "Algorithm", "Central", "ClosedForm", "Correlations", "Gradient", "Images",
    "RatingSquares"
]  # fmt: skip
