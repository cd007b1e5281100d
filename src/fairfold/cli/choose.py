"""What a command starts from: a recipe, a file, a run, or nothing; then what was asked for on the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairfold.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fairfold.settings import Settings

OPTIONS = {
    "data": "data.name",
    "model": "model.kind",
    "method": "subspace.method",
    "capacities": "fleet.capacities",
    "rounds": "run.rounds",
    "seed": "run.seed",
    "user_column": "data.user_column",
    "item_column": "data.item_column",
    "rating_column": "data.rating_column",
    "separator": "data.separator",
    "top_users": "data.top_users",
    "min_rating": "data.min_rating",
    "core": "data.core",
}
"""Where the values of options stand in the settings."""

ALGORITHM = "algorithm.kind"
Data = Annotated[
    str | None, typer.Option(help="A file or folder, a name from `fairfold data list`, or 'synthetic' (the default).")
]
UserColumn = Annotated[str | None, typer.Option(help="Name of the user column, or its place, counted from 1.")]
ItemColumn = Annotated[str | None, typer.Option(help="Name of the item column, or its place, counted from 1.")]
RatingColumn = Annotated[str | None, typer.Option(help="Name of the rating column, or its place, counted from 1.")]
Separator = Annotated[
    str | None,
    typer.Option(help="The character between two fields of a line; `tab` for a tab. Default: found by itself."),
]
TopUsers = Annotated[int | None, typer.Option(help="Keep only the N users with the most interactions. Default: all.")]
MinRating = Annotated[
    float | None, typer.Option(help="Keep only what is rated this high or higher, as likes. Default: everything.")
]
Core = Annotated[
    int | None, typer.Option(help="Keep only users and items with at least this many interactions. Default: all.")
]
Recipe = Annotated[
    str | None,
    typer.Option(
        help="Settings that come with fairfold: 'best' (rankings, the default), 'ratings', or 'paper' (the "
        "authors' example)."
    ),
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="TABLE.KEY=VALUE", help="Change any other setting (docs/settings.md); may be repeated."
    ),
]


def changes_of(options: Mapping[str, Any], changes: list[str]) -> dict[str, Any]:
    """What options and ``--set`` ask for, by ``table.key``; an option that is None was not given."""
    given = {OPTIONS[name]: value for name, value in options.items() if value is not None}
    if given.get("data.separator") in ("tab", "\\t"):
        given["data.separator"] = "\t"
    if given.get("subspace.method") == "central":  # not a method of federations: all data is in one place
        del given["subspace.method"]
        given[ALGORITHM] = "central"

    return given | parse_changes(changes)


def parse_changes(changes: list[str]) -> dict[str, Any]:
    """``table.key=value`` pairs; values are read as TOML where that works, and as text otherwise."""
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


def choose(
    file: Path | None, recipe: str | None, changes: Mapping[str, Any], resumed: Path | None = None
) -> tuple[Settings, str]:
    """The settings, and one line that says where they come from.

    Without a file and a recipe those of the run that goes on are taken, or the usual recipe.
    """
    from fairfold.runs.folder import RunFolder
    from fairfold.runs.read import read_run_settings
    from fairfold.settings.files import load_settings, usual_recipe

    if resumed is not None:
        RunFolder(resumed).require_free(again=True)
    if resumed is not None and file is None and recipe is None:
        settings, source = read_run_settings(resumed).with_changes(changes), f"Settings: of the run in {resumed}"
    else:
        if file is None and recipe is None:
            recipe = usual_recipe(changes)
        if changes.get(ALGORITHM) == "central" and (file is not None or recipe is not None):
            others = {key: value for key, value in changes.items() if key != ALGORITHM}
            changes = _pooled(load_settings(file, others, recipe), changes)
        settings = load_settings(file, changes, recipe)
        source = f"Recipe: {recipe}" if recipe is not None else f"Settings: {file or 'the defaults'}"
    return settings, f"{source} ({settings.algorithm.kind}, {settings.fleet.capacities})"


def _pooled(federated: Settings, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of a federation's devices, taken where all data is in one place."""
    from fairfold.algorithms import Central

    shared = Central.model_fields.keys() - {"kind"}
    steps = federated.algorithm.effective(changed=True).items()
    kept = {f"algorithm.{key}": value for key, value in steps if key in shared}
    return kept | dict(changes) | {"subspace.method": "fedavg"}
