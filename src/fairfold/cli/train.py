"""``fairfold train``: run a federation and show what each size of device got out of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fairfold.cli.audit import attack
from fairfold.cli.choose import (
    Change,
    Core,
    Data,
    ItemColumn,
    MinRating,
    RatingColumn,
    Recipe,
    Separator,
    TopUsers,
    UserColumn,
    changes_of,
    choose,
)
from fairfold.cli.console import Terminal
from fairfold.errors import InvalidSettings
from fairfold.runs.units import difference_words, human_bytes, human_seconds, popularity_facts, popularity_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fairfold.metrics.ranking import RankingResult
    from fairfold.metrics.rating import Predictor
    from fairfold.runs.folder import RunFolder
    from fairfold.runs.train import Finished
    from fairfold.settings import Settings
    from fairfold.simulate.result import Result
    from fairfold.simulate.world import World
    from fairfold.trackers import Callback


def train(
    file: Annotated[Path | None, typer.Argument(help="File of settings (TOML). Default: a recipe.")] = None,
    recipe: Recipe = None,
    data: Data = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model: mf, neumf (rankings), neumf-mlp (ratings), mlp, lenet (images: --data mnist), a "
            "registered one, or your own as package.module:Class. Default: mf."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="What devices of each size hold: fair, fair_hom, full_trn, fedavg; with gradient steps (--recipe "
            "paper) also fedhm, heterofl, inconsistent; or central: all data in one place."
        ),
    ] = None,
    capacities: Annotated[
        str | None,
        typer.Option(help="Sizes of the devices: 1x is the whole model, 16x a sixteenth. Default: 1x-4x-16x."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds. Default: that of the recipe.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random. Default: 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/DATE-TIME-DATA.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the run in --out from its newest whole checkpoint."),
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds between checkpoints. Default: 1, or as many as keep them below 10 % of the time."
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Send figures to tensorboard, mlflow or wandb; may be repeated. Each is an extra to install."
        ),
    ] = None,
    attacked: Annotated[
        bool | None,
        typer.Option(
            "--audit/--no-audit",
            help="End with attacks on what the server saw, as `fairfold audit` does. Default: for private runs only.",
        ),
    ] = None,
    user_column: UserColumn = None,
    item_column: ItemColumn = None,
    rating_column: RatingColumn = None,
    separator: Separator = None,
    top_users: TopUsers = None,
    min_rating: MinRating = None,
    core: Core = None,
    change: Change = None,
) -> None:
    """Train a federation of simulated devices; without arguments on a small synthetic world.

    The run is written to a folder: settings, figures of every round, a log, the last two checkpoints, the closing table
    and the model. A run that was interrupted or killed can be resumed, and ends with the same numbers.

    Examples:
        fairfold train --data ratings.csv --capacities 1x-4x-16x --out runs/first
        fairfold train --out runs/first --resume
    """
    from fairfold.backends.distributed import ranks_here
    from fairfold.cli.data import stages
    from fairfold.runs.following import began, follow, leading
    from fairfold.runs.progress import Display
    from fairfold.runs.references import rating_rows, strong_references
    from fairfold.runs.train import run
    from fairfold.settings.privacy import PrivatePrivacy
    from fairfold.trackers import Tracker, tracker

    console, places = Terminal(), list[Path]()
    if resume and out is None:
        raise InvalidSettings("--resume without --out", "the folder of the run", "Add --out FOLDER.")
    options = {
        "data": data, "model": model, "method": method, "capacities": capacities, "rounds": rounds, "seed": seed,
        "user_column": user_column, "item_column": item_column, "rating_column": rating_column,
        "separator": separator, "top_users": top_users, "min_rating": min_rating, "core": core,
    }  # fmt: skip
    sources: list[str] = []
    trackers: list[type[Tracker]] = []

    def chosen() -> Settings:
        settings, source = choose(file, recipe, changes_of(options, change or []), out if resume else None)
        sources.append(source)
        trackers.extend(tracker(name) for name in dict.fromkeys(track or []))
        return settings

    def callbacks(folder: RunFolder) -> list[Callback]:
        places.append(folder.path)
        return [Display(console), *(kind.of_run(folder.path) for kind in trackers)]

    def beside(world: World) -> Mapping[str, RankingResult | Predictor]:
        if settings.model.reads_images or not settings.run.references:
            return {}
        if settings.predicts_ratings:
            return rating_rows(world, console.say)
        return strong_references(world, stages, console.say)

    with ranks_here() as ranks:
        settings = began(ranks, chosen)
        if not ranks.first:
            follow(settings, ranks)
            return
        console.say(*sources)
        try:
            with leading(ranks):
                finished = run(
                    settings, out, resume=resume, checkpoint_every=checkpoint_every, callbacks=callbacks,
                    say=console.say, beside=beside, ranks=ranks,
                )  # fmt: skip
        except KeyboardInterrupt:
            for place in places:
                console.say(f"Go on with: fairfold train --out {place} --resume")
            raise
    _show(console, finished)
    if isinstance(settings.privacy, PrivatePrivacy) if attacked is None else attacked:
        attack(console, finished.folder.path)


def _show(console: Terminal, finished: Finished) -> None:
    result, history = finished.result, finished.result.history
    console.print(closing_table(result))
    for line in result.told:
        console.say(line)
    if result.references:
        console.print(references_table(result))
    if result.rejections:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.rejections.items())
        console.say(f"Replies left out: {reasons} (run.log names them).")
    words = popularity_words(result.settings, popularity_facts(result))
    if words is not None:
        console.say(words)
    each = sum(report.seconds for report in history) / max(len(history), 1)
    rounds = "round" if result.state.round_number == 1 else "rounds"
    console.say(
        f"{result.state.round_number} {rounds} in {finished.seconds:.1f} s ({human_seconds(each)} per round): "
        f"{finished.stopped}. Results are in {finished.folder.path}"
    )


def closing_table(result: Result) -> Table:
    """Quality, memory and bytes by device size."""
    table = Table("devices", title=f"{result.metric} by device size")
    holders = "clients" if result.settings.model.reads_images else "users"
    # What its holders do not tell: a size's model for all users, where it has a meaning.
    everybody = ["for all users"] if any(group.everybody is not None for group in result.groups) else []
    for heading in (holders, "memory", "received", "sent", result.metric, *everybody):
        table.add_column(heading, justify="right")
    for group in result.groups:
        table.add_row(
            group.capacity,
            str(group.users),
            *map(human_bytes, (group.bytes_held, group.bytes_down, group.bytes_up)),
            "left out" if group.quality is None else f"[bold]{group.quality:.3f}[/bold]",
            *("–" if group.everybody is None else f"{group.everybody:.3f}" for _ in everybody),
        )
    table.add_section()
    full_bytes = sum(tensor.numel() * tensor.element_size() for tensor in result.state.full.values())
    table.add_row(
        *("server's model", str(result.users), human_bytes(full_bytes), "–", "–"),
        f"[bold]{result.quality:.3f}[/bold]",
        *(f"{result.quality:.3f}" for _ in everybody),
    )
    return table


def references_table(result: Result) -> Table:
    """What others reach on the same data, all in one place, and how far the server's model is from them over users."""
    title = f"{result.metric} for all users beside the server's model, {result.quality:.4f}"
    table = Table("without federation", title=title)
    table.add_column(result.metric, justify="right")
    table.add_column("server's model − this", justify="right")
    for name, value in result.references.items():
        apart = result.differences.get(name)
        table.add_row(name, f"{value:.4f}", difference_words(apart) if apart else f"{result.quality - value:+.4f}")
    return table
