"""Where a run's settings come from: a recipe or a TOML file, then single changes."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import tomli_w

from fairfold.errors import InvalidSettings
from fairfold.federation.defaults import SERVER_STEP_KEYS
from fairfold.federation.settings import Settings, read_settings

NONE = "none"
"""How a file says None, for which TOML has no word: ``clients_per_round = "none"`` takes everybody."""

FOR = "for"
"""The table of a recipe with what known data sets take instead, by their names."""

BEST = "best"
"""The recipe that is taken where none is named."""


def recipes() -> list[str]:
    """Names of the settings that come with the package."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in (resources.files("fairfold.runs") / "recipes").iterdir()
        if entry.name.endswith(".toml")
    )


def recipe_text(name: str) -> str:
    """The TOML of a recipe."""
    if name not in recipes():
        raise InvalidSettings(f"recipe {name!r}", f"one of {', '.join(recipes())}", "Check the spelling.")
    return (resources.files("fairfold.runs") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def in_full(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What a run wrote down, with the settings that its version did not know yet at their own defaults.

    A setting's own default is how things were before there was the setting. What a model or a solver takes instead
    where nothing is said is for new runs: an old one never heard of it. What had no effect and is refused today is
    left out.
    """
    own = Settings().model_dump(mode="json")
    idle = SERVER_STEP_KEYS if recorded.get("solver") == "least_squares" else ()
    return own | {
        key: own[key] | value if isinstance(value, dict) and isinstance(own.get(key), dict) else value
        for key, value in recorded.items()
        if key not in idle
    }


def load_settings(
    path: Path | None, overrides: dict[str, Any], recipe: str | None = None, *, recorded: bool = False
) -> Settings:
    """Settings from a TOML file or a recipe (or the defaults), with overrides.

    Args:
        path: Of the file.
        overrides: By key; ``world.users`` reaches into a table.
        recipe: Name of settings that come with the package, instead of a file; what it says for the data set at hand
            comes before what it says for all.
        recorded: The file was written by a run, perhaps of an earlier version.
    """
    values: dict[str, Any] = {}
    if recipe is not None:
        if path is not None:
            raise InvalidSettings(
                f"{path} and recipe {recipe!r}", "one of them", "Start from the recipe, or from a file."
            )
        values = tomllib.loads(recipe_text(recipe))
        known = values.pop(FOR, {}).get(Path(str(overrides.get("data", values.get("data", "")))).name, {})
        values |= known
    elif path is not None:
        values = in_full(_read(path)) if recorded else _read(path)
    for key, value in overrides.items():
        *tables, name = key.split(".")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InvalidSettings(f"{key} = {value!r}", f"{part!r} to be a table", "Check the key.")
        table[name] = value
    nullable = {key for key, field in Settings.model_fields.items() if NoneType in get_args(field.annotation)}
    return read_settings({key: None if value == NONE and key in nullable else value for key, value in values.items()})


def to_toml(settings: Settings) -> str:
    """The settings as a file from which :func:`load_settings` reads the same."""
    values = settings.model_dump(mode="json")
    for table in [value for value in values.values() if isinstance(value, dict)]:
        for key in [key for key, value in table.items() if value is None]:
            del table[key]  # in a table None is always the default
    return tomli_w.dumps({key: NONE if value is None else value for key, value in values.items()})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettings(f"{path}: {error.strerror}", "a readable TOML file", "Check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path}: {error}", "a TOML file", "Mend that line.") from None
