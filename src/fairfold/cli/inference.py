"""Commands that use a trained run: ``fairfold export`` and ``fairfold recommend``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fairfold.cli.console import Terminal, make_table
from fairfold.cli.options import Plugin

Run = Annotated[Path, typer.Argument(help="Folder of a run, or of a fleet.")]
Newest = Annotated[
    bool, typer.Option("--newest", help="Refuse a damaged newest checkpoint instead of taking an older one.")
]


def export(
    run: Run,
    capacity: Annotated[str, typer.Option(help="Size of the device: 16x, 1/16 or 40MB, also one that did not train.")],
    out: Annotated[Path | None, typer.Option(help="File to write. Default: RUN/device-CAPACITY.safetensors.")] = None,
    newest: Newest = False,
    plugin: Plugin = None,  # noqa: ARG001 (its callback loads it)
) -> None:
    """Write the model of a device to a file, and print its quality on the test set.

    The file (safetensors) holds all that is needed to recommend, without the run and its data; docs/export.md describes
    it. In Python fairfold.runs.device_model.read_device_model reads it.

    Examples:
        fairfold export runs/first --capacity 16x --out small.safetensors
    """
    from fairfold.cli.plan import describe_truncation
    from fairfold.runs.device_model import device_model, device_quality, write_device_model
    from fairfold.runs.loaded import load_run
    from fairfold.runs.units import human_bytes
    from fairfold.subspace import Capacity

    console = Terminal()
    size = Capacity.parse(capacity)
    loaded = load_run(run, console.echo, newest=newest)
    device = device_model(loaded, size)
    measured = device_quality(loaded, device)
    path = run / f"device-{size}.safetensors" if out is None else out
    written = write_device_model(loaded, device, path, measured)
    metric, value, server = measured
    full_size = sum(tensor.numel() for tensor in loaded.progress.state.full.values())
    asked = "on all test images" if loaded.settings.model.reads_images else "over all users"
    asked = "as devices reported" if loaded.settings.data.kind == "devices" else asked
    shape = describe_truncation(device.projections)
    held = f" ({', '.join(f'{name} {value}' for name, value in shape.items())})" if shape else ""
    note = "" if device.trained else " No device of this size took part in the run."
    if not device.nests:
        note += " Its size does not nest with those of the run: a model to use, not to train along."
    console.echo(
        f"{path}: {device.size:,} of {full_size:,} numbers{held}, {human_bytes(written)}. "
        f"{metric} {_format_quality(value)} {asked}; the server's model {_format_quality(server)}.{note}"
    )


def _format_quality(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4f}"


def recommend(
    run: Run,
    user: Annotated[str | None, typer.Option(help="A user of the data: the id in the source file, or #number.")] = None,
    history: Annotated[
        str | None,
        typer.Option(
            help="Or the items of a new user: 1,5,9; a file with one id (or #number) per line, followed by the rating "
            "for a model of ratings; or a CSV file with a column 'item'. '' is a user without any."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many items to recommend.")] = 10,
    capacity: Annotated[
        str | None, typer.Option(help="Use the model of a device of this size (16x, 40MB). Default: the server's.")
    ] = None,
    newest: Newest = False,
    plugin: Plugin = None,  # noqa: ARG001 (its callback loads it)
) -> None:
    """Recommend items to a user of the data, or to a new one by their items. Items that the user has are left out.

    Examples:
        fairfold recommend runs/first --user 17 --top 5
        fairfold recommend runs/first --history 1,5,9 --capacity 16x
    """
    from fairfold.errors import InvalidSettings
    from fairfold.estimator.recommendations import top_items
    from fairfold.runs.loaded import find_user, item_name, load_run
    from fairfold.subspace import Capacity

    console = Terminal()
    size = None if capacity is None else Capacity.parse(capacity)
    loaded = load_run(run, console.echo, newest=newest)
    data = loaded.interactions
    if (user is None) == (history is None):
        raise InvalidSettings(
            "neither or both of --user and --history", "one of them", "Add --user ID, or --history 1,5,9."
        )
    new = None if history is None else loaded.history(history)
    if user is not None and loaded.settings.data.kind == "devices":
        given = f"--user {user}, whose data is on a device"
        here = f"`fairfold recommend {run} --history 1,5,9`"
        on_device = f"on the device, whose folder is DEVICE: `fairfold node recommend DEVICE --user {user}`"
        raise InvalidSettings(given, "--history", f"Give the items: {here}; or ask {on_device}.")
    number = 0 if user is None else find_user(data, user)
    best = top_items(loaded, [number], top, new=new, capacity=size)
    history_size = best.history_sizes[0]
    informative = best.num_informative[0]
    model = "the server's model" if size is None else f"the model of a {size} device"
    model = "popularity alone" if best.is_fallback else model
    name = f"user {data.user_ids[number]}" if data.user_ids is not None else f"user #{number}"
    name = name if history is None else f"The user of {history[:60]}" if history_size else "A user without a history"
    table = make_table([], ["rank"])
    for heading in ["item"] if data.titles is None else ["item", "title"]:
        table.add_column(heading)
    table.add_column("score", justify="right")
    found = zip(best.items[0].tolist(), best.scores[0].tolist(), strict=True)
    for rank, (item, score) in enumerate(((item, score) for item, score in found if item >= 0), 1):
        cells = [str(rank), escape(item_name(item, data))]
        cells += [] if data.titles is None else [escape(data.titles[item])]
        table.add_row(*cells, f"{score:.4f}")
    console.echo(f"{name}, by {model} after round {loaded.progress.state.round_number}")
    console.print(table)
    console.echo(f"Left out: the {history_size} items this user has.")
    if informative < history_size or not informative:
        console.echo(_history_note(informative, history_size, loaded.settings.predicts_ratings))


def _history_note(informative: int, given: int, rated: bool) -> str:
    """How much of a history the model can use, and what it does without any."""
    if not given:
        return f"The history is empty, so items are ranked by {'what all users think' if rated else 'popularity'}."
    why = "no user had them in training" + ("" if rated else ", or too few to own a row in this model")
    if informative:
        return f"The model uses {informative} of these {given}; it does not know the others ({why})."
    instead = (
        "items are ranked by what all users think" if rated else "items are ranked by popularity (scores count users)"
    )
    return f"Warning: the model knows none of the {given} items ({why}), so {instead}."
