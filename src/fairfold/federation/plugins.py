"""Registry of plug-ins: algorithms, methods, models and projections, by a decorator or by an entry point.

A package announces a module that registers its own in ``pyproject.toml``; they can then be named in settings::

    [project.entry-points."fairfold.plugins"]
    mine = "my_package.my_module"

A single file is named with ``--plugin my_method.py``. The environment variable ``FAIRFOLD_PLUGINS`` holds such files
for the programs that a command starts: nodes of a local fleet, processes of an experiment.
"""

import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
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
VARIABLE = "FAIRFOLD_PLUGINS"
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
    _load_registered()
    return _known[what]


def name_of(kind: Any, key: str) -> str:
    """The default of the key that names a class in settings."""
    field = kind.model_fields.get(key) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    if field is None or not isinstance(field.default, str):
        remedy = f"Write: {key}: Literal['mine'] = 'mine'."
        raise InvalidSettings(f"{kind!r} to be registered", f"a class with a default for {key!r}", remedy)
    return str(field.default)


@cache
def _load_registered() -> None:
    for entry in entry_points(group=GROUP):
        try:
            importlib.import_module(entry.value.partition(":")[0])
        except Exception as error:  # foreign code: logged, and the others are loaded
            log.warning("plug-in %s cannot be imported: %s: %s", entry.name, type(error).__name__, error)
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        _import_file(Path(path))


def load_files(paths: Iterable[Path]) -> None:
    """Import plug-in files, here and in the programs that this one starts; a module is named as its file is."""
    for path in paths:
        whole = path.absolute()
        _import_file(whole)
        known = [one for one in os.environ.get(VARIABLE, "").split(os.pathsep) if one]
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*known, str(whole)]))


def _import_file(path: Path) -> None:
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if path.suffix != ".py" or not name.isidentifier() or spec is None or spec.loader is None:
        raise InvalidSettings(f"--plugin {path}", "a Python file", "Name a file such as my_method.py.")
    found = sys.modules.get(name)
    if found is not None and Path(getattr(found, "__file__", None) or "").absolute() == path:
        return
    if importlib.util.find_spec(name) is not None and not path.samefile(_module_origin(name) or path.parent):
        needed = "a name that no other module has"
        raise InvalidSettings(f"--plugin {path}", needed, f"Rename the file: Python knows another {name!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        del sys.modules[name]
        raise InvalidSettings(f"--plugin {path}: no such file", "a Python file", "Check the path.") from None
    except Exception as error:  # foreign code may raise anything
        del sys.modules[name]
        line = error.lineno if isinstance(error, SyntaxError) else _line_in(path, error)
        where = f"line {line}: " if line else ""
        what = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
        given = f"--plugin {path}: {where}{what}"
        remedy = "Correct that line; docs/tutorials/own-method.md has a file that works."
        raise InvalidSettings(given, "a file that Python can import", remedy) from None


def _module_origin(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return spec.origin if spec is not None and spec.has_location else None


def _line_in(path: Path, error: BaseException) -> int | None:
    """The last line of a file on the way to an error."""
    trace = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(trace) if frame.filename == str(path)), None)


def uses_plugins(settings: "Settings") -> bool:
    """Whether settings name an algorithm, method or recommender that is not fairfold's own."""
    parts = (settings.algorithm, settings.subspace)
    foreign = settings.model.is_custom or any(not type(part).__module__.startswith("fairfold.") for part in parts)
    return foreign and not settings.model.reads_images
