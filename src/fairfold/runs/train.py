"""Train in a run folder, with checkpoints and resuming: what ``fairfold train`` does, without the terminal.

Several processes (ranks) may share a run. All run the same simulation on the same data; settings and checkpoint come
from the first, which alone needs the folder, and each loads the data for itself after the first has prepared it.
Baselines that need no federation are computed beside it; strong ones are tuned once per data set and cached.
"""

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairfold import __version__
from fairfold.config import Settings, read_settings
from fairfold.data.files import Stages, cache_folder, no_progress
from fairfold.errors import CannotWrite, FairfoldError, InvalidCapacity
from fairfold.federation.aggregation import ONE, Ranks
from fairfold.federation.architecture import Storage
from fairfold.federation.evaluation import Callback, Result, RoundReport
from fairfold.federation.federation import Federation, load_federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.simulation import Progress, simulate, stop_reason
from fairfold.metrics.ranking import RankingResult
from fairfold.metrics.ranking_baselines import largest_side
from fairfold.metrics.rating import Predictor, fitted_rating_baselines
from fairfold.metrics.tuned_baselines import tuned_strong_baselines
from fairfold.runs import checkpoint
from fairfold.runs.checkpoint import Echo
from fairfold.runs.folder import RunFolder
from fairfold.runs.tensors import read_checked_tensors, write_checked_tensors
from fairfold.runs.units import human_seconds

log = logging.getLogger("fairfold.runs")
BaselineFactory = Callable[[Federation], Mapping[str, RankingResult | Predictor]]
VERSION = 5  # version of cached baselines; raised whenever the baselines, or how they are tuned, change
USERS = "users"


@dataclass(frozen=True)
class FinishedRun:
    """Result, folder and duration of a run that has ended."""

    result: Result
    folder: RunFolder
    stopped: str  # why it ended
    seconds: float  # including those before it was resumed


def run(
    settings: Settings,
    out: Path | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int | None = None,
    callbacks: Sequence[Callback] | Callable[[RunFolder], Sequence[Callback]] = (),
    echo: Echo = log.info,
    more_baselines: BaselineFactory = lambda _federation: {},
    ranks: Ranks = ONE,
) -> FinishedRun:
    """Train, and write settings, metrics, checkpoints, model and result to a folder.

    The folder ``out`` is ``runs/DATE-TIME-DATA`` if not given. ``resume`` goes on from its newest whole checkpoint, to
    the same result as an uninterrupted run. Checkpoints come every so many rounds, by default as often as costs at most
    a tenth of the time. ``callbacks`` may be a function that makes them from the folder; ``more_baselines`` is one such
    as :func:`fairfold.runs.train.strong_baselines`. Other processes of ``ranks`` call :func:`follow_run`.

    Example:
        >>> import tempfile
        >>> data = {"users": 30, "items": 80, "interactions_per_user": 20}
        >>> folder = Path(tempfile.mkdtemp()) / "run"
        >>> finished = run(Settings(data=data, run={"rounds": 2}), folder)
        >>> finished.stopped, (folder / "result.json").exists()
        ('all 2 rounds are done', True)
    """
    if out is not None:
        RunFolder(out).require_free(resume=resume)
    found = _checkpoint(settings, out, echo) if resume and out is not None else None
    if settings.subspace.counts_items:
        echo("Counting how many devices hold each item.")
    try:
        federation, baselines = load_federation(settings)
    except InvalidCapacity as error:  # the method cannot serve the capacities, which the report shows
        if out is not None and not RunFolder(out).holds_run():
            reason = re.search(r"N/A: (.*)\)", error.needed)
            RunFolder.create(settings, out).write_refusal(settings, reason[1] if reason else str(error))
        raise
    facts = federation.data.fingerprint()
    if found is not None and out is not None:
        checkpoint.require_same_data(found, facts, out)
        checkpoint.require_same_shapes(found, federation.plan.architecture.shapes, out)
    folder = RunFolder.create(settings, out, resume=resume)
    others = callbacks(folder) if callable(callbacks) else callbacks
    progress = None if found is None else found.progress
    last = 0 if progress is None else progress.state.round_number
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        folder.begin(settings, [] if progress is None else progress.history)
        checkpoint.remove_incomplete(folder.checkpoints, last)
        stack.enter_context(folder.logging(settings.run.log_format))
        log.info("fairfold %s, torch %s: starting with round %d", __version__, torch.__version__, last + 1)
        computed = more_baselines(federation)  # before the clock starts
        started = time.monotonic() - (0.0 if found is None else found.seconds)
        recorder = _Recorder(folder, settings, facts, started, CheckpointSchedule(checkpoint_every), ranks)
        start_followers(ranks, progress)
        result = simulate(
            settings,
            recorder.checkpoint_if_due,
            federation=federation,
            baselines=baselines,
            evaluated_baselines=computed,
            progress=progress,
            storage=Storage(folder.path, settings.run.user_storage),
            callbacks=[recorder, *others],
            ranks=ranks,
        )
    return FinishedRun(result, folder, recorder.stopped(result), recorder.seconds)


