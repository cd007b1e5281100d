"""``fairfold train --splits N``: the same settings on several splits of the data, and the spread over them."""

from __future__ import annotations

from statistics import mean, stdev
from typing import TYPE_CHECKING

from fairfold.cli.console import make_table
from fairfold.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from fairfold.config import Settings
    from fairfold.federation.evaluation import Result


def settings_of_splits(settings: Settings, count: int) -> list[Settings]:
    """Settings of so many runs, each on a split or world of its own: the seed given and those that follow."""
    from fairfold.config.tables import ImageData, InteractionData
    from fairfold.data.preparing import PUBLISHED, prepare

    data = settings.data
    if isinstance(data, InteractionData):
        key, first, why = "data.split_seed", data.split_seed, ""
        if data.split != "random":
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
