"""Kept cells run again: do they come out the same?

Nobody picks them. Of all cells that are kept for today's settings, whose data is at hand and that took no longer than
asked, those come first whose names have the smallest SHA-256. What comes out agrees where it has the same four digits,
or where it is no further off than the seeds of the same cell are from each other (their largest from their smallest):
sums are not added up in the same order on every machine, and training magnifies the last digit.
"""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fairfold.errors import InvalidData
from fairfold.reproduce.execute import Job, default_jobs, execute_all, run_jobs
from fairfold.reproduce.experiment import Cell, Experiment
from fairfold.reproduce.kinds import KINDS
from fairfold.reproduce.records import Outcome, Watcher, file_name

DIGITS = 0.5e-4


@dataclass(frozen=True)
class Checked:
    """A cell that was run again."""

    cell: Cell
    kept: float
    now: float
    range: float  # of the kept seeds

    @property
    def same(self) -> bool:
        """To four digits."""
        return abs(self.now - self.kept) <= DIGITS

    @property
    def agrees(self) -> bool:
        """As the module says."""
        return self.same or abs(self.now - self.kept) <= self.range


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
    seeds = defaultdict[tuple[str, ...], list[float]](list)
    for cell, outcome in found.items():
        if outcome.last is not None:
            seeds[cell.experiment, cell.table, cell.row, cell.column].append(outcome.last)
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
    return [
        Checked(cell, kept, again, max(of) - min(of))
        for cell in cells
        if (kept := found[cell].last) is not None and (again := now[cell].last) is not None
        for of in [seeds[cell.experiment, cell.table, cell.row, cell.column]]
    ]


def _tried(cell: Cell, found: dict[Cell, Outcome]) -> dict[str, Outcome]:
    """What the kept trials of a cell found: these are not run again."""
    return {trial.column: found[trial] for trial in cell.trials if trial in found}
