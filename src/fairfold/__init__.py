"""fairfold: federated learning of embedding tables on devices of every size.

The front door. Everything else is reached by module path, e.g. ``fairfold.nn.FairEmbedding``. Names are imported when
first used, so that ``import fairfold`` and ``fairfold --help`` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fairfold.errors import FairfoldError

if TYPE_CHECKING:
    from fairfold.nn import compress as compress
    from fairfold.nn import expand as expand
    from fairfold.subspace import Subspace as Subspace

__version__ = "0.1.0"

_HOMES = {"Subspace": "fairfold.subspace", "compress": "fairfold.nn", "expand": "fairfold.nn"}

_FOLDERS = ("nn", "subspace")

__all__ = ["FairfoldError", "Subspace", "__version__", "compress", "expand"]


def __getattr__(name: str) -> object:
    if name in _FOLDERS:
        return import_module(f"fairfold.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fairfold' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
