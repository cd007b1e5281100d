"""Execution of experiments: stored cells are reused, the others run here or in worker processes."""

import multiprocessing
import os
import queue
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from traceback import format_exc
from typing import Any

from experiments.cells import ReportProgress
from experiments.experiment import Cell, Experiment
from experiments.kinds import KINDS
from experiments.records import (
    CELLS,
    UNDER_WAY,
    Outcome,
    Record,
    Records,
    Watcher,
    file_name,
    fingerprint,
    machine,
    new_record,
    outcome_from_record,
    save_record,
)
from fairfold.atomic_io import make_folder, write_atomically
from fairfold.errors import FairfoldError, InvalidData

POLL_SECONDS = 0.5
THREADS = "OMP_NUM_THREADS"
_SPAWN = multiprocessing.get_context("spawn")  # a fork after OpenMP work hangs


@dataclass(frozen=True)
class Job:
    """A cell to run."""

    cell: Cell
    mark: str  # its fingerprint
    folder: Path  # where it may keep a run to go on with
    homes: list[tuple[Path, Cell]]  # folders of the experiments that have it, and what it is called there
    tried: dict[str, Outcome] = field(default_factory=dict)  # what its trials found, by name


MEMORY_A_JOB = 4 * 2**30
"""GPU memory that is reserved for each process."""


