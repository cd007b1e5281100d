"""``fairfold train``: run a simulated federation, on one split of the data or several; show quality by size."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated

import typer

from fairfold.cli import options as opt
from fairfold.cli.console import Terminal, make_table
from fairfold.cli.inspection import run_audit
from fairfold.errors import InvalidSettings
from fairfold.runs.units import describe_popularity, format_difference, human_bytes, human_seconds, popularity_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from fairfold.config import Settings
    from fairfold.federation.evaluation import Callback, Result
    from fairfold.federation.federation import Federation
    from fairfold.metrics.ranking import RankingResult
    from fairfold.metrics.rating import Predictor
    from fairfold.runs.train import FinishedRun


def train(
    file: Annotated[Path | None, typer.Argument(help="File of settings (TOML). Default: a recipe.")] = None,
    recipe: opt.Recipe = None,
    data: opt.Data = None,
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
            help="What devices of each size hold: fair, fair_hom, full_trn, fedavg; by gradient steps fedhm, "
            "heterofl, inconsistent; one of a --plugin; or central: all data in one place."
        ),
    ] = None,
    capacities: Annotated[
        str | None, typer.Option(help="Device sizes: 1x is the whole model, 16x a sixteenth. Default: 1x-4x-16x.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds. Default: that of the recipe.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random. Default: 0.")] = None,
    splits: Annotated[
        int | None, typer.Option(min=2, help="Run on so many random splits of the data, and show the spread.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/DATE-TIME-DATA.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out from its last checkpoint.")] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds between checkpoints. Default: 1, or so many that they take below 10 % of time."
        ),
    ] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Send figures to tensorboard, mlflow or wandb (extras); may be repeated.")
    ] = None,
    audit: Annotated[
        bool | None,
        typer.Option(
            "--audit/--no-audit",
            help="End with attacks on what the server saw, as `fairfold audit` does. Default: for private runs only.",
        ),
    ] = None,
    user_column: opt.UserColumn = None,
    item_column: opt.ItemColumn = None,
    rating_column: opt.RatingColumn = None,
    time_column: opt.TimeColumn = None,
    split: opt.Split = None,
    separator: opt.Separator = None,
    top_users: opt.TopUsers = None,
    min_rating: opt.MinRating = None,
    core: opt.Core = None,
    plugin: opt.Plugin = None,  # noqa: ARG001 (its callback loads it)
    change: opt.Change = None,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Show all settings and where each comes from, and stop.")
    ] = False,
) -> None:
    """Train a federation of simulated clients; without arguments on small synthetic data.

    The run is written to a folder: settings, figures of every round, a log, the last two checkpoints, the closing table
    and the model. A run that was interrupted or killed can be resumed, and ends with the same numbers.

    Examples:
        fairfold train --data ratings.csv --capacities 1x-4x-16x --out runs/first
        fairfold train --out runs/first --resume
        fairfold train --data ratings.csv --splits 3
        fairfold train --recipe paper --show-settings
    """
    from fairfold.backends.distributed import ranks_here
    from fairfold.cli.data import stages
    from fairfold.config.fleet import DifferentialPrivacy
    from fairfold.runs.folder import RunFolder
    from fairfold.runs.progress import Display
    from fairfold.runs.trackers import Tracker, find_tracker
    from fairfold.runs.train import follow_run, rating_baselines, run, share_errors, shared_settings, strong_baselines

    console = Terminal()
    if resume and out is None:
        raise InvalidSettings("--resume without --out", "the folder of the run", "Add --out FOLDER.")
    if resume and splits is not None:
        given, remedy = "--resume with --splits", f"Resume one: --out {out}/split-0 --resume."
        raise InvalidSettings(given, "one run to resume", remedy)
    options = {
        "data": data, "model": model, "method": method, "capacities": capacities, "rounds": rounds, "seed": seed,
        "user_column": user_column, "item_column": item_column, "rating_column": rating_column,
        "time_column": time_column, "separator": separator, "top_users": top_users, "min_rating": min_rating,
        "core": core, "split": split,
    }  # fmt: skip
    folders: list[Path] = []
    source: list[str] = []
    trackers: list[type[Tracker]] = []

    def resolve() -> opt.ResolvedSettings:
        return opt.resolve_settings(file, recipe, opt.collect_changes(options, change or []), out if resume else None)

    def first_rank_settings() -> Settings:
        resolved = resolve()
        source.append(resolved.source)
        trackers.extend(find_tracker(name) for name in dict.fromkeys(track or []))
        return resolved.settings

    def callbacks(folder: RunFolder) -> list[Callback]:
        folders.append(folder.path)
        return [Display(console), *(kind.for_folder(folder.path) for kind in trackers)]

    def baselines(federation: Federation) -> Mapping[str, RankingResult | Predictor]:
        if settings.model.reads_images or not settings.run.baselines:
            return {}
        if settings.predicts_ratings:
            return rating_baselines(federation, console.echo)
        return strong_baselines(federation, stages, console.echo)

    if show_settings:
        opt.print_settings(console, resolve())
        return
    with ranks_here() as ranks:
        settings = shared_settings(ranks, first_rank_settings)
        if splits is not None and ranks.num_ranks > 1:
            raise InvalidSettings("--splits of several processes", "one process", "Run each split by itself.")
        if not ranks.first:
            follow_run(settings, ranks)
            return
        console.echo(*source)
        each, results = [settings] if splits is None else settings_of_splits(settings, splits), []
        if splits is not None:
            out = RunFolder.create(settings, out).path
        for place, mine in enumerate(each):
            try:
                with share_errors(ranks):
                    finished = run(
                        mine,
                        out if splits is None or out is None else out / f"split-{place}",
                        resume=resume,
                        checkpoint_every=checkpoint_every,
                        callbacks=callbacks,
                        echo=console.echo,
                        more_baselines=baselines,
                        ranks=ranks,
                    )
            except KeyboardInterrupt:
                for folder in folders[-1:]:
                    console.echo(f"Go on with: fairfold train --out {folder} --resume")
                raise
            results.append(finished.result)
            _print_result(console, finished)
            if isinstance(settings.privacy, DifferentialPrivacy) if audit is None else audit:
                run_audit(console, finished.folder.path)
    if splits is not None:
        console.print(spread_table(results))


def _print_result(console: Terminal, finished: FinishedRun) -> None:
    result = finished.result
    for line in result.warnings:
        console.echo(line)
    console.print(closing_table(result))
    for line in result.notes:
        console.echo(line)
    if result.baselines:
        console.print(baselines_table(result))
    if result.rejections:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.rejections.items())
        console.echo(f"Replies left out: {reasons} (run.log names them).")
    popularity = describe_popularity(result.settings, popularity_facts(result))
    if popularity is not None:
        console.echo(popularity)
    each = sum(report.seconds for report in result.history) / max(len(result.history), 1)
    rounds = "round" if result.state.round_number == 1 else "rounds"
    console.echo(
        f"{result.state.round_number} {rounds} in {finished.seconds:.1f} s ({human_seconds(each)} per round): "
        f"{finished.stopped}. Results are in {finished.folder.path}"
    )


def closing_table(result: Result) -> Table:
    """Quality, memory and bytes by device size; with a size's model for all users, where it can serve them."""
    from fairfold.estimator.display import full_bytes

    holders = "clients" if result.settings.model.reads_images else "users"
    everybody = ["for all users"] if any(group.everybody is not None for group in result.groups) else []
    headings = [holders, "memory", "received", "sent", result.metric, *everybody]
    table = make_table(["devices"], headings, title=f"{result.metric} by device size")
    for group in result.groups:
        table.add_row(
            group.capacity,
            str(group.users),
            *map(human_bytes, (group.bytes_held, group.bytes_down, group.bytes_up)),
            "left out" if group.quality is None else f"[bold]{group.quality:.3f}[/bold]",
            *("–" if group.everybody is None else f"{group.everybody:.3f}" for _ in everybody),
        )
    table.add_section()
    table.add_row(
        *("server's model", str(result.users), human_bytes(full_bytes(result)), "–", "–"),
        f"[bold]{result.quality:.3f}[/bold]",
        *(f"{result.quality:.3f}" for _ in everybody),
    )
    return table


