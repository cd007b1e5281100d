"""Lookups of rows in a compact vector: differentiable ones of a whole table, and the active rows of a round.

Gradients of lookups are dense, sparse, or applied in the backward. *Active rows* are what one round of training
touches, gathered, trained anywhere, written back. A local optimizer starts fresh each round. With SGD, Adagrad or Adam
(without weight decay) a slot that no sample of the round touches has zero gradient and zero moments, so training the
touched slots alone gives the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from fairfold.errors import InvalidDtype, InvalidRow, InvalidSettings
from fairfold.kernels import ops, traced
from fairfold.kernels.hashing import Layout
from fairfold.kernels.reference import SUM_DTYPE, row_coordinates
from fairfold.nn.base import check_same_device

if TYPE_CHECKING:
    from fairfold.nn.embedding import FairTable


class FusedSGD:
    """SGD inside the backward: compact ← compact − lr·Sᵀg in one pass over the batch's rows.

    For :meth:`FairTable.update_in_backward`. No gradient is stored; SGD, being linear, is exact for any number of
    lookups. Other parameters have their own optimizer; gradients of the table can be neither clipped nor accumulated.
    ``lr`` may be changed between steps.

    Example:
        >>> from fairfold.nn import FairEmbedding
        >>> table = FairEmbedding(1000, 8, capacity=1 / 4)
        >>> table.update_in_backward(FusedSGD(lr=0.1))
    """

    def __init__(self, lr: float = 1e-3) -> None:
        if not lr >= 0:
            raise InvalidSettings(f"lr={lr}", "a rate of 0 or more", "Try 0.01.")
        self.lr = lr

    def apply(self, layout: Layout, compact: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Take the SGD step of a batch of rows on the compact vector, in place."""
        ops.sgd_rows(layout, compact, gradient, rows, self.lr)


def check_ids(ids: Tensor, count: int, memory: Tensor, *, kernel_checks: bool = False) -> None:
    """Refuse ids that name no row (a hash would return another's); on the CPU not if the next ``kernel_checks`` all."""
    if not isinstance(ids, Tensor):
        raise InvalidDtype(f"ids of type {type(ids).__name__}", "a torch.Tensor", "Wrap them: torch.tensor([...]).")
    if ids.dtype not in (torch.int64, torch.int32):
        raise InvalidDtype(f"ids of dtype {ids.dtype}", "int64 or int32", "Convert them, e.g. with .long().")
    check_same_device("ids", ids, memory)
    if ids.is_meta or traced.is_tracing(memory):  # the operator itself looks at every id, when it runs
        return
    if ids.numel() == 0 or (kernel_checks and ids.is_cpu):
        return
    if ids.is_cuda:
        # As torch's own kernels do: asking for the result here would stop the whole stream.
        torch._assert_async(((ids >= 0) & (ids < count)).all(), f"ids outside of 0 to {count - 1}")
        return
    lowest, highest = (int(end) for end in torch.aminmax(ids))
    if lowest < 0 or highest >= count:
        needed, remedy = f"ids from 0 to {count - 1}", "Check how the ids are numbered."
        raise InvalidRow(f"ids from {lowest} to {highest}", needed, remedy)


def lookup(
    memory: Tensor, layout: Layout, rows: Tensor, row_size: int, *, sparse: bool = False, update: FusedSGD | None = None
) -> Tensor:
    """The values of ``rows`` (row numbers, checked; repeats allowed), shape (len(rows), row_size), differentiable.

    ``sparse`` gives a gradient of the touched slots; with ``update``, applied in the backward, ``memory`` gets none.
    Neither is for programs that torch compiles.
    """
    if traced.is_tracing(memory) and not sparse and update is None:
        return traced.recover_rows(memory, rows, layout, row_size)
    if not _followed(memory):
        return ops.recover_rows(layout, memory, rows, row_size)
    result: Tensor = _Lookup.apply(memory, layout, rows, row_size, sparse, update)  # type: ignore[no-untyped-call]
    return result


def _followed(memory: Tensor) -> bool:
    """Whether autograd must know: also of forward-mode derivatives and transforms, which it refuses by itself."""
    wanted = memory.requires_grad and torch.is_grad_enabled()
    return wanted or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


class _Lookup(torch.autograd.Function):
    """S applied to chosen rows; its backward is Sᵀ. Nothing of the table is kept in between but the row numbers."""

    @staticmethod
    def forward(
        ctx: Any, memory: Tensor, layout: Layout, rows: Tensor, row_size: int, sparse: bool, update: FusedSGD | None
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.layout, ctx.sparse, ctx.update = layout, sparse, update
        memory = memory.detach()
        if update is not None:
            ctx.memory = memory
        return ops.recover_rows(layout, memory, rows, row_size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        # Grad mode is on in a backward with create_graph only. Elsewhere the guard against a second derivative would
        # switch off what is off already, at the price of a lookup.
        result = _gradient_once(ctx, gradient) if torch.is_grad_enabled() else _gradient(ctx, gradient)
        return result, None, None, None, None, None


def _gradient(ctx: Any, gradient: Tensor) -> Tensor | None:
    """Sᵀ of the gradient of the rows; None if it was applied on the spot."""
    (rows,) = ctx.saved_tensors
    if ctx.update is not None:
        ctx.update.apply(ctx.layout, ctx.memory, rows, gradient.contiguous())
        return None
    if ctx.sparse:
        slots, values = ops.touched_rows(ctx.layout, gradient.contiguous(), rows)
        size = (ctx.layout.size,)
        return torch.sparse_coo_tensor(slots[None], values, size, check_invariants=False, is_coalesced=True)
    sums = torch.zeros(ctx.layout.size, dtype=SUM_DTYPE[gradient.dtype], device=gradient.device)
    ops.accumulate_rows(ctx.layout, gradient.contiguous(), rows, sums)
    return sums.to(gradient.dtype)


_gradient_once = once_differentiable(_gradient)


class ActiveRows(nn.Module):
    """The rows of a table that a round will touch; ``values`` is a parameter that any optimizer can train.

    ``ids`` are all that the round will look up, in any order and shape, repeats allowed; other rows are refused. The
    table, which has a memory of its own, changes only at :meth:`commit`.
    """

    row_ids: Tensor
    slots: Tensor
    positions: Tensor
    signs: Tensor

    def __init__(self, table: "FairTable", ids: Tensor) -> None:
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
def active(table: "FairTable", ids: Tensor) -> Iterator[ActiveRows]:
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
