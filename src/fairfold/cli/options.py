"""Options that commands share, and the settings that follow from them, a recipe, a file or a run."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fairfold.cli.console import Terminal, make_table
from fairfold.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fairfold.config import Settings
    from fairfold.config.files import Layer


OPTIONS = {
    "data": "data.name", "model": "model.kind", "method": "subspace.method", "capacities": "fleet.capacities",
    "rounds": "run.rounds", "seed": "run.seed", "user_column": "data.user_column", "item_column": "data.item_column",
    "rating_column": "data.rating_column", "time_column": "data.time_column", "separator": "data.separator",
    "top_users": "data.top_users", "min_rating": "data.min_rating", "core": "data.core", "split": "data.split",
}  # fmt: skip
"""The settings that options set."""

ALGORITHM = "algorithm.kind"
Data = Annotated[
    str | None, typer.Option(help="A file or folder, a name from `fairfold data list`, or 'synthetic' (the default).")
]
UserColumn = Annotated[str | None, typer.Option(help="Name of the user column, or its place, counted from 1.")]
ItemColumn = Annotated[str | None, typer.Option(help="Name of the item column, or its place, counted from 1.")]
RatingColumn = Annotated[str | None, typer.Option(help="Name of the rating column, or its place, counted from 1.")]
TimeColumn = Annotated[str | None, typer.Option(help="Name of the time column, or its place, counted from 1.")]
Split = Annotated[str | None, typer.Option(help="What is held out: random (the default), newest, newest-share, users.")]
Separator = Annotated[str | None, typer.Option(help="Character between fields; `tab` for a tab. Default: detected.")]
TopUsers = Annotated[int | None, typer.Option(help="Keep only the N users with the most interactions. Default: all.")]
MinRating = Annotated[float | None, typer.Option(help="Keep only ratings of at least this, as likes. Default: all.")]
Core = Annotated[int | None, typer.Option(help="Keep users and items with so many interactions. Default: all.")]
Recipe = Annotated[
    str | None, typer.Option(help="Settings of fairfold, such as fair, paper or ratings; see `fairfold recipes`.")
]


def _load_plugins(paths: list[Path] | None) -> list[Path] | None:
    if paths:
        from fairfold.federation.plugins import load_files

        load_files(paths)
    return paths


Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        callback=_load_plugins,
        help="A Python file with a method, algorithm or model of your own (docs/tutorials); may be repeated.",
    ),
]
Change = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change any setting (docs/settings.md); may be repeated."),
]


def collect_changes(options: Mapping[str, Any], changes: list[str]) -> dict[str, Any]:
    """The values of options and ``--set`` by ``table.key``; an option that is None was not given."""
    given = {OPTIONS[name]: value for name, value in options.items() if value is not None}
    if given.get("data.separator") in ("tab", "\\t"):
        given["data.separator"] = "\t"
    if given.get("subspace.method") == "central":  # no method of a federation: all data is in one place
        del given["subspace.method"]
        given[ALGORITHM] = "central"
    return given | _parse_changes(changes)


def _parse_changes(changes: list[str]) -> dict[str, Any]:
    """``table.key=value`` pairs; values are parsed as TOML where that works, and are text otherwise."""
    parsed: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise InvalidSettings(f"--set {change}", "TABLE.KEY=VALUE", "Write e.g. --set model.factors=16.")
        try:
            parsed[key.strip()] = tomllib.loads(f"value = {value.strip()}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            parsed[key.strip()] = value.strip()
    return parsed


@dataclass(frozen=True)
class ResolvedSettings:
    """The settings of a command, a line about where they come from, and their layers."""

    settings: Settings
    source: str
    layers: list[Layer]


def resolve_settings(
    file: Path | None, recipe: str | None, changes: Mapping[str, Any], resumed: Path | None = None
) -> ResolvedSettings:
    """The settings of a file, a recipe or a resumed run, or of the default recipe, with changes."""
    from fairfold.config import nested
    from fairfold.config.files import Layer, default_recipe, merge_layers, settings_layers
    from fairfold.runs.folder import RunFolder, read_run_settings

    if resumed is not None:
        RunFolder(resumed).require_free(resume=True)
    if resumed is not None and file is None and recipe is None:
        source = f"Settings: of the run in {resumed}"
        layers = [Layer(f"run {resumed}", read_run_settings(resumed).given()), Layer("command", nested(changes))]
    else:
        if file is None and recipe is None:
            recipe = default_recipe(changes)
        if changes.get(ALGORITHM) == "central" and (file is not None or recipe is not None):
            others = {key: value for key, value in changes.items() if key != ALGORITHM}
            changes = _centralized(merge_layers(settings_layers(file, others, recipe)), changes)
        source = f"Recipe: {recipe}" if recipe is not None else f"Settings: {file or 'the defaults'}"
        layers = settings_layers(file, changes, recipe)
    settings = merge_layers(layers)
    line = f"{source} ({settings.algorithm.kind}, {settings.fleet.capacities})"
    return ResolvedSettings(settings, line, layers)


def _centralized(federated: Settings, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes for central training with the local training of a federation's clients."""
    from fairfold.algorithms import Central

    shared = Central.model_fields.keys() - {"kind"}
    local = federated.algorithm.effective(changed=True).items()
    given = {f"algorithm.{key}": value for key, value in local if key in shared}
    return given | dict(changes) | {"subspace.method": "fedavg"}


def print_settings(console: Terminal, resolved: ResolvedSettings) -> None:
    """Print every active key, its value, and where the value comes from."""
    from fairfold.config.files import sources

    table = make_table(["key", "value", "from"], [], title=resolved.source, title_justify="left")
    for key, value, source in sorted(sources(resolved.settings, resolved.layers)):
        text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)  # as in a file
        table.add_row(key, escape(text), escape(source))
    console.print(table)
