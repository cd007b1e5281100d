"""Settings from recipes, TOML files and single changes, and back to TOML."""

import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import tomli_w

from fairfold.config.settings import TAGS, Settings, merge_tables, nested, read_settings
from fairfold.config.tables import NONE
from fairfold.errors import InvalidSettings, did_you_mean
from fairfold.federation.algorithm import SettingsRules
from fairfold.methods import Truncated

FOR = "for"
"""The table of a recipe with other values for known data sets, by their names."""

DEFAULT_RECIPE = "default"
"""The recipe that is taken where none is named."""

RECIPE = "recipe "
"""How the source of a layer begins that is a recipe."""

MAX_BYTES = 1 << 20
"""The longest file of settings that is read."""


def recipes() -> dict[str, Traversable]:
    """The recipes of the package, by name."""
    files = sorted((resources.files("fairfold") / "config" / "recipes").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def recipe_summary(name: str) -> str:
    """What a recipe is, in a sentence: the first line of its file."""
    return recipes()[name].read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def default_recipe(changes: Mapping[str, Any]) -> str | None:
    """The recipe that is taken where none is named; None where another model, algorithm or method is asked for."""
    if changes.keys() & {"model.kind", "algorithm.kind"}:
        return None
    asked = {key.removeprefix("subspace."): value for key, value in changes.items() if key.startswith("subspace.")}
    cut = asked.keys() <= Truncated.model_fields.keys() and asked.get("method", "truncated") == "truncated"
    return DEFAULT_RECIPE if cut else None


@dataclass(frozen=True)
class Layer:
    """Some tables of settings, and where they come from."""

    source: str
    tables: Mapping[str, Any]


def settings_layers(path: Path | None, changes: Mapping[str, Any], recipe: str | None = None) -> list[Layer]:
    """Where settings come from, from the bottom up: a recipe or a TOML file, then changes by ``table.key``.

    A recipe comes with the package; what it has for the data set at hand goes before what it has for all.
    """
    over = nested(changes)
    if recipe is not None and path is not None:
        raise InvalidSettings(f"{path} and recipe {recipe!r}", "one of them", "Start from the recipe, or from a file.")
    if recipe is not None and recipe not in recipes():
        given = f"recipe {recipe!r}{did_you_mean(recipe, recipes())}"
        raise InvalidSettings(given, f"one of {', '.join(recipes())}", "Check the spelling.")
    layers = [] if path is None else [Layer(f"file {path}", read_toml(path))]
    if recipe is not None:
        tables = read_toml(recipes()[recipe])
        by_data = tables.pop(FOR, {})
        data = over.get("data")
        name = Path(str(data.get("name", "") if isinstance(data, Mapping) else "")).name
        layers += [Layer(RECIPE + recipe, tables), Layer(f"data set {name}", by_data.get(name, {}))]
    return [*layers, Layer("command", over)]


def merge_layers(layers: Sequence[Layer]) -> Settings:
    """The settings of layers, each over those before it; an error of a recipe names others that go with the changes."""
    try:
        return read_settings(_merged(layers))
    except InvalidSettings as error:
        recipe, above = layers[0].source, layers[1:]
        if not recipe.startswith(RECIPE) or recipe == RECIPE + DEFAULT_RECIPE:
            raise
        others = [name for name in recipes() if recipe != RECIPE + name and _goes_with(name, above)]
        alone = _goes_with(None, above)
        if not others and not alone:  # a key that no recipe has
            raise
        named = [f"--recipe {name}" for name in others if name != DEFAULT_RECIPE]
        remedy = " or ".join([*named, *(["no recipe at all"] if alone else [])])
        raise InvalidSettings(
            f"{recipe} with {_described(above)}: {error.given}", "a recipe that goes with these", f"Take {remedy}."
        ) from None


def _merged(layers: Iterable[Layer]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for layer in layers:
        tables = merge_tables(tables, layer.tables)
    return tables


def _goes_with(recipe: str | None, above: Sequence[Layer]) -> bool:
    """Whether a recipe, or none, goes with the changes above it."""
    tables = {} if recipe is None else read_toml(recipes()[recipe])
    tables.pop(FOR, None)
    try:
        read_settings(_merged([Layer("", tables), above[-1]]))
    except InvalidSettings:
        return False
    return True


def _described(layers: Sequence[Layer]) -> str:
    """The model, algorithm and method of some changes; all changed tables where none is among them."""
    tables = _merged(layers)
    found = [
        f"{table}.{TAGS[table]}={tables[table][TAGS[table]]!r}"
        for table in ("model", "algorithm", "subspace")
        if isinstance(tables.get(table), Mapping) and TAGS[table] in tables[table]
    ]
    return " and ".join(found) or ", ".join(f"[{table}]" for table in tables)


def load_settings(path: Path | None, changes: Mapping[str, Any], recipe: str | None = None) -> Settings:
    """Settings from a TOML file or a recipe (or the defaults), with changes by ``table.key``."""
    return merge_layers(settings_layers(path, changes, recipe))


def sources(settings: Settings, layers: Sequence[Layer]) -> Iterator[tuple[str, Any, str]]:
    """Every active key as ``table.key``, its value, and the layer, algorithm or default that it comes from."""
    kind = f"algorithm {settings.algorithm.kind}"
    method = f"method {settings.subspace.method}"
    defaults = type(settings.algorithm).DEFAULTS
    given = settings.given()
    for table, keys in settings.plain().items():
        for key, value in keys.items():
            found = [layer.source for layer in layers if key in _keys(layer.tables.get(table), TAGS.get(table))]
            implied = kind if key in defaults.get(table, {}) else "default"
            implied = method if key in settings.subspace.DEFAULTS.get(table, {}) else implied
            yield f"{table}.{key}", value, found[-1] if found and key in given[table] else implied
    for table, fixed in SettingsRules.of(settings.algorithm).fixed_settings(settings).items():
        for key in fixed:
            if hasattr(part := getattr(settings, table), key):
                yield f"{table}.{key}", getattr(part, key), kind


def _keys(table: Any, tag: str | None) -> Container[str | None]:
    """The keys of a table in a layer; a name stands for its tag."""
    return table.keys() if isinstance(table, Mapping) else [] if table is None else [tag]


def to_toml(settings: Settings, without: Container[str] = ()) -> str:
    """Settings as a TOML file that :func:`load_settings` reads, but for the tables ``without``."""
    return tables_to_toml({name: table for name, table in settings.plain().items() if name not in without})


def tables_to_toml(tables: Mapping[str, Any]) -> str:
    """Tables as TOML, with None as ``"none"``."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: replaced(inner) for key, inner in value.items()}
        return NONE if value is None else value

    return tomli_w.dumps(replaced(tables))


def read_toml(path: Path | Traversable) -> dict[str, Any]:
    """The content of a TOML file of settings; refused where it is no TOML, or too long."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            given = f"{path}, which is longer than {MAX_BYTES:,} bytes"
            raise InvalidSettings(given, "a TOML file", "Check the path.")
        return tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise InvalidSettings(f"{path}: {error.strerror}", "a readable TOML file", "Check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSettings(f"{path}: {error}", "a TOML file", "Correct that line.") from None
