"""All cells of an experiment, each run once: what is kept is taken as it is, the rest runs, here or in processes."""

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

from fairfold.errors import FairfoldError, InvalidData
from fairfold.files import make_folder, write_atomically
from fairfold.reproduce.experiment import Cell, Experiment
from fairfold.reproduce.kinds import KINDS
from fairfold.reproduce.machine import machine
from fairfold.reproduce.memory import Tell
from fairfold.reproduce.records import (
    CELLS,
    UNDER_WAY,
    Outcome,
    Record,
    Records,
    Watcher,
    file_name,
    fingerprint,
    keep,
    new_record,
    outcome_of,
)

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
"""Memory of a GPU that a process is reckoned with."""


def default_jobs(cells: int) -> int:
    """A process per core, at most one per cell; they share a GPU, where there is one, as far as its memory goes.

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
    """Run what is not kept yet of several experiments, side by side, what they have in common once.

    Results of each go to a folder of its name in ``out``. One job runs here, more in processes (by default
    :func:`default_jobs`). Without ``run`` only what is kept is taken, and no data is read. With ``only`` (patterns of
    table/row/column) all other cells are taken as they are kept. A kept cell whose record does not hold, which
    ``holds`` says (:func:`fairfold.reproduce.records.whole` is one such rule), is run again, and replaced when that is
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
                mine = run and asked and named_by(cell, only)
                mark = marks[cell] = _mark(cell) if mine else mark_as_kept(cell, records)
            except InvalidData as error:
                marks[cell] = missing = f"no data: {error}"
                found[missing] = Outcome("no data", str(error))
                continue
            again = mine and not holds(records.by_label.get(cell.label, {}))
            outcome = None if again else records.outcome(cell.label, mark)
            if outcome is None and mark in anywhere:  # another experiment has the same cell
                taken[experiment.folder].append(anywhere[mark] | {"label": cell.label} | _described(cell))
                outcome = outcome_of(anywhere[mark])
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
            processes = default_jobs(len(todo)) if jobs is None else jobs
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
    """What is kept of all experiments, by folder."""
    places = {out / experiment.folder for experiment in experiments}
    for place in places:
        make_folder(place)
    places |= {path.parent for name in (f"{CELLS}.csv", UNDER_WAY) for path in out.glob(f"*/{name}")}
    return {place.name: Records(place) for place in sorted(places)}


def _mark(cell: Cell) -> str:
    """The fingerprint of a cell; an :class:`InvalidData` where its data is not at hand."""
    kind = KINDS[cell.kind]
    return fingerprint(cell.kind, kind.meaning(cell.values), cell.seed, kind.data(cell.values))


def named_by(cell: Cell, only: Collection[str]) -> bool:
    """Whether one of some patterns names a cell: ``table``, ``table/row`` or ``table/row/column``, with * and ?."""
    words = cell.table, cell.row, cell.column
    return not only or any(fnmatchcase("/".join(words[: one.count("/") + 1]), one) for one in only)


def _tried(cell: Cell, marks: dict[Cell, str], found: dict[str, Outcome]) -> dict[str, Outcome]:
    """What a cell's trials found, by name."""
    return {trial.column: found[marks[trial]] for trial in cell.trials}


def mark_as_kept(cell: Cell, records: Records) -> str:
    """The same with the data that a kept cell says it had: to show what is kept nothing else is needed."""
    kind, kept = KINDS[cell.kind], records.by_label.get(cell.label)
    data = kept["outcome"]["data"] if kept else {}
    ways = [
        fingerprint(cell.kind, kind.meaning(values), cell.seed, data)
        for values in (cell.values, *kind.earlier(cell.values))
    ]
    return next((mark for mark in ways if kept and mark == kept["fingerprint"]), ways[0])


def _described(cell: Cell) -> dict[str, Any]:
    """For whoever reads a record."""
    return {
        "table": cell.table, "row": cell.row, "column": cell.column, "kind": cell.kind, "seed": cell.seed,
        "settings": cell.values,
    }  # fmt: skip


def run_job(job: Job, tell: Tell) -> Outcome:
    """Run one cell and keep it; a method's refusal is kept as well, missing data is asked for again next time.

    An error that nobody foresaw costs this cell and no other: it is told, and the cell is run again next time.
    """
    cell, kind = job.cell, KINDS[job.cell.kind]
    broken = job.folder.with_name(f"{job.folder.name}.traceback.txt")
    try:
        outcome = kind.run_after(cell.values, cell.seed, job.folder, tell, job.tried)
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
        keep(place, new_record(own.label, job.mark, _described(own), outcome))
    shutil.rmtree(job.folder, ignore_errors=True)  # checkpoints of a finished cell serve nobody
    broken.unlink(missing_ok=True)
    return outcome


def run_jobs(jobs: list[Job], watcher: Watcher, processes: int) -> Iterator[tuple[Job, Outcome]]:
    """Run cells, here or in processes; those that are done first come first."""
    alone = processes == 1 or len(jobs) < 2
    return _run_here(jobs, watcher) if alone else _run_apart(jobs, watcher, processes)


def _run_here(jobs: list[Job], watcher: Watcher) -> Iterator[tuple[Job, Outcome]]:
    for job in jobs:
        yield job, run_job(job, lambda done, of, cell=job.cell: watcher.on_share(cell, done / of))  # type: ignore[misc]


def _run_apart(jobs: list[Job], watcher: Watcher, processes: int) -> Iterator[tuple[Job, Outcome]]:
    shares: Any = _SPAWN.Queue()
    by_mark, by_cell = {job.mark: job for job in jobs}, {job.cell: job for job in jobs}
    ordered = [by_cell[cell] for cell in side_by_side(list(by_cell))]
    with workers(processes, initializer=_start, initargs=(shares,)) as pool:
        assert pool is not None
        futures: dict[Future[Outcome], Job] = {pool.submit(_in_process, job): job for job in ordered}
        while futures:
            done, _ = wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            with suppress(queue.Empty):
                while True:
                    mark, share = shares.get_nowait()
                    watcher.on_share(by_mark[mark].cell, share)
            for future in done:
                yield futures.pop(future), future.result()


def side_by_side(cells: Sequence[Cell]) -> list[Cell]:
    """The order to start cells in: one seed after the other, long ones first, and all kinds of work all the time.

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
    """Processes of one thread each, all of them ended if the work here breaks off; None where one is asked for."""
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
