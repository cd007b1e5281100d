"""Kept cells that were run again: do they come out the same?

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

from fairfold.errors import InvalidData
from fairfold.files import write_atomically
from fairfold.reproduce.execute import Job, default_jobs, execute_all, mark_as_kept, run_jobs
from fairfold.reproduce.experiment import Cell, Experiment
from fairfold.reproduce.kinds import KINDS
from fairfold.reproduce.records import TRIALS, Outcome, Record, Records, Watcher, file_name, outcome_of, whole

DIGITS = 0.5e-4
AGAIN = "again.csv"


@dataclass(frozen=True)
class Checked:
    """A cell that was run again."""

    cell: Cell
    kept: float
    now: float
    seeds: tuple[float, ...]  # what was kept of the cell, for each seed

    @property
    def apart(self) -> float:
        """How far off."""
        return abs(self.now - self.kept)

    @property
    def range(self) -> float:
        """Of the seeds."""
        return max(self.seeds) - min(self.seeds)

    @property
    def spread(self) -> float:
        """Their sample standard deviation."""
        return stdev(self.seeds) if len(self.seeds) > 1 else 0.0

    @property
    def same(self) -> bool:
        """To four digits."""
        return self.apart <= DIGITS

    @property
    def agrees(self) -> bool:
        """As the module says."""
        return self.same or self.apart <= self.range

    @property
    def verdict(self) -> str:
        """In a word."""
        return "same" if self.same else "agrees" if self.agrees else "DIFFERS"


def chosen(found: dict[Cell, Outcome], many: int, longest: float) -> list[Cell]:
    """Cells to be run again, by the rule of the module."""
    done = [cell for cell, outcome in found.items() if outcome.state == "done" and outcome.seconds <= longest]
    known = [cell for cell in done if cell.kind != "references" and not cell.is_trial]
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
) -> list[Checked]:
    """Run some kept cells again, beside the records, which stay as they are."""
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
        for job, outcome in run_jobs(todo, watcher, default_jobs(len(todo)) if jobs is None else jobs):
            watcher.on_cell(job.cell, outcome)
            now[job.cell] = outcome
    return _compared(experiments, found, now)


def join(experiments: list[Experiment], out: Path, other: Path) -> list[Checked]:
    """Take over what another folder holds of the cells: new ones, and such as were run again, which replace the kept.

    Records of other settings than today's stay where they are, and so do those that lack something that is kept
    (:func:`fairfold.reproduce.records.whole`). Trials of a search are taken over as they are. How far the new ones are
    off is written to ``again.csv`` in ``out``, beside what is there of earlier ones, and returned.
    """
    found, machines = list[Checked](), dict[Cell, tuple[str, str]]()
    for experiment in (one for one in experiments if (other / one.folder).is_dir()):
        mine, theirs = Records(out / experiment.folder), Records(other / experiment.folder)
        if theirs.damaged:
            raise InvalidData(theirs.damaged[0], "whole records", f"Copy {theirs.place} again.")
        taken = dict[Cell, Record]()
        for cell in experiment.cells:
            new, old = theirs.by_label.get(cell.label), mine.by_label.get(cell.label)
            if new is None or new == old or new["fingerprint"] != mark_as_kept(cell, theirs):
                continue
            if old is None or whole(new) or not whole(old):
                taken[cell] = new
        kept = {cell: mine.outcome(cell.label, mark_as_kept(cell, mine)) for cell in experiment.cells}
        before = {cell: outcome for cell, outcome in kept.items() if outcome is not None}  # of today's settings
        now = {cell: outcome_of(record) for cell, record in taken.items()}
        machines |= {cell: (_machine(before[cell]), _machine(now[cell])) for cell in now.keys() & before.keys()}
        found += _compared([experiment], before, now)
        mine.join(taken.values())
        trials = Records(theirs.place, TRIALS).by_label
        Records(mine.place, TRIALS).join(trials.values())
    _write_again(out / AGAIN, found, machines)
    return found


def _compared(experiments: Iterable[Experiment], kept: dict[Cell, Outcome], now: dict[Cell, Outcome]) -> list[Checked]:
    """The figure that its table shows of every cell of both, beside that of the kept seeds."""
    best = {(one.name, name): table.value == "best" for one in experiments for name, table in one.file.tables.items()}
    seeds = defaultdict[tuple[str, ...], list[float]](list)

    def value(cell: Cell, outcome: Outcome) -> float | None:
        return outcome.best if best[cell.experiment, cell.table] else outcome.last

    for cell, outcome in kept.items():
        if (figure := value(cell, outcome)) is not None:
            seeds[cell.experiment, cell.table, cell.row, cell.column].append(figure)
    return [
        Checked(cell, before, again, tuple(seeds[cell.experiment, cell.table, cell.row, cell.column]))
        for cell, outcome in now.items()
        if cell in kept and not cell.is_trial
        if (before := value(cell, kept[cell])) is not None and (again := value(cell, outcome)) is not None
    ]


def _machine(outcome: Outcome) -> str:
    return str(outcome.facts.get("machine", ""))


def _write_again(path: Path, found: list[Checked], machines: dict[Cell, tuple[str, str]]) -> None:
    """A line per cell; one that was compared before has the latest alone."""
    heading = ["experiment", "cell", "kept", "now", "apart", "spread of the seeds", "verdict", "kept on", "now on"]
    lines = dict[tuple[str, str], list[str]]()
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            lines = {(line[0], line[1]): line for line in list(csv.reader(file))[1:]}
    for one in found:
        key, figures = (one.cell.experiment, one.cell.label), (one.kept, one.now, one.apart, one.spread)
        lines[key] = [*key, *(f"{figure:.6f}" for figure in figures), one.verdict, *machines[one.cell]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heading, *(lines[key] for key in sorted(lines))])
    write_atomically(path, text.getvalue().encode())


def _tried(cell: Cell, found: dict[Cell, Outcome]) -> dict[str, Outcome]:
    """What the kept trials of a cell found: these are not run again."""
    return {trial.column: found[trial] for trial in cell.trials if trial in found}
