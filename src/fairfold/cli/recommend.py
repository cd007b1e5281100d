"""``fairfold recommend``: what a run's model suggests to one user."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fairfold.cli.console import wide_console
from fairfold.cli.errors import told_plainly


def recommend(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    user: Annotated[str, typer.Option(help="Id as in the source file, or #number.")],
    top: Annotated[int, typer.Option(min=1, help="How many items.")] = 10,
    capacity: Annotated[
        str | None, typer.Option(help="By the model of a device of this size (16x, 40MB); else by the server's.")
    ] = None,
) -> None:
    """Recommend items to a user: original ids, titles where the data has them, what the user knows left out."""
    import torch

    from fairfold.metrics.ranking import recommend as best_items
    from fairfold.runs.device import device_model
    from fairfold.runs.opened import find_user, open_run
    from fairfold.subspace import Capacity

    console = wide_console()
    with told_plainly():
        size = None if capacity is None else Capacity.parse(capacity)
        opened = open_run(run)
        data, state = opened.interactions, opened.progress.state
        number = find_user(data, user)
        full = state.full if size is None else device_model(opened, size).recovered()
        score = opened.scorer(full)
        items = best_items(score, torch.tensor([number]), data.train, top)[0].tolist()
        scores = score(torch.tensor([number]))[0]
        model = "the server's model" if size is None else f"the model of a {size} device"
        name = f"user {data.user_ids[number]}" if data.user_ids is not None else f"user #{number}"
        table = Table()
        table.add_column("rank", justify="right")
        table.add_column("item")
        if data.titles is not None:
            table.add_column("title")
        table.add_column("score", justify="right")
        for rank, item in enumerate((item for item in items if item >= 0), 1):
            cells = [str(rank), f"#{item}" if data.item_ids is None else escape(data.item_ids[item])]
            cells += [] if data.titles is None else [escape(data.titles[item])]
            table.add_row(*cells, f"{float(scores[item]):.4f}")
        console.print(f"{name}, by {model} after round {state.round_number}", highlight=False, markup=False)
        console.print(table)
        known = len(data.train.of(number))
        console.print(f"Left out: the {known} items this user was trained on.", highlight=False)
