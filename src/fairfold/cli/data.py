"""``fairfold data``: prepare data sets and list them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairfold.cli.console import Terminal, make_table
from fairfold.cli.options import ItemColumn, MinRating, RatingColumn, Separator, TimeColumn, TopUsers, UserColumn

if TYPE_CHECKING:
    from fairfold.data.preparing import Prepared

COUNTS = (
    "users", "items", "items_touched", "items_in_train", "interactions", "rated", "train", "valid", "test", "classes",
    "train_writers", "test_writers",
)  # fmt: skip
"""Rows of the table of counts."""

data = typer.Typer(help="Prepare data sets, and list those that are known.", no_args_is_help=True)

Cache = Annotated[
    Path | None,
    typer.Option(help="Folder of prepared data.", envvar="FAIRFOLD_CACHE", show_default="~/.cache/fairfold"),
]


@data.command("prepare")
def prepare_command(
    source: Annotated[
        str, typer.Argument(metavar="NAME|FILE|FOLDER", help="A name from `fairfold data list`, a file or a folder.")
    ],
    top_users: TopUsers = None,
    core: Annotated[int, typer.Option(help="Keep only users and items with at least this many interactions.")] = 0,
    ratings: Annotated[bool, typer.Option("--ratings", help="Keep ratings; leave out what is not rated.")] = False,
    min_rating: MinRating = None,
    split: Annotated[
        str | None,
        typer.Option(help="Share of each user to train on, or newest, newest-share, users.", show_default="0.7"),
    ] = None,
    resplit: Annotated[bool, typer.Option("--resplit", help="Pool a published split, and split again.")] = False,
    valid: Annotated[float, typer.Option(help="Share of the training part to put aside for validation.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    user_column: UserColumn = None,
    item_column: ItemColumn = None,
    rating_column: RatingColumn = None,
    separator: Separator = None,
    time_column: TimeColumn = None,
    scale: Annotated[tuple[float, float] | None, typer.Option(help="Lowest and highest possible rating.")] = None,
    images: Annotated[str | None, typer.Option(help="Folder of the images, for a folder of writers.")] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Prepare again, even if the result is in the cache.")
    ] = False,
    cache: Cache = None,
) -> None:
    """Read a data set, filter, number and split it, and store it in the cache.

    A table shows what was read, repaired and left out. `fairfold train --data` then finds it prepared.

    Examples:
        fairfold data prepare ratings.csv --top-users 100
        fairfold data prepare ml-1m --min-rating 4
    """
    from fairfold.data.preparing import prepare

    prepared = prepare(
        source,
        cache=cache,
        stages=stages,
        refresh=refresh,
        top_users=top_users,
        core=core,
        ratings=ratings,
        min_rating=min_rating,
        split=_share(split),
        resplit=resplit,
        valid=valid,
        seed=seed,
        user_column=user_column,
        item_column=item_column,
        rating_column=rating_column,
        time_column=time_column,
        scale=scale,
        images=images,
        separator="\t" if separator in ("tab", "\\t") else separator,
    )
    _print_prepared(prepared)


def _share(split: str | None) -> float | str | None:
    """A share as a number; a name stays one."""
    try:
        return None if split is None else float(split)
    except ValueError:
        return split


@data.command("list")
def list_command(cache: Cache = None) -> None:
    """Show the known data sets, where they come from, and what is on this machine.

    Examples:
        fairfold data list
    """
    from rich.table import Table

    from fairfold.data.download import PUBLIC_DATASETS, data_folders, local_folder
    from fairfold.data.files import cache_folder
    from fairfold.data.store import MANIFEST, read_manifest
    from fairfold.errors import FairfoldError

    console = Terminal()
    for one in PUBLIC_DATASETS.values():
        folder = local_folder(one.name, cache)
        place = "not here; downloads when asked for" if one.downloads else f"not here; {one.how}"
        console.echo(f"{one.name}  {place if folder is None else f'on disk: {folder}'}")
        console.echo(f"    {', '.join(one.files)}  ({one.terms})\n    {one.page}")
    where = " or ".join(str(folder) for folder in reversed(data_folders("NAME", cache)))
    console.echo(f"\nFiles put by hand are looked for in {where}.\n")
    prepared = Table(title=f"Prepared in {cache_folder(cache)}: each is a name for --data")
    prepared.add_column("name", overflow="fold", no_wrap=True)  # whole, as it has to be typed
    for heading in ("kind", "counts", "options"):
        prepared.add_column(heading)
    for path in sorted(cache_folder(cache).glob(f"*/{MANIFEST}")):
        try:
            manifest = read_manifest(path.parent)
        except FairfoldError as error:
            prepared.add_row(path.parent.name, "unreadable", str(error), "")
            continue
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in manifest["counts"].items())
        options = ", ".join(f"{name}={value}" for name, value in manifest["options"].items())
        prepared.add_row(path.parent.name, manifest["kind"], counts, options or "–")
    console.print(prepared)


@contextlib.contextmanager
def stages(name: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a stage on one line, which disappears at its end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if size:
        columns += [BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=size or None)
        yield lambda done: progress.advance(task, done)


def _print_prepared(prepared: "Prepared") -> None:
    """Print the counts of a prepared data set, and what was repaired."""
    console = Terminal()
    manifest = prepared.manifest
    counts = dict(manifest["counts"])
    if "users" in counts:
        counts["interactions"] = counts["train"] + counts["valid"] + counts["test"]
        if not counts["valid"]:
            del counts["valid"]
    sides = {"in the source": manifest["source_counts"]} if "source_counts" in manifest else {}
    sides["prepared"] = counts
    table = make_table([""], list(sides), title=manifest["name"], title_justify="left")
    for name in [name for name in COUNTS if any(name in counts for counts in sides.values())]:
        cells = (f"{counts[name]:,}" if name in counts else "" for counts in sides.values())
        table.add_row(name.replace("_", " "), *cells)
    console.print(table)
    if manifest["repairs"]:
        repairs = make_table(["repaired or left out"], ["count"])
        for reason, count in manifest["repairs"].items():
            repairs.add_row(reason, f"{count:,}")
        console.print(repairs)
    console.echo(f"split: {manifest['split']}")
    console.echo(f"{prepared.note}: {prepared.folder}")
