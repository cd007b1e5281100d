"""What a run over a network leaves behind: the folder of ``fairfold train``, and ``nodes.json``, who took part."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fairfold.files import write_atomically
from fairfold.flower.nodes import Node, Nodes
from fairfold.protocol.plan import Plan
from fairfold.runs import checkpoint
from fairfold.runs.folder import RunFolder
from fairfold.simulate.result import GroupReport, Result, RoundReport
from fairfold.simulate.run import Progress, stop_reason
from fairfold.values import BYTES

NODES = "nodes.json"


class Record:
    """Writes a run down as it goes.

    Args:
        path: Of the folder.
        plan: Of the run.
        resume: Go on with what is there.

    Attributes:
        found: Where to go on, if anywhere.
    """

    def __init__(self, path: Path, plan: Plan, *, resume: bool) -> None:
        self._plan, self._path = plan, path
        tables = {name: list(shape) for name, shape in plan.architecture.shapes.items()}
        self._facts: dict[str, Any] = {"name": "devices", "items": plan.public.items, "tensors": tables}
        self.found: Progress | None = None
        self._seconds = 0.0
        RunFolder(path).require_free(again=resume)
        if resume:
            self._find(path)
        self._folder = RunFolder.create(plan.settings, path, again=resume)
        self._started = time.monotonic()

    def _find(self, path: Path) -> None:
        saved, _ = checkpoint.newest(path / "checkpoints")
        if saved is None:
            return
        checkpoint.refuse_other_run(saved, self._plan.settings, path)
        checkpoint.refuse_other_data(saved, self._facts, path)
        checkpoint.refuse_other_shapes(saved, self._plan.architecture.shapes, path)
        self.found, self._seconds = saved.progress, saved.seconds

    def settle(self, plan: Plan) -> None:
        """There is a plan by what devices have summed up."""
        self._plan = plan

    @property
    def seconds(self) -> float:
        """Of all sittings."""
        return self._seconds + time.monotonic() - self._started

    @contextlib.contextmanager
    def open(self, progress: Progress) -> Iterator[None]:
        """While the run goes: nobody else writes here, and what is logged goes to the folder."""
        with self._folder.locked(), self._folder.logging():
            self._folder.begin(self._plan.settings, progress.history)
            checkpoint.remove_strays(self._folder.checkpoints)
            yield

    def round_done(self, progress: Progress, nodes: Nodes) -> None:
        """Write a checkpoint: a server killed from here on loses the round that is open, and no other."""
        self._save(progress)
        self._write_nodes(nodes)

    def note(self, report: RoundReport, nodes: Nodes) -> None:
        """Append a round to the metrics, with its quality if it was evaluated."""
        self._folder.note(report)
        self._write_nodes(nodes)

    def finish(self, progress: Progress, nodes: Nodes) -> None:
        """Write the closing table and the model."""
        self._save(progress)
        self._write_nodes(nodes)
        stopped = stop_reason(progress.history, self._plan.settings) or "stopped"
        self._folder.finish(self._result(progress, nodes), self.seconds, stopped, self._facts)

    def _save(self, progress: Progress) -> None:
        checkpoint.save(self._folder.checkpoints, progress, self._plan.settings, self._facts, self.seconds)

    def _write_nodes(self, nodes: Nodes) -> None:
        sizes = [held.size() * BYTES for held in self._plan.assignments(0)]
        content = {
            "nodes": [_described(node, self._plan, sizes) for node in nodes.usable.values()],
            "left_out": {str(node): reason for node, reason in nodes.left_out.items()},
        }
        write_atomically(self._path / NODES, (json.dumps(content, indent=1) + "\n").encode())

    def _result(self, progress: Progress, nodes: Nodes) -> Result:
        settings = self._plan.settings
        metric = settings.metric
        last = next((report.quality for report in reversed(progress.history) if report.quality is not None), None)
        groups = []
        for number, (capacity, held) in enumerate(zip(self._plan.capacities, self._plan.assignments(0), strict=True)):
            mine = [node for node in nodes.usable.values() if node.group == number]
            size = held.size() * BYTES
            quality = None if last is None else last.groups[number]
            groups.append(GroupReport(str(capacity), len(mine), held.size(), size, size, size, quality, {}))
        quality = float("nan") if last is None else last.server
        counts = dict(progress.rejections.counts)
        return Result(
            settings, metric, progress.state, {}, progress.history, groups, quality, {}, len(nodes.usable), counts
        )


def _described(node: Node, plan: Plan, sizes: list[int]) -> dict[str, Any]:
    facts = asdict(node) | {"capacity": str(node.capacity), "size": str(plan.capacities[node.group])}
    return facts | {"bytes_held": sizes[node.group]}
