"""A run that leaves a folder behind and can be gone on with: what ``fairfold train`` does, without the terminal."""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fairfold.errors import InvalidCapacity
from fairfold.metrics.ranking import RankingResult
from fairfold.metrics.rating import Predictor
from fairfold.protocol.ranks import ONE, Ranks
from fairfold.protocol.storage import Storage
from fairfold.runs import checkpoint
from fairfold.runs.folder import RunFolder
from fairfold.runs.following import lead
from fairfold.settings import Settings
from fairfold.simulate.result import Result, RoundReport
from fairfold.simulate.run import Progress, simulate, stop_reason
from fairfold.simulate.world import World, load_data
from fairfold.trackers.callback import Callback
from fairfold.version import __version__

log = logging.getLogger("fairfold.runs")

Say = Callable[[str], None]
Beside = Callable[[World], Mapping[str, RankingResult | Predictor]]


@dataclass(frozen=True)
class Finished:
    """A run that is over."""

    result: Result
    folder: RunFolder
    stopped: str  # why it ended
    seconds: float  # all sittings together


def run(
    settings: Settings,
    out: Path | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int | None = None,
    callbacks: Sequence[Callback] | Callable[[RunFolder], Sequence[Callback]] = (),
    say: Say = log.info,
    beside: Beside = lambda _world: {},
    ranks: Ranks = ONE,
) -> Finished:
    """Train and write everything down.

    Args:
        settings: Settings of the run.
        out: Folder of the run; ``runs/DATE-TIME-DATA`` if not given.
        resume: Go on from the newest whole checkpoint in ``out``, to the same end as a run that was never interrupted.
        checkpoint_every: Rounds between checkpoints; None writes one after every round, or as often as costs at most
            a tenth of the time.
        callbacks: Objects that are told how it goes; or a function that makes them once there is a folder.
        say: A function that takes messages for a person.
        beside: Further reference rows of the run, such as :func:`fairfold.runs.references.strong_references`.
        ranks: Processes that share the clients: this is the first of them, and the others :func:`follow` it.

    Example:
        >>> import tempfile
        >>> world = {"users": 30, "items": 80, "interactions_per_user": 20}
        >>> folder = Path(tempfile.mkdtemp()) / "run"
        >>> finished = run(Settings(data=world, run={"rounds": 2}), folder)
        >>> finished.stopped, (folder / "result.json").exists()
        ('all 2 rounds are done', True)
    """
    if out is not None:
        RunFolder(out).require_free(again=resume)
    found = _checkpoint(settings, out, say) if resume and out is not None else None
    if settings.subspace.counted:
        say("Counting how many devices hold each item.")
    with _refusals_noted(settings, out):
        data, references = load_data(settings)
        world = World.of(settings, data)
        plan = world.plan
    facts = checkpoint.data_facts(data)
    if found is not None and out is not None:
        checkpoint.refuse_other_data(found, facts, out)
        checkpoint.refuse_other_shapes(found, plan.architecture.shapes, out)
    folder = RunFolder.create(settings, out, again=resume)
    told = list(callbacks(folder) if callable(callbacks) else callbacks)
    progress = None if found is None else found.progress
    with contextlib.ExitStack() as open_things:
        open_things.enter_context(folder.locked())
        folder.begin(settings, [] if progress is None else progress.history)
        checkpoint.remove_strays(folder.checkpoints, 0 if progress is None else progress.state.round_number)
        open_things.enter_context(folder.logging(settings.run.log_format))
        before = 0.0 if found is None else found.seconds
        first = 1 if progress is None else progress.state.round_number + 1
        log.info("fairfold %s, torch %s: starting with round %d", __version__, torch.__version__, first)
        rows = beside(world)  # before the clock starts
        recorder = _Recorder(folder, settings, facts, time.monotonic() - before, Pace(checkpoint_every), ranks)
        lead(ranks, progress)
        result = simulate(
            settings,
            recorder.watch,
            data=data,
            references=references,
            beside=rows,
            progress=progress,
            storage=Storage(folder.path, settings.run.user_storage),
            callbacks=[recorder, *told],
            ranks=ranks,
        )
    return Finished(result, folder, recorder.stopped(result), recorder.seconds)


@contextlib.contextmanager
def _refusals_noted(settings: Settings, out: Path | None) -> Iterator[None]:
    """Refusals come before any work; what a method cannot serve is noted in a folder that was asked for."""
    try:
        yield
    except InvalidCapacity as error:
        if out is not None and not RunFolder(out).holds_a_run():
            reason = re.search(r"N/A: (.*)\)", error.needed)
            RunFolder.create(settings, out).refuse(settings, reason[1] if reason else str(error))
        raise


def _checkpoint(settings: Settings, out: Path, say: Say) -> checkpoint.Checkpoint | None:
    """What to go on from, or None to start anew, either way told; refused if it belongs to another run."""
    folder = RunFolder(out).checkpoints
    if not checkpoint.manifests(folder):
        say(f"No checkpoint in {out}: starting anew.")
        return None
    found = checkpoint.require(folder, say, storage=Storage(out, settings.run.user_storage))
    checkpoint.refuse_other_run(found, settings, out)
    for name, version in (("fairfold", __version__), ("torch", torch.__version__)):
        if (written := found.versions.get(name)) != version:
            say(f"Written by {name} {written}, now {version}: numbers may differ in the last digits.")
    say(f"Going on after round {found.progress.state.round_number}.")
    return found


class Pace:
    """When a checkpoint is due: every so many rounds, or as often as costs at most a tenth of the time."""

    SHARE = 10

    def __init__(self, every: int | None) -> None:
        self._every, self._cost, self._ended = every, 0.0, -float("inf")

    def due(self, round_number: int) -> bool:
        """Whether to write one after this round."""
        if self._every is not None:
            return round_number % self._every == 0
        return time.monotonic() - self._ended >= self.SHARE * self._cost

    def wrote(self, seconds: float) -> None:
        """Note what one has cost."""
        self._cost, self._ended = seconds, time.monotonic()


@dataclass(frozen=True)
class _Recorder(Callback):
    """Writes rounds and checkpoints as they come, and the end."""

    folder: RunFolder
    settings: Settings
    facts: dict[str, object]
    started: float
    pace: Pace
    ranks: Ranks

    @property
    def seconds(self) -> float:
        """Of all sittings."""
        return time.monotonic() - self.started

    def stopped(self, result: Result) -> str:
        """Why it ended."""
        return stop_reason(result.history, self.settings) or "stopped"

    def on_round(self, report: RoundReport) -> None:
        """A line of figures, before anybody else hears of the round."""
        self.folder.note(report)

    def on_end(self, result: Result) -> None:
        """The closing table."""
        stopped = self.stopped(result)
        log.info("%d rounds in %.1f s: %s", result.state.round_number, self.seconds, stopped)
        self.folder.finish(result, self.seconds, stopped, self.facts)

    def watch(self, report: RoundReport, progress: Progress) -> None:
        """A checkpoint, once everybody has heard of the round."""
        over = stop_reason(progress.history, self.settings) is not None
        if self.ranks.tell(over or self.pace.due(report.round_number)):
            begun = time.monotonic()
            progress.gather()
            checkpoint.save(self.folder.checkpoints, progress, self.settings, self.facts, self.seconds)
            self.pace.wrote(time.monotonic() - begun)
