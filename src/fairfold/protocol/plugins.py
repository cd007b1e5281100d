"""What others add: algorithms, methods, models and projections, by a decorator or by an entry point.

A package announces its own in its ``pyproject.toml``::

    [project.entry-points."fairfold.plugins"]
    mine = "my_package.my_module"

and the module registers them when it is imported. Whatever is registered can be named in settings, and works wherever
fairfold's own do: in simulations, over Flower, in checkpoints, reports, recommendations and exports.
"""

import importlib
import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fairfold.errors import InvalidSettings
from fairfold.projections.facts import register_projection

if TYPE_CHECKING:
    from fairfold.methods import Method
    from fairfold.protocol.algorithm import Algorithm

__all__ = ["register_algorithm", "register_method", "register_model", "register_projection"]

GROUP = "fairfold.plugins"
log = logging.getLogger("fairfold.plugins")

_known: dict[str, dict[str, Any]] = {"algorithm": {}, "method": {}, "model": {}}


def register_algorithm(kind: "type[Algorithm]") -> "type[Algorithm]":
    """Make an algorithm known by the default of its ``kind``; serves as a decorator."""
    _known["algorithm"][name_of(kind, "kind")] = kind
    return kind


def register_method(kind: "type[Method]") -> "type[Method]":
    """Make a method known by the default of its ``method``; serves as a decorator."""
    _known["method"][name_of(kind, "method")] = kind
    return kind


def register_model(name: str) -> "Callable[[Any], Any]":
    """Make a recommender known by a name: a class, or a function of users, items and factors; serves as a decorator."""

    def register(make: Any) -> Any:
        _known["model"][name] = make
        return make

    return register


def registered(what: str) -> dict[str, Any]:
    """Algorithms, methods or models of others, by name: ``"algorithm"``, ``"method"`` or ``"model"``."""
    _load()
    return _known[what]


def name_of(kind: Any, key: str) -> str:
    """The default of the key that names a class in settings."""
    field = getattr(kind, "model_fields", {}).get(key)
    if field is None or not isinstance(field.default, str):
        remedy = f"Write: {key}: Literal['mine'] = 'mine'."
        raise InvalidSettings(f"{kind!r} to be registered", f"a class with a default for {key!r}", remedy)
    return str(field.default)


@cache
def _load() -> None:
    for entry in entry_points(group=GROUP):
        try:
            importlib.import_module(entry.value.partition(":")[0])
        except Exception as error:  # somebody else's code: told, and the others go on
            log.warning("plug-in %s cannot be imported: %s: %s", entry.name, type(error).__name__, error)
