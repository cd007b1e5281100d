"""What the server of a network stores: acknowledged updates beside the sums, and the folder of the run."""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fairfold.federation.algorithm import Tunable
from fairfold.federation.architecture import ImageShape, Storage
from fairfold.federation.evaluation import CATALOGUE_ORDER, POPULARITY, GroupReport, Quality, Result, RoundReport
from fairfold.federation.plan import Plan, privacy_notes, privacy_report
from fairfold.federation.scheduling import staleness_sentence
from fairfold.federation.simulation import Progress, stop_reason
from fairfold.federation.updates import State
from fairfold.flower.nodes import Nodes
from fairfold.flower.protocol import new_id
from fairfold.flower.rounds import OpenRound
from fairfold.runs import checkpoint, events
from fairfold.runs.folder import RunFolder
from fairfold.runs.loaded import NUMBERING, PLACE, STATISTICS, plan_from_state
from fairfold.typing import Weights

log = logging.getLogger("fairfold.flower")

# Keys of the algorithm's state, as in runs.loaded
RUN, ACKNOWLEDGED, STALENESS, CONTRIBUTIONS = "run", "acknowledged", "staleness", "contributions"
GROUPS = "groups"


class NetworkState:
    """Acknowledged updates, statistics and item numbers: in the algorithm's state, so rolled back with its sums."""

    def __init__(self, state: State | None) -> None:
        stored = {} if state is None else state.algorithm_state
        self.run = int(stored[RUN]["number"]) if RUN in stored else new_id()
        self.acknowledged: dict[int, int] = {}  # by client id, the id of its update that the sums contain
        self.sizes: dict[int, int] = {}  # by client id, the size of that update; its change must have the same
        if ACKNOWLEDGED in stored:
            columns = {key: column.tolist() for key, column in stored[ACKNOWLEDGED].items()}
            self.acknowledged = dict(zip(columns["clients"], columns["updates"], strict=True))
            self.sizes = dict(zip(columns["clients"], columns["sizes"], strict=True))
        # By client id, what bounds its next update (``BoundsContributions``), by a hash that the server alone knows
        held = dict(stored.get(CONTRIBUTIONS, {}))
        self.contributions = _by_client(held)
        self.secret = int(stored[RUN].get("secret", stored[RUN]["number"])) if RUN in stored else new_id()
        groups = stored.get(
            GROUPS, {}
        )  # by the identity of a client, whose updates its own are summed with under masks
        self.groups = dict(zip(groups["clients"].tolist(), groups["groups"].tolist(), strict=True)) if groups else {}
        # Number of updates by the steps since their tasks were sent, in asynchronous runs.
        self.staleness: list[int] | None = stored[STALENESS]["counts"].tolist() if STALENESS in stored else None
        self.statistics: Weights = dict(stored.get(STATISTICS, {}))
        self.num_windows = 0  # of items whose statistics are known, while clients are asked for them
        numbering = stored.get(NUMBERING, {})
        self.numbering = int(numbering["number"]) if numbering else 0  # its id; 0 for the catalogue's own
        self.item_numbers: Tensor | None = numbering.get(PLACE)

    def save_in(self, state: State) -> State:
        """Return a state that contains all of this."""
        stored: dict[str, Weights] = {RUN: {"number": torch.tensor([self.run]), "secret": torch.tensor([self.secret])}}
        if self.contributions:
            stored[CONTRIBUTIONS] = _in_columns(self.contributions)
        if self.groups:
            columns = {"clients": list(self.groups), "groups": list(self.groups.values())}
            stored[GROUPS] = {key: torch.from_numpy(numpy.array(one, "int64")) for key, one in columns.items()}
        if self.acknowledged:
            clients, updates = list(self.acknowledged), list(self.acknowledged.values())
            columns = {"clients": clients, "updates": updates, "sizes": [self.sizes[client] for client in clients]}
            stored[ACKNOWLEDGED] = {key: torch.from_numpy(numpy.array(one, "int64")) for key, one in columns.items()}
        if self.staleness is not None:
            stored[STALENESS] = {"counts": torch.tensor(self.staleness)}
        if self.statistics:
            stored[STATISTICS] = self.statistics
        if self.item_numbers is not None:
            stored[NUMBERING] = {"number": torch.tensor([self.numbering]), PLACE: self.item_numbers}
        return replace(state, algorithm_state=state.algorithm_state | stored)


