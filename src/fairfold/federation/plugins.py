"""Registry of plug-ins: algorithms, methods, models and projections, by a decorator or by an entry point.

A package announces a module that registers its own in ``pyproject.toml``; they can then be named in settings::

    [project.entry-points."fairfold.plugins"]
    mine = "my_package.my_module"
"""

import importlib
import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fairfold.errors import InvalidSettings
from fairfold.subspace.projection import register_projection

if TYPE_CHECKING:
    from fairfold.config import Settings
    from fairfold.federation.algorithm import Algorithm
    from fairfold.methods import Method

__all__ = ["register_algorithm", "register_method", "register_model", "register_projection"]

GROUP = "fairfold.plugins"
log = logging.getLogger("fairfold.plugins")

_known: dict[str, dict[str, Any]] = {"algorithm": {}, "method": {}, "model": {}}


def register_algorithm(kind: "type[Algorithm]") -> "type[Algorithm]":
    """Register an algorithm by the default of its ``kind``; a decorator."""
    _known["algorithm"][name_of(kind, "kind")] = kind
    return kind


def register_method(kind: "type[Method]") -> "type[Method]":
    """Register a method by the default of its ``method``; a decorator."""
    _known["method"][name_of(kind, "method")] = kind
    return kind


def register_model(name: str) -> "Callable[[Any], Any]":
    """Register a recommender by a name: a class, or a function of users, items and factors; a decorator."""

    def register(make: Any) -> Any:
        _known["model"][name] = make
        return make

    return register


def registered(what: str) -> dict[str, Any]:
    """Plug-ins of a kind (``"algorithm"``, ``"method"`` or ``"model"``) by name."""
    _load()
    return _known[what]


def name_of(kind: Any, key: str) -> str:
    """The default of the key that names a class in settings."""
    field = kind.model_fields.get(key) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    if field is None or not isinstance(field.default, str):
        remedy = f"Write: {key}: Literal['mine'] = 'mine'."
        raise InvalidSettings(f"{kind!r} to be registered", f"a class with a default for {key!r}", remedy)
    return str(field.default)


@cache
def _load() -> None:
    for entry in entry_points(group=GROUP):
        try:
            importlib.import_module(entry.value.partition(":")[0])
        except Exception as error:  # foreign code: logged, and the others are loaded
            log.warning("plug-in %s cannot be imported: %s: %s", entry.name, type(error).__name__, error)


def uses_plugins(settings: "Settings") -> bool:
    """Whether settings name an algorithm, method or recommender that is not fairfold's own."""
    parts = (settings.algorithm, settings.subspace)
    foreign = settings.model.is_custom or any(not type(part).__module__.startswith("fairfold.") for part in parts)
    return foreign and not settings.model.reads_images
