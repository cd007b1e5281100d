"""The active rows of a table: what one round of training touches, gathered, trained anywhere, written back.

A local optimizer starts fresh each round. With SGD, Adagrad or Adam (without weight decay) a slot that no sample of the
round touches has zero gradient and zero moments, so training the touched slots alone gives the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairfold.errors import InvalidRow
from fairfold.kernels import ops
from fairfold.kernels.reference import SUM_DTYPE, row_coordinates
from fairfold.nn.embedding import FairTable
from fairfold.nn.lookup import check_ids


class ActiveRows(nn.Module):
    """The rows of a table that a round will touch; ``values`` is a parameter that any optimizer can train.

    ``ids`` are all that the round will look up, in any order and shape, repeats allowed; other rows are refused. The
    table, which has a memory of its own, changes only at :meth:`commit`.
    """

    row_ids: Tensor
    slots: Tensor
    positions: Tensor
    signs: Tensor

    def __init__(self, table: FairTable, ids: Tensor) -> None:
        super().__init__()
        check_ids(ids, table.num_embeddings, table.memory)
        self.__dict__["table"] = table  # not a submodule: the table's own vector is not trained here
        row_ids = torch.unique(ids.long())
        slots, signs = ops.slots_and_signs(table.subspace.layout, row_coordinates(row_ids, table.embedding_dim))
        positions, touched = ops.factorize(slots)
        for name, buffer in {"row_ids": row_ids, "slots": touched, "positions": positions, "signs": signs}.items():
            self.register_buffer(name, buffer, persistent=False)
        self.values = nn.Parameter(table.memory.detach()[touched])

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``, shape ``(*, embedding_dim)``."""
        return self.rows(ids).view(*ids.shape, self.positions.shape[1])

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``, one line each."""
        table: FairTable = self.__dict__["table"]
        check_ids(ids, table.num_embeddings, self.values)
        local = self._local_rows(ids.reshape(-1).long())
        rows = _ActiveLookup.apply(self.values, self.positions, self.signs, local)  # type: ignore[no-untyped-call]
        return table.constrain_rows(ids, rows)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the trained values back into the table's vector, in place."""
        table: FairTable = self.__dict__["table"]
        table.memory.index_copy_(0, self.slots, self.values.detach().to(table.memory.dtype))

    def _local_rows(self, ids: Tensor) -> Tensor:
        if len(self.row_ids) == 0 and ids.numel() == 0:
            return ids
        local = torch.searchsorted(self.row_ids, ids)
        if not len(self.row_ids) or not torch.equal(self.row_ids[local.clamp(max=len(self.row_ids) - 1)], ids):
            missing = ids[~torch.isin(ids, self.row_ids)]
            given = f"{len(missing)} ids outside of the active set, e.g. {int(missing[0])}"
            remedy = "Activate all ids of the round, the sampled negatives among them."
            raise InvalidRow(given, f"only the {len(self.row_ids)} ids the active set was made of", remedy)
        return local

    def extra_repr(self) -> str:
        return f"{len(self.row_ids)} rows, {len(self.slots)} slots"


@contextmanager
def active(table: FairTable, ids: Tensor) -> Iterator[ActiveRows]:
    """Within the block, ``table`` serves from its active rows; they are written back at its end, unless it raises.

    Build the optimizer on the ``parameters()`` of what the block yields, with those of other layers.

    Example:
        >>> from fairfold.nn import FairEmbedding
        >>> table, ids = FairEmbedding(1_000_000, 32, capacity=1 / 64), torch.tensor([3, 14, 15])
        >>> with active(table, ids) as rows:
        ...     optimizer = torch.optim.Adam(rows.parameters(), lr=0.01)
        ...     table(ids).square().mean().backward()
        ...     optimizer.step()
        >>> rows
        ActiveRows(3 rows, 96 slots)
    """
    before, rows = table.__dict__["_active"], table.activate(ids)
    table.__dict__["_active"] = rows
    try:
        yield rows
        rows.commit()
    finally:
        table.__dict__["_active"] = before


class _ActiveLookup(torch.autograd.Function):
    """Rows gathered from the active values; the backward adds into a gradient of their size."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, positions: Tensor, signs: Tensor, local: Tensor) -> Tensor:
        ctx.save_for_backward(positions, signs, local)
        ctx.size = values.numel()
        return ops.recover_positions(values.detach(), positions[local], signs[local])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        positions, signs, local = ctx.saved_tensors
        sums = torch.zeros(ctx.size, dtype=SUM_DTYPE[gradient.dtype], device=gradient.device)
        ops.accumulate_positions(gradient.contiguous(), positions[local], signs[local], sums)
        return sums.to(gradient.dtype), None, None, None
