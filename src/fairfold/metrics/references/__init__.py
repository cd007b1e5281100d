"""Reference recommenders, so that no figure ever stands alone.

Each is built from a training set and then scores users. All of them see every user's data in one place, which
a federation does not. They run on the CPU.
"""

from fairfold.metrics.references.neighbours import UserNeighbours
from fairfold.metrics.references.popularity import Popularity
from fairfold.metrics.references.pure_svd import PureSVD
from fairfold.metrics.references.ratings import Means
from fairfold.metrics.references.ridge import Ridge

__all__ = ["Means", "Popularity", "PureSVD", "Ridge", "UserNeighbours"]
