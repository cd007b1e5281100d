"""The kernels as torch operators, for programs that torch compiles, exports, transforms or runs on meta tensors.

Operators come in pairs, each linear and the adjoint of the other: weights are recovered (S), and gradients of weights
are summed slot by slot (Sᵀ). So derivatives of any order exist. A layout travels as plain integers, of which torch may
make symbols. To compile and export, torch needs operators of a library; its transforms (``torch.func``) take functions
that say how they are done for a batch. Eager programs come here for neither: plain calls are cheaper.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op

from fairfold.kernels import ops
from fairfold.kernels.hashing import WORD, Layout
from fairfold.kernels.reference import SUM_DTYPE


def pack_layout(layout: Layout) -> list[int]:
    """A layout as integers that fit an operator's arguments, which are signed."""
    key = layout.key
    return [layout.full_size, layout.head, layout.tail, layout.chunk, key & WORD, key >> 32, int(layout.signed)]


def unpack_layout(numbers: list[int]) -> Layout:
    """The layout of packed integers."""
    full_size, head, tail, chunk, low, high, signed = numbers
    return Layout(full_size, head, tail, chunk, low | high << 32, bool(signed))


def is_tracing(memory: Tensor) -> bool:
    """Whether torch compiles, exports or transforms the call, or wants its shape alone."""
    return torch.compiler.is_compiling() or memory.is_meta or _transformed()


def _transformed() -> bool:
    return not torch.compiler.is_compiling() and bool(torch._C._are_functorch_transforms_active())


def recover_rows(memory: Tensor, rows: Tensor, layout: Layout, row_size: int) -> Tensor:
    """The values of some rows of a table, [rows, row_size]."""
    given = memory, rows, pack_layout(layout), row_size
    found: Tensor = _Rows.apply(*given) if _transformed() else rows_op(*given)
    return found


def recover_span(memory: Tensor, layout: Layout, start: int, count: int) -> Tensor:
    """The values of ``count`` weights from ``start`` on, differentiable."""
    given = memory, pack_layout(layout), start, count
    found: Tensor = _Span.apply(*given) if _transformed() else span_op(*given)
    return found


# -- for programs that are compiled or exported ------------------------------------------------------------------------
def _recover_rows(memory: Tensor, rows: Tensor, layout: list[int], row_size: int) -> Tensor:
    return ops.recover_rows(unpack_layout(layout), memory.detach(), rows.contiguous(), row_size)


def _add_rows(values: Tensor, rows: Tensor, layout: list[int], row_size: int) -> Tensor:  # noqa: ARG001 - as _recover_rows
    """Sum the values of rows into their slots: the adjoint of :func:`_recover_rows`."""
    found = unpack_layout(layout)
    sums = torch.zeros(found.size, dtype=SUM_DTYPE[values.dtype], device=values.device)
    ops.accumulate_rows(found, values.detach().contiguous(), rows.contiguous(), sums)
    return sums.to(values.dtype)


def _recover_span(memory: Tensor, layout: list[int], start: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=memory.dtype, device=memory.device)
    ops.recover_range(unpack_layout(layout), memory.detach(), start, out)
    return out


def _add_span(values: Tensor, layout: list[int], start: int, count: int) -> Tensor:  # noqa: ARG001 - as _recover_span
    """Sum the values of weights into their slots: the adjoint of :func:`_recover_span`."""
    found = unpack_layout(layout)
    sums = torch.zeros(found.size, dtype=SUM_DTYPE[values.dtype], device=values.device)
    ops.accumulate_range(found, values.detach().contiguous(), start, sums)
    return sums.to(values.dtype)


_BY_ROWS = "(Tensor memory, Tensor rows, SymInt[] layout, SymInt row_size) -> Tensor"
_BY_SPAN = "(Tensor memory, SymInt[] layout, SymInt start, SymInt count) -> Tensor"
rows_op = custom_op("fairfold::rows", _recover_rows, mutates_args=(), schema=_BY_ROWS)
add_rows = custom_op("fairfold::add_rows", _add_rows, mutates_args=(), schema=_BY_ROWS.replace("memory", "values"))
span_op = custom_op("fairfold::span", _recover_span, mutates_args=(), schema=_BY_SPAN)
add_span = custom_op("fairfold::add_span", _add_span, mutates_args=(), schema=_BY_SPAN.replace("memory", "values"))


rows_op.register_fake(lambda memory, rows, _layout, row_size: memory.new_empty(rows.shape[0], row_size))
add_rows.register_fake(lambda values, _recover_rows, layout, _row_size: values.new_empty(layout[1] + layout[2]))
span_op.register_fake(lambda memory, _layout, _start, count: memory.new_empty(count))
add_span.register_fake(lambda values, layout, _start, _count: values.new_empty(layout[1] + layout[2]))


def _save(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    """Save all but the first operand: the rows, if there are any, and the numbers."""
    rows = [operand for operand in inputs[1:] if isinstance(operand, Tensor)]
    ctx.numbers = inputs[1 + len(rows) :]
    ctx.save_for_backward(*rows)
    if hasattr(ctx, "save_for_forward"):  # of a function; operators have no forward derivatives
        ctx.save_for_forward(*rows)


def _backward_by(adjoint: Any) -> Callable[..., Any]:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return adjoint(gradient, *ctx.saved_tensors, *ctx.numbers), None, None, None

    return backward


for _op, _adjoint in ((rows_op, add_rows), (add_rows, rows_op), (span_op, add_span), (add_span, span_op)):
    _op.register_autograd(_backward_by(_adjoint), setup_context=_save)


# -- for torch's transforms --------------------------------------------------------------------------------------------
def _transformable(compute: Callable[..., Tensor], adjoint: Callable[[], Any]) -> Any:
    """An autograd function of one of the operators; ``adjoint`` returns that of the other, once there are both."""

    class Linear(Function):
        @staticmethod
        def forward(*given: Any) -> Tensor:
            return compute(*given)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return _backward_by(adjoint().apply)(ctx, gradient)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
            """The operator of the tangent, as it is linear."""
            found: Tensor = _backward_by(Linear.apply)(ctx, tangent)[0]
            return found

        @staticmethod
        def vmap(info: Any, dims: tuple[Any, ...], *given: Any) -> tuple[Tensor, int]:
            if compute is _recover_rows and dims[0] is None and dims[1] is not None:
                memory, rows, layout, row_size = given
                rows = rows.movedim(dims[1], 0)  # of one memory, whatever batch asks for them, in one call
                found = Linear.apply(memory, rows.reshape(-1), layout, row_size)  # type: ignore[no-untyped-call]
                return found.view(*rows.shape, row_size), 0
            results = []  # every element of the batch has a memory of its own
            for index in range(info.batch_size):
                pairs = zip(given, dims, strict=True)
                one = [arg.select(dim, index) if isinstance(dim, int) else arg for arg, dim in pairs]
                results.append(Linear.apply(*one))  # type: ignore[no-untyped-call]
            return torch.stack(results), 0

    return Linear


_Rows: Any = _transformable(_recover_rows, lambda: _AddRows)
_AddRows: Any = _transformable(_add_rows, lambda: _Rows)
_Span: Any = _transformable(_recover_span, lambda: _AddSpan)
_AddSpan: Any = _transformable(_add_span, lambda: _Span)
