"""fairfold: federated learning of embedding tables on devices of every size.

The front door. Everything else is reached by module path, e.g. ``fairfold.nn.FairEmbedding``. Names are loaded when
they are first used, so that ``import fairfold`` and ``fairfold --help`` cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fairfold.version import __version__

if TYPE_CHECKING:
    from fairfold.errors import FairfoldError
    from fairfold.fitting import fit, from_pretrained, load
    from fairfold.nn import compress, expand
    from fairfold.settings import Settings
    from fairfold.simulate import simulate
    from fairfold.subspace import Subspace

__all__ = [
    "FairfoldError", "Settings", "Subspace", "__version__", "compress", "expand", "fit",
    "from_pretrained", "load", "simulate",
]  # fmt: skip

_HOMES = {
    "FairfoldError": "fairfold.errors",
    "Settings": "fairfold.settings",
    "Subspace": "fairfold.subspace",
    "compress": "fairfold.nn",
    "expand": "fairfold.nn",
    "fit": "fairfold.fitting",
    "from_pretrained": "fairfold.fitting",
    "load": "fairfold.fitting",
    "simulate": "fairfold.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fairfold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
