"""Streamed encoding: a history's sum Σ a_i W_i from full rows that pass by, where a client's own are cut and rounded.

A client scores with its own rows, and so can use no more of W than their columns. Of these the rows of *all* items of
the head pass by, in eight bits: the same for every client of a size, so that nothing of a history shows. A block of
rows may be dropped once it has passed. What is kept is a sum per user, of as many numbers as the rows have columns.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fairfold.algorithms.incremental import IncrementalAlgorithm
from fairfold.errors import InvalidMessage
from fairfold.federation.plan import STREAM, Plan, StreamsRows
from fairfold.federation.updates import ClientTask
from fairfold.methods.truncated import BITS
from fairfold.subspace.packed import FACTORS, QuantizedRows
from fairfold.subspace.projection import Projection
from fairfold.typing import Weights

ROWS = "rows"  # name of the table
BLOCK = 4_096  # rows that pass by at a time


class StreamedEncoding(IncrementalAlgorithm, StreamsRows):
    """Streams the rows by which histories are encoded.

    Attributes:
        streamed: Stream rows: those of all items pass by a client that does not hold them all, with every model that it
            takes, so that it encodes the whole of a history (docs/default-recommender.md).
    """

    streamed: bool = False

    def stream_packing(self, held: Mapping[str, Projection]) -> dict[str, Projection]:
        part = streamed_part(held[ROWS]) if self.streamed and held else None
        return {} if part is None else {STREAM: part}

    def encoding_rows(self, plan: Plan, full: Weights, held: Mapping[str, Projection]) -> Weights:
        return {name: part.reduce(full[ROWS]) for name, part in self.stream_packing(held).items()}

    def streamed_rows(self, plan: Plan, full: Weights, task: ClientTask) -> Tensor | None:
        return self.encoding_rows(plan, full, task.projections).get(STREAM)

    def require_stream(self, task: ClientTask) -> None:
        """Refuse a task without the rows that have to pass by."""
        wanted = self.stream_packing(task.projections)
        if {name: task.context.get(name) for name in wanted} != wanted:
            raise InvalidMessage("a task without the rows that pass by", "those of all items", "Check both sides.")


def streamed_part(held: Projection) -> QuantizedRows | None:
    """What passes by clients that hold such rows: all rows, of their columns; None where they hold all, or none."""
    assert isinstance(held, QuantizedRows)
    rows, columns = held.shape[0], held.kept[1]
    whole = QuantizedRows((rows, held.shape[1]), (rows, columns), BITS[0][0])
    return None if held.kept[0] == rows or columns == FACTORS else whole


def encoding_table(vectors: Weights, items: int) -> Tensor | None:
    """The rows that pass by beside a model, of so many items; None where none do."""
    return vectors[STREAM].view(items, -1) if STREAM in vectors else None


def row_blocks(rows: Tensor) -> Iterable[tuple[int, Tensor]]:
    """Blocks of rows, each with the number of its first item."""
    return ((first, rows[first : first + BLOCK]) for first in range(0, len(rows), BLOCK))


def encode(histories: list[Tensor], blocks: Iterable[tuple[int, Tensor]]) -> Tensor:
    """Σ a_i W_i over each history, [users, columns], from blocks of rows (a, b, W) that pass by in any order."""
    items = torch.cat(histories) if histories else torch.empty(0, dtype=torch.int64)
    users = torch.repeat_interleave(torch.arange(len(histories)), torch.tensor([len(one) for one in histories]).long())
    sums: Tensor | None = None
    for first, rows in blocks:
        here = (items >= first) & (items < first + len(rows))
        mine, counts = items[here] - first, torch.bincount(users[here], minlength=len(histories))
        begins = counts.cumsum(0) - counts
        part = embedding_bag(mine, rows[:, FACTORS:], begins, mode="sum", per_sample_weights=rows[mine, 0])
        sums = part if sums is None else sums.add_(part)
    return torch.zeros(len(histories), 0) if sums is None else sums
