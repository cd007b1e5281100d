"""What a run over a network leaves behind: the folder of ``fairfold train``, and who took part (``nodes.jsonl``)."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairfold.flower.books import BEHIND
from fairfold.flower.nodes import Nodes
from fairfold.flower.rounds import OpenRound
from fairfold.protocol.architecture import Picture
from fairfold.protocol.noising import privacy_facts, privacy_words
from fairfold.protocol.plan import Plan
from fairfold.protocol.turns import behind_words
from fairfold.runs import checkpoint, nodes
from fairfold.runs.federated import plan_of
from fairfold.runs.folder import RunFolder
from fairfold.simulate.result import GroupReport, Result, RoundReport
from fairfold.simulate.run import Progress, stop_reason

log = logging.getLogger("fairfold.flower")


class Record:
    """Writes a run down as it goes; ``found`` is where to go on with what is there, if anywhere."""

    def __init__(self, path: Path, plan: Plan, *, resume: bool, picture: Picture | None = None) -> None:
        self.plan, self._settled, self._path = plan, plan, path
        tables = {name: list(shape) for name, shape in plan.architecture.shapes.items()}
        self._facts: dict[str, Any] = {"name": "devices", "items": plan.public.items, "tensors": tables}
        self.found: Progress | None = None
        self.known: list[nodes.Event] = []  # what was written down before
        self._started = time.monotonic()
        RunFolder(path).require_free(again=resume)
        if resume and checkpoint.manifests(path / "checkpoints"):
            saved = checkpoint.require(path / "checkpoints", log.warning)
            checkpoint.refuse_other_run(saved, plan.settings, path)
            checkpoint.refuse_other_data(saved, self._facts, path)
            surveyed = plan_of(plan.settings, plan.public.items, saved.progress.state, picture)
            checkpoint.refuse_other_shapes(saved, surveyed.architecture.shapes, path)
            self.found = saved.progress
            self.known, problems = nodes.whole_events(path, saved.progress.state.round_number)
            for problem in problems:
                log.warning("%s: whoever is meant is asked again", problem)
            self._started -= saved.seconds
        self._folder = RunFolder.create(plan.settings, path, again=resume)

    @property
    def seconds(self) -> float:
        """Of all sittings."""
        return time.monotonic() - self._started

    @contextlib.contextmanager
    def open(self, progress: Progress) -> Iterator[None]:
        """While the run goes: nobody else writes here, and what is logged goes to the folder."""
        with self._folder.locked():
            self._folder.begin(self.plan.settings, progress.history)
            checkpoint.remove_strays(self._folder.checkpoints, progress.state.round_number)
            nodes.begin(self._path, nodes.whole_events(self._path, progress.state.round_number)[0])
            with self._folder.logging(self.plan.settings.run.log_format):
                yield

    def settle(self, plan: Plan, progress: Progress) -> None:
        """Devices have been surveyed: what they have paid for is written down, and not asked for again."""
        self.plan = plan
        if self.found is None and not plan.settings.privacy.tells_quality:
            self.round_done(progress)

    def round_over(
        self, progress: Progress, opened: OpenRound, number: int, report: RoundReport, *, evaluated: bool
    ) -> None:
        """Write a round down; one that is evaluated is noted in the metrics when that is done."""
        self.round_done(progress)
        opened.phase("saving")
        self.note_round(number, opened)
        self.note_quality(0, opened)  # of the model before this round
        if not evaluated:
            self.note(report)

    def round_done(self, progress: Progress) -> None:
        """Write a checkpoint: a server killed from here on loses the round that is open, and no other."""
        checkpoint.save(self._folder.checkpoints, progress, self.plan.settings, self._facts, self.seconds)
        self._settled = self.plan.algorithm.settled(self.plan, progress.state)

    def note_round(self, number: int, opened: OpenRound) -> None:
        """Write down who took part in a round, or was left out of it and why; an empty one as well."""
        sizes = zip(self.plan.capacities, self._settled.assignments(0), strict=True)
        nodes.append(self._path, [opened.event(number, {str(capacity): held.bytes() for capacity, held in sizes})])

    def note_quality(self, number: int, opened: OpenRound) -> None:
        """Write down how well the model serves the users of every node that said so."""
        if opened.said:
            nodes.append(self._path, [{"event": nodes.QUALITY, "round": number, "nodes": opened.said}])

    def note_event(self, event: nodes.Event) -> None:
        """Write down what happened to a node."""
        nodes.append(self._path, [event])

    def note(self, report: RoundReport) -> None:
        """Append a round to the metrics, with its quality if it was evaluated."""
        self._folder.note(report)

    def finish(self, progress: Progress, members: Nodes) -> None:
        """Write the closing table and the model."""
        self.round_done(progress)
        stopped = stop_reason(progress.history, self.plan.settings) or "stopped"
        self._folder.finish(self._result(progress, members), self.seconds, stopped, self._facts)

    def _result(self, progress: Progress, among: Nodes) -> Result:
        last = next((report.quality for report in reversed(progress.history) if report.quality is not None), None)
        pace, steps = self.plan.settings.fleet.pace, progress.state.moments.get(BEHIND, {}).get("steps")
        ages = self.plan.algorithm.ages
        behind = [] if pace.waits or steps is None else [behind_words(steps.tolist(), pace, ages=ages)]
        groups, known = [], privacy_facts(self.plan.settings)
        for number, (capacity, held) in enumerate(zip(self.plan.capacities, self._settled.assignments(0), strict=True)):
            members = sum(node.group == number for node in among.usable.values())
            down, up = self.plan.algorithm.traffic(self.plan, number)
            quality = None if last is None else last.groups[number]
            groups.append(GroupReport(str(capacity), members, held.size(), held.bytes(), down, up, quality, {}))
        return Result(
            self.plan.settings, self.plan.settings.metric, progress.state, {}, progress.history, groups,
            float("nan") if last is None else last.server, {}, len(among.usable), dict(progress.rejections.counts),
            told=[*privacy_words(known), *self.plan.algorithm.told(self.plan, progress.state), *behind], privacy=known,
        )  # fmt: skip
