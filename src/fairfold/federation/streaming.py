"""Rows of the server's table that pass by devices: of the full table, beside the compact one that a device holds.

The same rows pass by all devices of a size, so which of them a device uses is seen by nobody. They are counted in its
traffic, and not in what it holds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from fairfold.federation.algorithm import Capability
from fairfold.federation.updates import ClientTask
from fairfold.subspace.projection import Assignment, Projection
from fairfold.typing import Weights

if TYPE_CHECKING:
    from fairfold.federation.plan import Plan

STREAM = "stream"  # name of the rows of the server's table that pass by clients of a size in a round


class StreamsRows(Capability):
    """Streams rows of the server's table by devices, with every task."""

    def streamed_rows(self, plan: "Plan", full: Weights, task: ClientTask) -> Tensor | None:
        """The rows that pass by clients with this task, flat; None where they would learn nothing from them."""
        return None

    def stream_packing(self, held: Mapping[str, Projection]) -> Mapping[str, Projection]:
        """How the rows are packed on their way to clients that hold so much, by :data:`STREAM`; else as numbers."""
        return {}

    def with_streams(self, plan: "Plan", full: Weights, tasks: list[ClientTask]) -> list[ClientTask]:
        """Tasks with the rows that pass by, of the server's tensors."""

        def with_stream(task: ClientTask) -> ClientTask:
            rows = self.streamed_rows(plan, full, task)
            if rows is None:
                return task
            context = {**task.context, **self.stream_packing(task.projections)}
            return replace(task, vectors=task.vectors | {STREAM: rows}, context=context)

        return [with_stream(task) for task in tasks]

    def received_bytes(self, held: Assignment) -> int:
        """Bytes of a model, and of what passes by beside it."""
        return held.bytes() + sum(part.bytes for part in self.stream_packing(held.projections or {}).values())

    def encoding_rows(self, plan: "Plan", full: Weights, held: Mapping[str, Projection]) -> Weights:
        """The rows by which clients that hold so much encode histories, whatever the task; none by default."""
        return {}
