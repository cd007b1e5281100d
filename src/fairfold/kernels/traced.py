"""The kernels as operators of torch, for programs that torch writes itself: compiled, exported, transformed, on meta.

Operators come in pairs, each linear and the gradient of the other: weights are recovered (S), and gradients of weights
are added up slot by slot (Sᵀ). So derivatives of any order exist. A layout travels as plain numbers
(:func:`numbers_of`), of which torch may make symbols. To compile and to export, torch needs operators of a library; its
transforms (``torch.func``) do not take these, but functions that say how they are done for a batch. Eager programs come
here for neither: calls that torch need not look into are cheaper.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op

from fairfold.kernels import ops
from fairfold.kernels.hashing import WORD, Layout

SUM_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def numbers_of(layout: Layout) -> list[int]:
    """A layout as numbers that fit an operator's arguments, which have signs."""
    key = layout.key
    return [layout.full_size, layout.head, layout.tail, layout.chunk, key & WORD, key >> 32, int(layout.signed)]


def layout_of(numbers: list[int]) -> Layout:
    """The layout that these are."""
    full_size, head, tail, chunk, low, high, signed = numbers
    return Layout(full_size, head, tail, chunk, low | high << 32, bool(signed))


def needed(memory: Tensor) -> bool:
    """Whether torch looks into the call: it compiles, exports or transforms it, or wants its shape alone."""
    return torch.compiler.is_compiling() or memory.is_meta or _transformed()


def _transformed() -> bool:
    return not torch.compiler.is_compiling() and bool(torch._C._are_functorch_transforms_active())


def recovered_rows(memory: Tensor, rows: Tensor, layout: Layout, row_size: int) -> Tensor:
    """The values of some rows of a table, [rows, row_size]."""
    given = memory, rows, numbers_of(layout), row_size
    found: Tensor = _Rows.apply(*given) if _transformed() else rows_of(*given)
    return found


def recovered_span(memory: Tensor, layout: Layout, start: int, count: int) -> Tensor:
    """So many weights from one on, [count]."""
    given = memory, numbers_of(layout), start, count
    found: Tensor = _Span.apply(*given) if _transformed() else span_of(*given)
    return found


# -- for programs that are compiled or exported ------------------------------------------------------------------------


def _rows(memory: Tensor, rows: Tensor, layout: list[int], row_size: int) -> Tensor:
    """The values of some rows of a table, [rows, row_size]."""
    return ops.recover_rows(layout_of(layout), memory.detach(), rows.contiguous(), row_size)


def _add_rows(values: Tensor, rows: Tensor, layout: list[int], row_size: int) -> Tensor:  # noqa: ARG001 - as _rows
    """What values of rows are to the memory: added up slot by slot."""
    found = layout_of(layout)
    sums = torch.zeros(found.size, dtype=SUM_DTYPE[values.dtype], device=values.device)
    ops.accumulate_rows(found, values.detach().contiguous(), rows.contiguous(), sums)
    return sums.to(values.dtype)


def _span(memory: Tensor, layout: list[int], start: int, count: int) -> Tensor:
    """So many weights from one on, [count]."""
    out = torch.empty(count, dtype=memory.dtype, device=memory.device)
    ops.recover_range(layout_of(layout), memory.detach(), start, out)
    return out


def _add_span(values: Tensor, layout: list[int], start: int, count: int) -> Tensor:  # noqa: ARG001 - as _span
    """What values of weights are to the memory."""
    found = layout_of(layout)
    sums = torch.zeros(found.size, dtype=SUM_DTYPE[values.dtype], device=values.device)
    ops.accumulate_range(found, values.detach().contiguous(), start, sums)
    return sums.to(values.dtype)


_BY_ROWS = "(Tensor memory, Tensor rows, SymInt[] layout, SymInt row_size) -> Tensor"
_BY_SPAN = "(Tensor memory, SymInt[] layout, SymInt start, SymInt count) -> Tensor"
rows_of = custom_op("fairfold::rows", _rows, mutates_args=(), schema=_BY_ROWS)
add_rows = custom_op("fairfold::add_rows", _add_rows, mutates_args=(), schema=_BY_ROWS.replace("memory", "values"))
span_of = custom_op("fairfold::span", _span, mutates_args=(), schema=_BY_SPAN)
add_span = custom_op("fairfold::add_span", _add_span, mutates_args=(), schema=_BY_SPAN.replace("memory", "values"))


