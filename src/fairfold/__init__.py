"""fairfold: federated learning of embedding tables on devices of every size.

The front door. Everything else is reached by module path, e.g. ``fairfold.nn.FairEmbedding``.
"""

from fairfold.errors import FairfoldError
from fairfold.subspace import Subspace

__version__ = "0.1.0"

__all__ = ["FairfoldError", "Subspace", "__version__"]
