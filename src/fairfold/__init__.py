"""fairfold: federated learning of embedding tables on devices of every size.

The front door. Everything else is reached by module path, e.g. ``fairfold.nn.FairEmbedding``.
"""

from fairfold.errors import FairfoldError
from fairfold.federation.settings import Settings
from fairfold.nn import compress, expand
from fairfold.simulate import simulate
from fairfold.subspace import Subspace
from fairfold.version import __version__

__all__ = ["FairfoldError", "Settings", "Subspace", "__version__", "compress", "expand", "simulate"]
