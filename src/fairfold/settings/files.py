"""Where a run's settings come from: a recipe or a TOML file, then single changes."""

import tomllib
from collections.abc import Container, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import tomli_w

from fairfold.errors import InvalidSettings, nearest
from fairfold.methods import Leading
from fairfold.settings.base import GONE, NONE
from fairfold.settings.settings import Settings, merged, nested, read_settings

FOR = "for"
"""The table of a recipe with what known data sets take instead, by their names."""

BEST = "best"
"""The recipe that is taken where none is named."""

LONGEST_FILE = 1 << 20
"""Bytes of settings that are read."""


def packaged(folder: str) -> dict[str, Traversable]:
    """The TOML files in a folder of the package, by name."""
    place = resources.files("fairfold") / folder
    names = sorted(entry.name.removesuffix(".toml") for entry in place.iterdir() if entry.name.endswith(".toml"))
    return {name: place / f"{name}.toml" for name in names}


def recipes() -> dict[str, Traversable]:
    """The settings that come with the package, by name."""
    return packaged("settings/recipes")


def usual_recipe(changes: Mapping[str, Any]) -> str | None:
    """The recipe that is taken where none is named.

    None where another model, algorithm or method is asked for: recipes are of one, and settings choose by themselves.
    """
    if changes.keys() & {"model.kind", "algorithm.kind"}:
        return None
    asked = {key.removeprefix("subspace."): value for key, value in changes.items() if key.startswith("subspace.")}
    cut = asked.keys() <= Leading.model_fields.keys() and asked.get("method", "leading") == "leading"
    return BEST if cut else None


def load_settings(path: Path | None, changes: Mapping[str, Any], recipe: str | None = None) -> Settings:
    """Settings from a TOML file or a recipe (or the defaults), with single changes, by ``table.key``.

    A recipe are settings that come with the package; what it says for the data set at hand goes before what it says for
    all.
    """
    over = nested(changes)
    if recipe is not None and path is not None:
        raise InvalidSettings(f"{path} and recipe {recipe!r}", "one of them", "Start from the recipe, or from a file.")
    if recipe is not None and (gone := GONE.get(recipe.replace("-", "_"))):
        raise InvalidSettings(f"recipe {recipe!r}, {gone}", f"one of {', '.join(recipes())}", "Name another recipe.")
    if recipe is not None and recipe not in recipes():
        given = f"recipe {recipe!r}{nearest(recipe, recipes())}"
        raise InvalidSettings(given, f"one of {', '.join(recipes())}", "Check the spelling.")
    values = {} if path is None else read_toml(path)
    if recipe is not None:
        values = read_toml(recipes()[recipe])
        known, data = values.pop(FOR, {}), over.get("data")
        chosen = data.get("name", "") if isinstance(data, Mapping) else ""
        values = merged(values, known.get(Path(str(chosen)).name, {}))
    return read_settings(merged(values, over))


def to_toml(settings: Settings, without: Container[str] = ()) -> str:
    """The settings as a file from which :func:`load_settings` reads the same; without some tables, if told so."""
    tables = {name: table for name, table in settings.plain().items() if name not in without}
    return tables_to_toml(tables)


def tables_to_toml(tables: Mapping[str, Any]) -> str:
    """Some of what settings say, as they read it: TOML has no word for None, so they have one."""
    return tomli_w.dumps(_without_none(tables))


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else NONE if value is None else value
        for key, value in values.items()
    }


def read_toml(path: Path | Traversable) -> dict[str, Any]:
    """The content of a TOML file; refused where it is none, or too long to be settings."""
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_FILE + 1)
        if len(text) > LONGEST_FILE:
            given = f"{path}, which is longer than {LONGEST_FILE:,} bytes"
            raise InvalidSettings(given, "a TOML file", "Check the path.")
        return tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise InvalidSettings(f"{path}: {error.strerror}", "a readable TOML file", "Check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSettings(f"{path}: {error}", "a TOML file", "Correct that line.") from None
