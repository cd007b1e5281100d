"""Federations over a network, on Flower (extra ``flower``).

``FairStrategy`` runs on the server, ``make_client_app`` on every device. The mathematics is that of ``federation`` and
``algorithms``; here are only messages. Names are loaded when they are first used: a device that is merely asked for its
capacity must not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairfold.flower.client import make_client_app
    from fairfold.flower.grid import InProcessGrid
    from fairfold.flower.local_data import LocalData, LocalFile, LocalImages, node_partition
    from fairfold.flower.strategy import FairStrategy

__all__ = [
    "FairStrategy",
    "InProcessGrid",
    "LocalData",
    "LocalFile",
    "LocalImages",
    "make_client_app",
    "node_partition",
]

_HOMES = {"FairStrategy": "strategy", "InProcessGrid": "grid", "make_client_app": "client"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fairfold.flower' has no attribute {name!r}")
    return getattr(import_module(f"fairfold.flower.{_HOMES.get(name, 'local_data')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
