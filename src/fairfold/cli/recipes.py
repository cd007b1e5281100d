"""``fairfold recipes``: the settings that come with fairfold, each a subspace and an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairfold.cli.console import Terminal, make_table

if TYPE_CHECKING:
    from fairfold.config import Settings

UPDATES = {"gradient": "local SGD", "closed_form": "closed form", "co_occurrence": "co-occurrence"}
"""What clients compute, by algorithm; others go by their names."""


def recipes() -> None:
    """List the recipes: what devices hold, what they compute, and what each is for.

    A recipe is a subspace (hashed, ranked or truncated tables) with an update that adds up over devices. `fairfold
    train --recipe fair --show-settings` shows all settings of one.

    Examples:
        fairfold recipes
    """
    from fairfold.config.files import DEFAULT_RECIPE, load_settings, recipe_summary
    from fairfold.config.files import recipes as known

    console = Terminal()
    table = make_table(["recipe", "subspace", "update", "what it is"], [])
    for name in sorted(known(), key=lambda name: (name != DEFAULT_RECIPE, name)):
        settings = load_settings(None, {}, name)
        update = UPDATES.get(settings.algorithm.kind, settings.algorithm.kind)
        table.add_row(name, subspace_of(settings), update, recipe_summary(name))
    console.print(table)
    console.echo("Use one with --recipe NAME (train, federate, server init, plan), or fit(recipe=NAME).")


def subspace_of(settings: Settings) -> str:
    """What devices hold, in a word: ranked, hashed or truncated tables."""
    from fairfold.methods import Fair

    method = settings.subspace
    return ("ranked" if method.ranked else "hashed") if isinstance(method, Fair) else method.method