LENGTHS = "/lengths"  # after the name of a vector: its lengths, by client


def _in_columns(held: dict[int, Weights]) -> Weights:
    """Vectors by client, one after another for each name."""
    found = {"clients": torch.tensor(list(held), dtype=torch.int64)}
    for name in sorted({name for of in held.values() for name in of}):
        parts = [of.get(name) for of in held.values()]
        found[name] = torch.cat([part for part in parts if part is not None])
        found[name + LENGTHS] = torch.tensor([-1 if part is None else len(part) for part in parts])
    return found


def _by_client(columns: Weights) -> dict[int, Weights]:
    """Invert :func:`_in_columns`."""
    held: dict[int, Weights] = {client: {} for client in columns.get("clients", torch.empty(0)).tolist()}
    for name in (name for name in columns if name + LENGTHS in columns):
        lengths = columns[name + LENGTHS].tolist()
        parts = iter(torch.split(columns[name], [length for length in lengths if length >= 0]))
        for of, length in zip(held.values(), lengths, strict=True):
            if length >= 0:
                of[name] = next(parts).clone()
    return held


class RunRecorder:
    """Records a run in its folder, if it has one, as ``fairfold train`` does, with who took part (``nodes.jsonl``)."""

    def __init__(self, folder: str | Path | None, plan: Plan, *, resume: bool, image_shape: ImageShape | None) -> None:
        self.plan = self._resolved = plan
        self.restored: Progress | None = None  # of a run that is resumed
        self.known_events: list[events.Event] = []
        self._folder: RunFolder | None = None
        self.storage = None if folder is None else Storage(Path(folder))  # of tables on disk
        tables = {name: list(shape) for name, shape in plan.architecture.shapes.items()}
        self._facts: dict[str, Any] = {"name": "devices", "items": plan.public.num_items, "tensors": tables}
        self._started = time.monotonic()  # as if the seconds before the run was resumed had just passed
        if folder is None:
            return
        path = Path(folder)
        RunFolder(path).require_free(resume=resume)
        if resume and checkpoint.manifests(path / "checkpoints"):
            self._restore_run(path, image_shape)
        self._folder = RunFolder.create(plan.settings, path, resume=resume)

    def _restore_run(self, path: Path, image_shape: ImageShape | None) -> None:
        saved = checkpoint.load_newest(path / "checkpoints", log.warning, storage=self.storage)
        checkpoint.require_same_settings(saved, self.plan.settings, path)
        checkpoint.require_same_data(saved, self._facts, path)
        plan = plan_from_state(self.plan.settings, self.plan.public.num_items, saved.progress.state, image_shape)
        checkpoint.require_same_shapes(saved, plan.architecture.shapes, path)
        self.restored = saved.progress
        self.known_events, problems = events.events_until(path, saved.progress.state.round_number)
        for problem in problems:
            log.warning("%s: the node is asked again", problem)
        self._started -= saved.seconds

    @contextlib.contextmanager
    def open(self, progress: Progress) -> Iterator[None]:
        """Lock the folder for the run, and write the log there."""
        if self._folder is None:
            yield
            return
        path = self._folder.path
        with self._folder.locked():
            self._folder.begin(self.plan.settings, progress.history)
            checkpoint.remove_incomplete(self._folder.checkpoints, progress.state.round_number)
            events.replace_events(path, events.events_until(path, progress.state.round_number)[0])
            with self._folder.logging(self.plan.settings.run.log_format):
                yield

    def set_plan(self, plan: Plan, progress: Progress) -> None:
        """Take the plan that follows from the statistics; save these where clients cannot send them again."""
        self.plan = plan
        if self.restored is None and not plan.settings.privacy.reports_quality:
            self.save_checkpoint(progress)

    def save_round(self, progress: Progress, opened: OpenRound, report: RoundReport, *, evaluated: bool) -> None:
        """Save a checkpoint, and record a round; one that is evaluated gets its metrics when that is done."""
        self.save_checkpoint(progress)
        opened.end_phase("saving")
        self.record_round(opened)
        self.record_quality(0, opened, None if evaluated else report)  # of the model before this round

    def save_checkpoint(self, progress: Progress) -> None:
        """Write a checkpoint: a server killed from here on loses the open round, and no other."""
        if self._folder is not None:
            seconds = time.monotonic() - self._started
            checkpoint.save(self._folder.checkpoints, progress, self.plan.settings, self._facts, seconds)
            self._resolved = Tunable.of(self.plan.algorithm).resolve(self.plan, progress.state)

    def record_round(self, opened: OpenRound) -> None:
        """Record who took part in a round, or was left out and why; a failed one as well."""
        sizes = zip(self.plan.capacities, self._resolved.assignments(0), strict=True)
        self.record_event(opened.event({str(capacity): held.bytes() for capacity, held in sizes}))

    def record_quality(self, number: int, opened: OpenRound, report: RoundReport | None) -> None:
        """Record the quality that every node measured, and the metrics of a round where they are known."""
        if opened.node_qualities:
            self.record_event({"event": events.QUALITY, "round": number, "nodes": opened.node_qualities})
        if self._folder is not None and report is not None:
            self._folder.append_round(report)

    def record_event(self, event: events.Event) -> None:
        """Record what happened to a node, or in a round."""
        if self._folder is not None:
            events.append(self._folder.path, [event])

    def finish(self, progress: Progress, nodes: Nodes, ended: str = "", before: Quality | None = None) -> None:
        """Write the closing table and the model; ``ended`` is why the run ended before its last round, if it did.

        ``before`` is the quality that nodes measured before the first step: of a ranking, that of the items' order.
        """
        self.save_checkpoint(progress)
        if self._folder is not None:
            stopped = ended or stop_reason(progress.history, self.plan.settings) or "stopped"
            result = self._make_result(progress, nodes, before)
            self._folder.finish(result, time.monotonic() - self._started, stopped, self._facts)

    def _make_result(self, progress: Progress, nodes: Nodes, before: Quality | None) -> Result:
        settings = self.plan.settings
        ranks = not settings.predicts_ratings and not settings.model.reads_images
        order = POPULARITY if settings.subspace.counts_items else CATALOGUE_ORDER
        quality = next((report.quality for report in reversed(progress.history) if report.quality is not None), None)
        groups = []
        for size, (capacity, held) in enumerate(zip(self.plan.capacities, self._resolved.assignments(0), strict=True)):
            members = sum(node.size == size for node in nodes.usable.values())
            down, up = self.plan.algorithm.traffic(self.plan, size)
            own = None if quality is None else quality.groups[size]
            groups.append(GroupReport(str(capacity), members, held.size(), held.bytes(), down, up, own, {}))
        privacy = privacy_report(settings)
        notes = [*privacy_notes(privacy), *Tunable.of(self.plan.algorithm).notes(self.plan, progress.state)]
        staleness = progress.state.algorithm_state.get(STALENESS)
        if staleness is not None:
            depends, counts = self.plan.algorithm.depends_on_model, staleness["counts"].tolist()
            notes.append(staleness_sentence(counts, settings.fleet.asynchronous, depends_on_model=depends))
        return Result(
            settings=settings,
            metric=settings.metric,
            state=progress.state,
            local_state={},
            history=progress.history,
            groups=groups,
            quality=float("nan") if quality is None else quality.server,
            baselines={order: before.server} if before is not None and ranks else {},
            users=len(nodes.usable),
            rejections=dict(progress.rejections.counts),
            notes=notes,
            privacy=privacy,
        )