def _checkpoint(settings: Settings, out: Path, echo: Echo) -> checkpoint.Checkpoint | None:
    """Load the checkpoint to resume from; None if there is none, refused if its settings differ."""
    folder = RunFolder(out).checkpoints
    if not checkpoint.manifests(folder):
        echo(f"No checkpoint in {out}: starting from the first round.")
        return None
    found = checkpoint.load_newest(folder, echo, storage=Storage(out, settings.run.user_storage))
    checkpoint.require_same_settings(found, settings, out)
    for name, version in (("fairfold", __version__), ("torch", torch.__version__)):
        if (written := found.versions.get(name)) != version:
            echo(f"Written by {name} {written}, now {version}: numbers may differ in the last digits.")
    echo(f"Resuming after round {found.progress.state.round_number}.")
    return found


class CheckpointSchedule:
    """Decides when a checkpoint is due: every n rounds, or as often as costs at most a tenth of the time."""

    SHARE = 10

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._cost = 0.0
        self._ended = -float("inf")

    def due(self, round_number: int) -> bool:
        """True if a checkpoint is to be written after this round."""
        rested = time.monotonic() - self._ended
        return rested >= self.SHARE * self._cost if self._every is None else round_number % self._every == 0

    def wrote(self, seconds: float) -> None:
        """Note that a checkpoint was written, and how long it took."""
        self._cost = seconds
        self._ended = time.monotonic()


@dataclass(frozen=True)
class _Recorder(Callback):
    """Writes rounds, checkpoints and the result to the folder."""

    folder: RunFolder
    settings: Settings
    facts: dict[str, object]
    started: float
    schedule: CheckpointSchedule
    ranks: Ranks

    @property
    def seconds(self) -> float:
        """Duration of the run, including that before it was resumed."""
        return time.monotonic() - self.started

    def stopped(self, result: Result) -> str:
        """Reason why the run ended."""
        return stop_reason(result.history, self.settings) or "stopped"

    def on_round(self, report: RoundReport) -> None:
        self.folder.append_round(report)

    def on_end(self, result: Result) -> None:
        stopped = self.stopped(result)
        log.info("%d rounds in %.1f s: %s", result.state.round_number, self.seconds, stopped)
        self.folder.finish(result, self.seconds, stopped, self.facts)

    def checkpoint_if_due(self, report: RoundReport, progress: Progress) -> None:
        """Write a checkpoint if one is due, or the run is over; called after all callbacks."""
        over = stop_reason(progress.history, self.settings) is not None
        if self.ranks.broadcast(over or self.schedule.due(report.round_number)):
            begun = time.monotonic()
            progress.gather()
            checkpoint.save(self.folder.checkpoints, progress, self.settings, self.facts, self.seconds)
            self.schedule.wrote(time.monotonic() - begun)


