"""Reproducibility check: stored cells that were run again are compared with their records.

Either some are run again here (:func:`check`), or another folder holds records of cells that were (:func:`join`), and
these take the place of the kept ones. In the first case nobody picks them: of all cells that are kept for today's
settings, whose data is at hand and that took no longer than asked, those come first whose names have the smallest
SHA-256. What comes out agrees where it has the same four digits, or where it is no further off than the seeds of the
same cell are from each other (their largest from their smallest): sums are not added up in the same order on every
machine, and training magnifies the last digit.
"""

import csv
import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from tempfile import TemporaryDirectory

from experiments.execute import Job, default_processes, execute_all, kept_fingerprint, run_jobs
from experiments.experiment import Cell, Experiment
from experiments.kinds import KINDS
from experiments.records import TRIALS, Outcome, Record, Records, Watcher, file_name, is_complete, outcome_from_record
from fairfold.atomic_io import write_atomically
from fairfold.errors import InvalidData

DIGITS = 0.5e-4
AGAIN = "again.csv"


@dataclass(frozen=True)
class Recheck:
    """A cell that was run again, with the stored and the new figure."""

    cell: Cell
    kept: float
    now: float
    seeds: tuple[float, ...]  # what was kept of the cell, for each seed

    @property
    def apart(self) -> float:
        """Absolute difference."""
        return abs(self.now - self.kept)

    @property
    def range(self) -> float:
        """Range of the seeds' figures."""
        return max(self.seeds) - min(self.seeds)

    @property
    def spread(self) -> float:
        """Sample standard deviation of the seeds' figures."""
        return stdev(self.seeds) if len(self.seeds) > 1 else 0.0

    @property
    def same(self) -> bool:
        """Whether both agree to four digits."""
        return self.apart <= DIGITS

    @property
    def agrees(self) -> bool:
        """Whether both agree to four digits or within the range of the seeds."""
        return self.same or self.apart <= self.range

    @property
    def result(self) -> str:
        """One word for tables: same, agrees or DIFFERS."""
        return "same" if self.same else "agrees" if self.agrees else "DIFFERS"


def chosen(found: dict[Cell, Outcome], many: int, longest: float) -> list[Cell]:
    """Choose cells to run again, by the rule of the module."""
    done = [cell for cell, outcome in found.items() if outcome.state == "done" and outcome.seconds <= longest]
    known = [cell for cell in done if cell.kind != "baselines" and not cell.is_trial]
    ordered = sorted(known, key=lambda cell: hashlib.sha256(f"{cell.experiment} {cell.label}".encode()).digest())
    first = list[Cell]()
    for cell in ordered:
        if len(first) == many:
            break
        try:
            if KINDS[cell.kind].data(cell.values) == found[cell].data:
                first.append(cell)
        except InvalidData:
            continue
    return first


def check(
    experiments: list[Experiment],
    out: Path,
    many: int,
    longest: float = float("inf"),
    jobs: int | None = None,
    watcher: Watcher | None = None,
) -> list[Recheck]:
    """Run some stored cells again and compare; the records stay as they are."""
    watcher, found = watcher or Watcher(), dict[Cell, Outcome]()
    for outcomes in execute_all(experiments, out, run=False):
        found |= outcomes
    cells, now = chosen(found, many, longest), dict[Cell, Outcome]()
    watcher.on_plan(len(found) - len(cells), 0, cells)
    with TemporaryDirectory() as place:
        todo = [
            Job(cell, cell.label, Path(place) / file_name(cell.experiment + cell.label), [], _tried(cell, found))
            for cell in cells
        ]
        for job, outcome in run_jobs(todo, watcher, default_processes(len(todo)) if jobs is None else jobs):
            watcher.on_cell(job.cell, outcome)
            now[job.cell] = outcome
    return _compared(experiments, found, now)