def baselines_table(result: Result) -> Table:
    """Quality of central baselines on the same data, and the difference of the server's model over users."""
    from fairfold.metrics.ranking import is_cut

    title = f"{result.metric} for all users beside the server's model, {result.quality:.4f}"
    table = make_table(["without federation"], [result.metric, "server's model − this"], title=title)
    for name, value in result.baselines.items():
        apart = result.differences.get(name)
        difference = format_difference(apart) if apart else f"{result.quality - value:+.4f}"
        difference = "–" if is_cut(name) else difference
        table.add_row(name, f"{value:.4f}", difference)
    return table


def settings_of_splits(settings: Settings, count: int) -> list[Settings]:
    """Settings of so many runs, each on a split or world of its own: the seed given and those that follow."""
    from fairfold.config.tables import ImageData, InteractionData
    from fairfold.data.preparing import PUBLISHED, prepare

    data = settings.data
    if isinstance(data, InteractionData):
        key, first, why = "data.split_seed", data.split_seed, ""
        if data.split not in ("random", "users"):
            why = f"data.split={data.split!r}, which is one split"
        elif prepare(data.name, **data.options).manifest["split"] == PUBLISHED:
            why = f"{data.name}, which comes with a split of its own"
        if why:
            remedy = "Leave out --splits, or draw splits: --set data.resplit=true --set data.split=random."
            raise InvalidSettings(f"--splits {count} of {why}", "data that is split at random", remedy)
    elif isinstance(data, ImageData) and data.seed is not None:
        key, first = "data.seed", data.seed
    else:
        key, first = "run.seed", settings.run.seed
    return [settings.with_changes({key: first + place}) for place in range(count)]


def spread_table(results: Sequence[Result]) -> Table:
    """Mean and standard deviation over splits of each size, the server's model and the baselines."""
    first = results[0]
    title = f"{first.metric}, mean ± standard deviation over {len(results)} splits"
    table = make_table([""], [first.metric, "server's model − this"], title=title)
    for place, group in enumerate(first.groups):
        values = [one.groups[place].comparable_quality for one in results]
        known = [value for value in values if value is not None]
        table.add_row(group.capacity, _spread(known) if len(known) == len(values) else "–", "")
    table.add_row("server's model", f"[bold]{_spread([one.quality for one in results])}[/bold]", "")
    for name in baseline_names(results):
        found = [next(value for full, value in one.baselines.items() if _short(full) == name) for one in results]
        apart = [one.quality - value for one, value in zip(results, found, strict=True)]
        table.add_row(name, _spread(found), _spread(apart, signed=True))
    return table


def baseline_names(results: Sequence[Result]) -> list[str]:
    """Names, without the settings that were chosen on each split, of the baselines that all results have, uncut."""
    from fairfold.metrics.ranking import is_cut

    found = [{_short(name) for name in one.baselines if not is_cut(name)} for one in results]
    return [name for name in dict.fromkeys(map(_short, results[0].baselines)) if all(name in one for one in found)]


def _short(name: str) -> str:
    return name.split(" of ")[0].split(" (")[0]


def _spread(values: Sequence[float], *, signed: bool = False) -> str:
    return f"{mean(values):{'+' if signed else ''}.4f} ± {stdev(values):.4f}"