@rows_of.register_fake
def _(memory: Tensor, rows: Tensor, layout: list[int], row_size: int) -> Tensor:  # noqa: ARG001
    return memory.new_empty(rows.shape[0], row_size)


@add_rows.register_fake
def _(values: Tensor, rows: Tensor, layout: list[int], row_size: int) -> Tensor:  # noqa: ARG001
    return values.new_empty(layout[1] + layout[2])


@span_of.register_fake
def _(memory: Tensor, layout: list[int], start: int, count: int) -> Tensor:  # noqa: ARG001
    return memory.new_empty(count)


@add_span.register_fake
def _(values: Tensor, layout: list[int], start: int, count: int) -> Tensor:  # noqa: ARG001
    return values.new_empty(layout[1] + layout[2])


def _remember_rows(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    _, rows, ctx.layout, ctx.row_size = inputs
    ctx.save_for_backward(rows)
    if hasattr(ctx, "save_for_forward"):  # of a function; operators have no forward slopes
        ctx.save_for_forward(rows)


def _remember_span(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    _, ctx.layout, ctx.start, ctx.count = inputs


def _by_rows(adjoint: Any) -> Callable[..., Any]:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return adjoint(gradient, rows, ctx.layout, ctx.row_size), None, None, None

    return backward


def _by_span(adjoint: Any) -> Callable[..., Any]:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return adjoint(gradient, ctx.layout, ctx.start, ctx.count), None, None, None

    return backward


rows_of.register_autograd(_by_rows(add_rows), setup_context=_remember_rows)
add_rows.register_autograd(_by_rows(rows_of), setup_context=_remember_rows)
span_of.register_autograd(_by_span(add_span), setup_context=_remember_span)
add_span.register_autograd(_by_span(span_of), setup_context=_remember_span)


# -- for torch's transforms --------------------------------------------------------------------------------------------


def _transformable(compute: Callable[..., Tensor], remember: Any, backward_by: Any, adjoint: Callable[[], Any]) -> Any:
    """A function of torch's for one of the operators; ``adjoint`` gives that of the other, once there are both."""

    class Linear(Function):
        @staticmethod
        def forward(*given: Any) -> Tensor:
            return compute(*given)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            remember(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return backward_by(adjoint().apply)(ctx, gradient)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
            """Linear: what the result changes by is the operator of what its first argument changes by."""
            found: Tensor = backward_by(Linear.apply)(ctx, tangent)[0]
            return found

        @staticmethod
        def vmap(info: Any, dims: tuple[Any, ...], *given: Any) -> tuple[Tensor, int]:
            if compute is _rows and dims[0] is None and dims[1] is not None:
                memory, rows, layout, row_size = given
                rows = rows.movedim(dims[1], 0)  # of one memory, whatever batch asks for them, in one call
                found = Linear.apply(memory, rows.reshape(-1), layout, row_size)  # type: ignore[no-untyped-call]
                return found.view(*rows.shape, row_size), 0
            each = []  # every summand has a memory of its own
            for place in range(info.batch_size):
                pairs = zip(given, dims, strict=True)
                one = [of.select(dim, place) if isinstance(dim, int) else of for of, dim in pairs]
                each.append(Linear.apply(*one))  # type: ignore[no-untyped-call]
            return torch.stack(each), 0

    return Linear


_Rows: Any = _transformable(_rows, _remember_rows, _by_rows, lambda: _AddRows)
_AddRows: Any = _transformable(_add_rows, _remember_rows, _by_rows, lambda: _Rows)
_Span: Any = _transformable(_span, _remember_span, _by_span, lambda: _AddSpan)
_AddSpan: Any = _transformable(_add_span, _remember_span, _by_span, lambda: _Span)
