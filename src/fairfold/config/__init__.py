"""Settings of a run: tables whose keys depend on their kind, from files, recipes and single changes.

Names are loaded when they are first used: algorithms and methods are settings themselves, whose base is here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairfold.config.settings import Settings, merge_tables, nested, read_settings


__all__ = ["Settings", "merge_tables", "nested", "read_settings"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fairfold.config' has no attribute {name!r}")
    return getattr(import_module("fairfold.config.settings"), name)
