"""Search for settings as in the paper: every value in a short run, the best one is taken.

The paper does not say on which data it chose. Here a share of each user's *training* data is held out to validate, so
the test set is never looked at. The record is written; what was chosen is then stated in the experiment's file, where
it can be read.
"""

import csv
import io
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.execute import default_processes, workers
from experiments.experiment import Cell, Experiment, SearchFile, Tried
from experiments.kinds import KINDS
from experiments.records import (
    TRIALS,
    Outcome,
    Record,
    Records,
    fingerprint,
    is_traced,
    machine,
    new_record,
    outcome_from_record,
    save_record,
)
from fairfold.atomic_io import make_folder, write_atomically
from fairfold.config import merge_tables, nested, read_settings
from fairfold.data import Dataset, ImageDataset
from fairfold.data.partition import hold_out, hold_out_images
from fairfold.errors import InvalidSettings
from fairfold.federation.federation import load_data
from fairfold.federation.simulation import simulate


@dataclass(frozen=True)
class Trial:
    """One candidate value in one cell, with its outcome on held-out data."""

    cell: Cell
    tried: dict[str, Tried]
    outcome: Outcome


def search(
    experiment: Experiment, out: Path, echo: Callable[[str], None], jobs: int | None = None, *, again: bool = False
) -> Path:
    """Run all candidate values in all searched cells, reusing stored trials; returns the path of the record.

    With ``again`` trials are, whose records say neither code nor hardware. Results go to a folder of the experiment's
    name in ``out``; every trial is printed, in order.
    """
    plan = experiment.file.search
    assert plan is not None
    searched = {column for _, _, column in plan.cells}
    if plan.more.keys() - searched:
        raise InvalidSettings(
            f"{experiment.name}: search has more values for {sorted(plan.more.keys() - searched)}",
            f"columns of its cells, {sorted(searched)}",
            "Correct it in the experiment's file.",
        )
    place = out / experiment.folder
    make_folder(place)
    records = Records(place, TRIALS)
    todo = list(_planned_trials(experiment, plan))
    cells, tries = zip(*todo, strict=True)
    kept = [records.by_label.get(_label(*each)) for each in todo]
    kept = [record if record and (is_traced(record) or not again) else None for record in kept]
    trials, path = list[Trial](), place / "search.csv"
    try:
        with workers(default_processes(len(todo)) if jobs is None else jobs) as pool:
            way = pool.map if pool else map
            for trial in way(_trial, cells, tries, kept, itertools.repeat(plan), itertools.repeat(place)):
                trials.append(trial)
                echo(f"{_label(trial.cell, trial.tried)}: {_shown(trial.outcome.last)}")
                write_atomically(path, _record(trials, plan).encode())
    finally:
        records.join()
    return path


def _label(cell: Cell, tried: dict[str, Tried]) -> str:
    words = (f"{key} {value if isinstance(value, str) else f'{value:g}'}" for key, value in tried.items())
    return " ".join([cell.table, cell.row, cell.column, *words])


def _planned_trials(experiment: Experiment, plan: SearchFile) -> Iterator[tuple[Cell, dict[str, Tried]]]:
    """All candidate values with their cells."""
    known = {(cell.table, cell.row, cell.column): cell for cell in reversed(experiment.cells)}  # the first of its seeds
    for labels in plan.cells:
        if labels not in known:
            given = f"{experiment.name}: search names {labels}"
            raise InvalidSettings(given, "table, row and column of a cell", "Correct it in the experiment's file.")
        values = plan.values | plan.more.get(labels[-1], {})
        for numbers in itertools.product(*values.values()):
            yield known[labels], dict(zip(values, numbers, strict=True))


def _trial(cell: Cell, tried: dict[str, Tried], kept: Record | None, plan: SearchFile, place: Path) -> Trial:
    if not any(isinstance(known, logging.NullHandler) for known in logging.getLogger("fairfold").handlers):
        logging.getLogger("fairfold").addHandler(logging.NullHandler())  # replies of runs that diverge are counted only
    values = merge_tables(merge_tables(cell.values, plan.set), nested(tried))
    data = KINDS[cell.kind].data(values) | {"held out": plan.held_out}
    mark = fingerprint("search", KINDS[cell.kind].canonical(values), plan.seed, data)
    if kept is not None and kept["fingerprint"] == mark:
        return Trial(cell, tried, outcome_from_record(kept))
    settings = read_settings(merge_tables(values, {"run": {"seed": plan.seed}}))
    given, _ = load_data(settings)
    result = simulate(settings, data=_without_test(given, plan))
    seconds = sum(report.seconds for report in result.history)
    hardware = machine(gpu=KINDS[cell.kind].on_gpu(values))
    facts = {"metric": result.metric, "rejections": dict(result.rejections), "machine": hardware}
    curve = [(float(one.round_number), one.quality.server) for one in result.history if one.quality is not None]
    outcome = Outcome.of_curve(curve, result.metric, seconds=seconds, facts=facts, data=data)
    described = {"table": cell.table, "row": cell.row, "column": cell.column, "settings": values, "seed": plan.seed}
    save_record(place, new_record(_label(cell, tried), mark, described, outcome), TRIALS)
    return Trial(cell, tried, outcome)


def _without_test(given: Dataset | ImageDataset, plan: SearchFile) -> Dataset | ImageDataset:
    """The training data alone, a share of which is held out for validation."""
    if isinstance(given, ImageDataset):
        return hold_out_images(given, plan.held_out, plan.seed)
    train, held = hold_out(given.train, plan.held_out, plan.seed)
    return Dataset(given.name, train, held)


def _record(trials: list[Trial], plan: SearchFile) -> str:
    """All trials as CSV, with the best of every cell marked."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    headings = ["metric", "at the end", "best", "round of best", "replies left out", "chosen"]
    names = list(dict.fromkeys([*plan.values, *(name for more in plan.more.values() for name in more)]))
    writer.writerow(["table", "row", "column", *names, *headings])
    for trial in trials:
        cell, outcome = trial.cell, trial.outcome
        others = [other for other in trials if other.cell.label == cell.label]
        writer.writerow(
            [
                cell.table, cell.row, cell.column, *(trial.tried.get(name, "") for name in names),
                outcome.facts["metric"], _shown(outcome.last), _shown(outcome.best), f"{outcome.best_round:.0f}",
                sum(outcome.facts["rejections"].values()),
                "chosen" if trial is _best_of(others) else "",
            ]
        )  # fmt: skip
    return text.getvalue()


def _best_of(trials: list[Trial]) -> Trial:
    """The trial with the best value at its end: a rate that is best early and then falls apart is not chosen."""
    sign = 1 if trials[0].outcome.facts["metric"] == "MSE" else -1
    ends = [math.nan if trial.outcome.last is None else sign * trial.outcome.last for trial in trials]
    return min(zip(trials, ends, strict=True), key=lambda each: (math.isnan(each[1]), each[1]))[0]


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
