"""fairfold: federated learning of embedding tables on devices of every size.

The front door. Everything else is reached by module path, e.g. ``fairfold.nn.FairEmbedding``. Names are loaded when
they are first used, so that ``import fairfold`` and ``fairfold --help`` cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fairfold.config import Settings
    from fairfold.errors import FairfoldError
    from fairfold.estimator import Model, cross_validate, fit, from_pretrained, load
    from fairfold.federation.simulation import simulate
    from fairfold.nn import compress, expand
    from fairfold.subspace import Subspace

__all__ = [
    "FairfoldError", "Model", "Settings", "Subspace", "__version__", "compress", "cross_validate", "expand", "fit",
    "from_pretrained", "load", "simulate",
]  # fmt: skip

_HOMES = {
    "FairfoldError": "fairfold.errors",
    "Model": "fairfold.estimator",
    "Settings": "fairfold.config",
    "Subspace": "fairfold.subspace",
    "compress": "fairfold.nn",
    "cross_validate": "fairfold.estimator",
    "expand": "fairfold.nn",
    "fit": "fairfold.estimator",
    "from_pretrained": "fairfold.estimator",
    "load": "fairfold.estimator",
    "simulate": "fairfold.federation.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fairfold' has no attribute {name!r}")
    globals()[name] = getattr(import_module(_HOMES[name]), name)  # found without this function from now on
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
