"""What a run over a network leaves behind: the folder of ``fairfold train``, and ``nodes.json``, who took part."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fairfold.files import write_atomically
from fairfold.flower.books import Books
from fairfold.flower.nodes import Nodes
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Public
from fairfold.runs import checkpoint
from fairfold.runs.folder import RunFolder
from fairfold.simulate.result import GroupReport, Result, RoundReport
from fairfold.simulate.run import Progress, stop_reason

NODES = "nodes.json"
log = logging.getLogger("fairfold.flower")


class Record:
    """Writes a run down as it goes; ``found`` is where to go on with what is there, if anywhere."""

    def __init__(self, path: Path, plan: Plan, *, resume: bool) -> None:
        self.plan, self._settled, self._path = plan, plan, path
        tables = {name: list(shape) for name, shape in plan.architecture.shapes.items()}
        self._facts: dict[str, Any] = {"name": "devices", "items": plan.public.items, "tensors": tables}
        self.found: Progress | None = None
        self._started = time.monotonic()
        RunFolder(path).require_free(again=resume)
        if resume and checkpoint.manifests(path / "checkpoints"):
            saved = checkpoint.require(path / "checkpoints", log.warning)
            checkpoint.refuse_other_run(saved, plan.settings, path)
            checkpoint.refuse_other_data(saved, self._facts, path)
            survey = Books(saved.progress.state).survey  # what devices said settles the shapes of some algorithms
            settled = Plan.of(plan.settings, Public(plan.public.items, survey=survey)) if survey else plan
            checkpoint.refuse_other_shapes(saved, settled.architecture.shapes, path)
            self.found = saved.progress
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
            with self._folder.logging():
                yield

    def round_done(self, progress: Progress, nodes: Nodes) -> None:
        """Write a checkpoint: a server killed from here on loses the round that is open, and no other."""
        checkpoint.save(self._folder.checkpoints, progress, self.plan.settings, self._facts, self.seconds)
        self._settled = self.plan.algorithm.settled(self.plan, progress.state)
        self._write_nodes(nodes)

    def note(self, report: RoundReport, nodes: Nodes) -> None:
        """Append a round to the metrics, with its quality if it was evaluated."""
        self._folder.note(report)
        self._write_nodes(nodes)

    def finish(self, progress: Progress, nodes: Nodes) -> None:
        """Write the closing table and the model."""
        self.round_done(progress, nodes)
        stopped = stop_reason(progress.history, self.plan.settings) or "stopped"
        self._folder.finish(self._result(progress, nodes), self.seconds, stopped, self._facts)

    def _write_nodes(self, nodes: Nodes) -> None:
        sizes = [held.bytes() for held in self._settled.assignments(0)]
        content = {
            "nodes": [
                asdict(node)
                | {"capacity": str(node.capacity), "size": str(self.plan.capacities[node.group])}
                | {"bytes_held": sizes[node.group]}
                for node in nodes.usable.values()
            ],
            "left_out": {str(node): reason for node, reason in nodes.left_out.items()},
        }
        write_atomically(self._path / NODES, (json.dumps(content, indent=1) + "\n").encode())

    def _result(self, progress: Progress, nodes: Nodes) -> Result:
        last = next((report.quality for report in reversed(progress.history) if report.quality is not None), None)
        groups = []
        for number, (capacity, held) in enumerate(zip(self.plan.capacities, self._settled.assignments(0), strict=True)):
            members = sum(node.group == number for node in nodes.usable.values())
            down, up = self.plan.algorithm.traffic(self.plan, number)
            quality = None if last is None else last.groups[number]
            groups.append(GroupReport(str(capacity), members, held.size(), held.bytes(), down, up, quality, {}))
        return Result(
            self.plan.settings, self.plan.settings.metric, progress.state, {}, progress.history, groups,
            float("nan") if last is None else last.server, {}, len(nodes.usable), dict(progress.rejections.counts),
            told=self.plan.algorithm.told(self.plan, progress.state),
        )  # fmt: skip
