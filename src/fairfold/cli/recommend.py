"""``fairfold recommend``: what a run's model suggests to one user."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fairfold.cli.console import Terminal
from fairfold.cli.export import Newest, Run


def recommend(
    run: Run,
    user: Annotated[
        str | None, typer.Option(help="A user of the data: the id as in the source file, or #number.")
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(
            help="Or the items of a new user: 1,5,9; a file with one id (or #number) per line, followed by the rating "
            "for a model of ratings; or a CSV file with a column 'item'."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many items to recommend.")] = 10,
    capacity: Annotated[
        str | None,
        typer.Option(help="Use the model of a device of this size (16x, 40MB). Default: the server's model."),
    ] = None,
    newest: Newest = False,
) -> None:
    """Recommend items to a user of the data, or to a new one by their items. Items that the user has are left out.

    Examples:
        fairfold recommend runs/first --user 17 --top 5
        fairfold recommend runs/first --history 1,5,9 --capacity 16x
    """
    from fairfold.errors import InvalidSettings
    from fairfold.fitting.suggest import best_items
    from fairfold.runs.opened import find_user, item_name, open_run
    from fairfold.subspace import Capacity

    console, size = Terminal(), None if capacity is None else Capacity.parse(capacity)
    opened = open_run(run, console.say, newest=newest)
    data, state, rated = opened.interactions, opened.progress.state, opened.settings.predicts_ratings
    if (user is None) == (history is None):
        raise InvalidSettings(
            "neither or both of --user and --history", "one of them", "Add --user ID, or --history 1,5,9."
        )
    new = None if history is None else opened.history(history)
    if user is not None and opened.settings.data.kind == "devices":
        given = f"--user {user}, whose data is on a device"
        raise InvalidSettings(given, "--history", "Give the items, or ask on the device: `fairfold node recommend`.")
    number = 0 if user is None else find_user(data, user)
    best = best_items(opened, [number], top, new=new, capacity=size)
    (mine,), (telling,), popular = best.mine, best.telling, best.popular
    model = "the server's model" if size is None else f"the model of a {size} device"
    model = "popularity alone" if popular else model
    name = f"user {data.user_ids[number]}" if data.user_ids is not None else f"user #{number}"
    name = name if history is None else f"The user of {history[:60]}"
    table = Table()
    table.add_column("rank", justify="right")
    table.add_column("item")
    if data.titles is not None:
        table.add_column("title")
    table.add_column("score", justify="right")
    found = zip(best.items[0].tolist(), best.scores[0].tolist(), strict=True)
    for rank, (item, score) in enumerate(((item, score) for item, score in found if item >= 0), 1):
        cells = [str(rank), escape(item_name(item, data))]
        cells += [] if data.titles is None else [escape(data.titles[item])]
        table.add_row(*cells, f"{score:.4f}")
    console.say(f"{name}, by {model} after round {state.round_number}")
    console.print(table)
    console.say(f"Left out: the {mine} items this user has.")
    if telling < mine or not telling:
        console.say(_what_is_known(telling, mine, rated))


def _what_is_known(telling: int, given: int, rated: bool) -> str:
    """How much of a history the model can use, and what it does without any."""
    why = "nobody had them in training" + ("" if rated else ", or too few to own a row in this model")
    if telling:
        return f"The model uses {telling} of these {given}; it does not know the others ({why})."
    instead = (
        "items are ranked by what all users think" if rated else "items are ranked by popularity (scores count users)"
    )
    return f"Warning: the model knows none of the {given} items ({why}), so {instead}."