def shared_settings(ranks: Ranks, choose: Callable[[], Settings]) -> Settings:
    """Choose settings in the first process, and give them to all."""
    with ranks.fail_together():
        chosen = choose() if ranks.first else None
    values = ranks.broadcast(None if chosen is None else chosen.plain())
    return chosen if chosen is not None else read_settings(values or {})


def start_followers(ranks: Ranks, progress: Progress | None) -> None:
    """Let the other processes load the data, then give them the progress to resume from."""
    if ranks.num_ranks == 1:
        return
    with ranks.fail_together():
        pass
    ranks.synchronized = True
    with ranks.fail_together():
        pass
    if progress is None:
        ranks.broadcast(None)
    else:
        ranks.broadcast((progress.state, progress.local_state, progress.history, progress.rejections.counts))


@contextlib.contextmanager
def share_errors(ranks: Ranks) -> Iterator[None]:
    """Raise an error of the first process in all others that still wait to start."""
    try:
        yield
    except Exception:
        if not ranks.synchronized:
            with ranks.fail_together():
                raise
        raise


def follow_run(settings: Settings, ranks: Ranks) -> None:
    """Take part in a run of which the first process writes the folder."""
    logger = logging.getLogger("fairfold")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    with ranks.fail_together():
        pass  # the first process prepares the data
    with ranks.fail_together():
        federation, baselines = load_federation(settings)
    received: Any = ranks.broadcast(None)
    progress = None if received is None else Progress(received[0], received[1], received[2], Rejections(received[3]))

    def gather(_report: RoundReport, progress: Progress) -> None:
        if ranks.broadcast(False):
            progress.gather()

    simulate(settings, gather, federation=federation, baselines=baselines, progress=progress, ranks=ranks)


def rating_baselines(federation: Federation, echo: Echo = lambda _: None) -> dict[str, Predictor]:
    """Tune means, biases and matrix factorization by SGD on the ratings of a run."""
    echo("Tuning baselines on held-out ratings: matrix factorization by SGD (not with --set run.baselines=false).")
    return {name: predict for name, predict, _ in fitted_rating_baselines(federation.interactions.train)}


def strong_baselines(
    federation: Federation, stages: Stages = no_progress, echo: Echo = lambda _: None, cache: Path | None = None
) -> dict[str, RankingResult]:
    """Evaluate tuned EASE, iALS and item-kNN on all items; a name says so where memory asks for a cut."""
    plan, data = federation.plan, federation.interactions
    top = plan.settings.run.top
    facts = {key: value for key, value in data.fingerprint().items() if key != "name"}
    content = [VERSION, facts, top, largest_side()]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder(cache) / "baselines" / f"{key}.safetensors"
    if (cached := _read(path)) is not None:
        return cached
    echo("Computing baselines, once for this data: EASE, iALS, item-kNN (not with --set run.baselines=false).")
    started = time.monotonic()
    computed = dict(tuned_strong_baselines(data, top, stages))
    echo(f"Baselines computed in {human_seconds(time.monotonic() - started)}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        users = next(iter(computed.values())).users
        tensors = {str(place): row.ndcg_by_user for place, row in enumerate(computed.values())}
        write_checked_tensors(path, tensors | {USERS: users}, {"names": json.dumps(list(computed))})
    except (OSError, CannotWrite) as error:
        echo(f"They could not be stored: {error}.")
    return computed


def _read(path: Path) -> dict[str, RankingResult] | None:
    """Read cached baselines; None where there are none, or the file is damaged."""
    try:
        tensors, metadata = read_checked_tensors(path, "Remove it.")
    except FairfoldError:
        return None
    values = ((name, tensors[str(place)]) for place, name in enumerate(json.loads(metadata["names"])))
    return {name: RankingResult(float(value.mean()), tensors[USERS], value) for name, value in values}