def default_processes(cells: int) -> int:
    """Number of processes: one per core, at most one per cell, and as many as fit in GPU memory.

    A single cell rarely fills a GPU, and much of a run (evaluation, aggregation, files) is the CPU's.
    """
    import torch

    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.cuda.is_available():
        jobs = min(jobs, torch.cuda.get_device_properties(0).total_memory // MEMORY_A_JOB)
    return max(1, min(jobs, cells))


def execute_all(
    experiments: list[Experiment],
    out: Path,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    *,
    run: bool = True,
    only: Collection[str] = (),
    holds: Callable[[Record], bool] = bool,
) -> list[dict[Cell, Outcome]]:
    """Run the missing cells of several experiments in parallel; a cell that several have in common runs once.

    Results of each go to a folder of its name in ``out``. One job runs here, more in processes (by default
    :func:`default_processes`). Without ``run`` only what is kept is taken, and no data is read. With ``only`` (patterns
    of table/row/column) all other cells are taken as they are kept. A kept cell whose record does not hold, which
    ``holds`` says (:func:`experiments.records.is_complete` is one such rule), is run again, and replaced when that is
    done. Returns the outcomes of each experiment.
    """
    watcher = watcher or Watcher()
    kept = _kept(experiments, out)
    anywhere: dict[str, Record] = {}
    for record in (record for records in kept.values() for record in records.by_label.values()):
        if holds(record):
            anywhere.setdefault(record["fingerprint"], record)
    found, marks = dict[str, Outcome](), dict[Cell, str]()  # by mark; what a cell's outcome is found by
    taken, waiting = defaultdict[str, list[Record]](list), dict[str, Job]()  # over from other experiments; to be run
    for experiment in experiments:
        records = kept[experiment.folder]
        for damage in records.damaged:
            watcher.on_note(f"{damage}: what it held is run again")
        for cell in experiment.cells:
            try:
                asked = bool(only) or not experiment.file.tables[cell.table].on_request
                mine = run and asked and matches_patterns(cell, only)
                mark = marks[cell] = _fingerprint_of(cell) if mine else kept_fingerprint(cell, records)
            except InvalidData as error:
                marks[cell] = missing = f"no data: {error}"
                found[missing] = Outcome("no data", str(error))
                continue
            again = mine and not holds(records.by_label.get(cell.label, {}))
            outcome = None if again else records.outcome(cell.label, mark)
            if outcome is None and mark in anywhere:  # another experiment has the same cell
                taken[experiment.folder].append(anywhere[mark] | {"label": cell.label} | _described(cell))
                outcome = outcome_from_record(anywhere[mark])
            if outcome is not None:
                if outcome.by_user or mark not in found:  # of two that keep the same cell, the one that says more
                    found[mark] = outcome
            elif mine:
                folder = records.place / UNDER_WAY / file_name(cell.label)
                waiting.setdefault(mark, Job(cell, mark, folder, [])).homes.append((records.place, cell))
    try:
        if run:
            todo = sorted(waiting.values(), key=lambda job: job.cell.seed)  # tables of one seed first: to be read early
            states = [found[mark].state for mark in marks.values() if mark in found]
            lacking = states.count("no data")
            watcher.on_plan(len(states) - lacking, lacking, [job.cell for job in todo])
            processes = default_processes(len(todo)) if jobs is None else jobs
            for phase in ([job for job in todo if not job.cell.trials], [job for job in todo if job.cell.trials]):
                ready = [replace(job, tried=_tried(job.cell, marks, found)) for job in phase]
                for job, outcome in run_jobs(ready, watcher, processes):
                    watcher.on_cell(job.cell, outcome)
                    found[job.mark] = outcome
    finally:
        for name in {experiment.folder for experiment in experiments}:
            if run or taken[name]:
                kept[name].join(taken[name])
    return [
        {cell: found[marks[cell]] for cell in experiment.cells if marks[cell] in found} for experiment in experiments
    ]


def _kept(experiments: list[Experiment], out: Path) -> dict[str, Records]:
    """Stored records of all experiments, by folder."""
    places = {out / experiment.folder for experiment in experiments}
    for place in places:
        make_folder(place)
    places |= {path.parent for name in (f"{CELLS}.csv", UNDER_WAY) for path in out.glob(f"*/{name}")}
    return {place.name: Records(place) for place in sorted(places)}


def _fingerprint_of(cell: Cell) -> str:
    """Fingerprint of a cell; :class:`InvalidData` if its data is missing."""
    kind = KINDS[cell.kind]
    return fingerprint(cell.kind, kind.canonical(cell.values), cell.seed, kind.data(cell.values))


def matches_patterns(cell: Cell, only: Collection[str]) -> bool:
    """Whether a cell matches a pattern: ``table``, ``table/row`` or ``table/row/column``, with * and ?."""
    words = cell.table, cell.row, cell.column
    return not only or any(fnmatchcase("/".join(words[: one.count("/") + 1]), one) for one in only)


def _tried(cell: Cell, marks: dict[Cell, str], found: dict[str, Outcome]) -> dict[str, Outcome]:
    """Outcomes of a cell's trials, by name."""
    return {trial.column: found[marks[trial]] for trial in cell.trials}


def kept_fingerprint(cell: Cell, records: Records) -> str:
    """Fingerprint of a cell with the data of its stored record: the data itself is not needed."""
    kind, kept = KINDS[cell.kind], records.by_label.get(cell.label)
    data = kept["outcome"]["data"] if kept else {}
    return fingerprint(cell.kind, kind.canonical(cell.values), cell.seed, data)


def _described(cell: Cell) -> dict[str, Any]:
    """Descriptive columns of a record."""
    return {
        "table": cell.table, "row": cell.row, "column": cell.column, "kind": cell.kind, "seed": cell.seed,
        "settings": cell.values,
    }  # fmt: skip


def run_job(job: Job, report: ReportProgress) -> Outcome:
    """Run one cell and save it, also if the method cannot serve it; a cell without data is tried again next time.

    An unforeseen error costs this cell and no other: it is reported, and the cell is run again next time.
    """
    cell, kind = job.cell, KINDS[job.cell.kind]
    broken = job.folder.with_name(f"{job.folder.name}.traceback.txt")
    try:
        outcome = kind.run(cell.values, cell.seed, job.folder, report, job.tried)
    except InvalidData as error:
        return Outcome("no data", str(error))
    except FairfoldError:
        raise
    except Exception as error:
        make_folder(broken.parent)
        write_atomically(broken, format_exc().encode())
        return Outcome("broken", f"{cell.label} broke off ({type(error).__name__}): see {broken}")
    hardware = {"machine": machine(gpu=kind.on_gpu(cell.values))}
    outcome = replace(outcome, data=kind.data(cell.values), facts=outcome.facts | hardware)
    for place, own in job.homes:
        save_record(place, new_record(own.label, job.mark, _described(own), outcome))
    shutil.rmtree(job.folder, ignore_errors=True)  # checkpoints of a finished cell serve nobody
    broken.unlink(missing_ok=True)
    return outcome


def run_jobs(jobs: list[Job], watcher: Watcher, processes: int) -> Iterator[tuple[Job, Outcome]]:
    """Run cells here or in processes, in the order in which they finish."""
    alone = processes == 1 or len(jobs) < 2
    return _run_here(jobs, watcher) if alone else _run_apart(jobs, watcher, processes)


def _run_here(jobs: list[Job], watcher: Watcher) -> Iterator[tuple[Job, Outcome]]:
    for job in jobs:
        yield job, run_job(job, lambda done, of, cell=job.cell: watcher.on_progress(cell, done / of))  # type: ignore[misc]


def _run_apart(jobs: list[Job], watcher: Watcher, processes: int) -> Iterator[tuple[Job, Outcome]]:
    shares: Any = _SPAWN.Queue()
    by_mark, by_cell = {job.mark: job for job in jobs}, {job.cell: job for job in jobs}
    ordered = [by_cell[cell] for cell in start_order(list(by_cell))]
    with workers(processes, initializer=_start, initargs=(shares,)) as pool:
        assert pool is not None
        futures: dict[Future[Outcome], Job] = {pool.submit(_in_process, job): job for job in ordered}
        while futures:
            done, _ = wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            with suppress(queue.Empty):
                while True:
                    mark, share = shares.get_nowait()
                    watcher.on_progress(by_mark[mark].cell, share)
            for future in done:
                yield futures.pop(future), future.result()


def start_order(cells: Sequence[Cell]) -> list[Cell]:
    """Order in which to start cells: by seed, long ones first, with all kinds of work mixed.

    Tables of one seed are to be read early. What starts last should be short, or processes wait for a single one. And
    cells that need the same (networks of images fill a GPU, other cells a core) slow each other down: each kind of
    work is spread over a seed's time by the share of its own work that has been started, so all of them end together.
    """
    kinds: dict[tuple[int, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        kinds[cell.seed, KINDS[cell.kind].needs(cell.values)].append(cell)
    starts: list[tuple[int, float, Cell]] = []
    for (seed, _), alike in kinds.items():
        work = {cell: KINDS[cell.kind].work(cell.values) for cell in alike}
        before, total = 0.0, sum(work.values())
        for cell in sorted(alike, key=lambda cell: -work[cell]):
            starts.append((seed, before / total, cell))
            before += work[cell]
    return [cell for *_, cell in sorted(starts, key=lambda start: start[:2])]


@contextmanager
def workers(processes: int, **start: Any) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of single-threaded processes, terminated on errors; None for one process."""
    if processes == 1:
        yield None
        return
    before = {name: value for name, value in os.environ.items() if name == THREADS}
    os.environ[THREADS] = "1"  # they inherit it; their number already is that of the cores
    with ProcessPoolExecutor(processes, mp_context=_SPAWN, **start) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            del os.environ[THREADS]
            os.environ |= before


_shares: Any = None


def _start(shares: Any) -> None:
    global _shares
    _shares = shares


def _in_process(job: Job) -> Outcome:
    return run_job(job, lambda done, of: _shares.put((job.mark, done / of)))