def join(experiments: list[Experiment], out: Path, other: Path) -> list[Recheck]:
    """Merge the records of another folder: new cells, and cells that were run again, which replace the stored ones.

    Records of other settings than today's stay where they are, and so do those that lack something that is kept
    (:func:`experiments.records.is_complete`). Trials of a search are taken over as they are. How far the new ones are
    off is written to ``again.csv`` in ``out``, beside what is there of earlier ones, and returned.
    """
    found, machines = list[Recheck](), dict[Cell, tuple[str, str]]()
    for experiment in (one for one in experiments if (other / one.folder).is_dir()):
        mine, theirs = Records(out / experiment.folder), Records(other / experiment.folder)
        if theirs.damaged:
            raise InvalidData(theirs.damaged[0], "whole records", f"Copy {theirs.place} again.")
        taken = dict[Cell, Record]()
        for cell in experiment.cells:
            new, old = theirs.by_label.get(cell.label), mine.by_label.get(cell.label)
            if new is None or new == old or new["fingerprint"] != kept_fingerprint(cell, theirs):
                continue
            if old is None or is_complete(new) or not is_complete(old):
                taken[cell] = new
        kept = {cell: mine.outcome(cell.label, kept_fingerprint(cell, mine)) for cell in experiment.cells}
        before = {cell: outcome for cell, outcome in kept.items() if outcome is not None}  # of today's settings
        now = {cell: outcome_from_record(record) for cell, record in taken.items()}
        machines |= {cell: (_machine(before[cell]), _machine(now[cell])) for cell in now.keys() & before.keys()}
        found += _compared([experiment], before, now)
        mine.join(taken.values())
        trials = Records(theirs.place, TRIALS).by_label
        Records(mine.place, TRIALS).join(trials.values())
    _write_again(out / AGAIN, found, machines)
    return found


def _compared(experiments: Iterable[Experiment], kept: dict[Cell, Outcome], now: dict[Cell, Outcome]) -> list[Recheck]:
    """Compare the figure of every cell in both, beside those of the stored seeds."""
    best = {(one.name, name): table.value == "best" for one in experiments for name, table in one.file.tables.items()}
    seeds = defaultdict[tuple[str, ...], list[float]](list)

    def value(cell: Cell, outcome: Outcome) -> float | None:
        return outcome.best if best[cell.experiment, cell.table] else outcome.last

    for cell, outcome in kept.items():
        if (figure := value(cell, outcome)) is not None:
            seeds[cell.experiment, cell.table, cell.row, cell.column].append(figure)
    return [
        Recheck(cell, before, again, tuple(seeds[cell.experiment, cell.table, cell.row, cell.column]))
        for cell, outcome in now.items()
        if cell in kept and not cell.is_trial
        if (before := value(cell, kept[cell])) is not None and (again := value(cell, outcome)) is not None
    ]


def _machine(outcome: Outcome) -> str:
    return str(outcome.facts.get("machine", ""))


def _write_again(path: Path, found: list[Recheck], machines: dict[Cell, tuple[str, str]]) -> None:
    """Write a line per cell, the latest comparison only."""
    heading = ["experiment", "cell", "kept", "now", "apart", "spread of the seeds", "verdict", "kept on", "now on"]
    lines = dict[tuple[str, str], list[str]]()
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            lines = {(line[0], line[1]): line for line in list(csv.reader(file))[1:]}
    for one in found:
        key, figures = (one.cell.experiment, one.cell.label), (one.kept, one.now, one.apart, one.spread)
        lines[key] = [*key, *(f"{figure:.6f}" for figure in figures), one.result, *machines[one.cell]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heading, *(lines[key] for key in sorted(lines))])
    write_atomically(path, text.getvalue().encode())


def _tried(cell: Cell, found: dict[Cell, Outcome]) -> dict[str, Outcome]:
    """Stored outcomes of a cell's trials, which are not run again."""
    return {trial.column: found[trial] for trial in cell.trials if trial in found}
