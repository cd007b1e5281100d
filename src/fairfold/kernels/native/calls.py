"""Tensors in, C calls out.

Each function here serves the operation of its name in :mod:`fairfold.kernels.ops` and says by its result whether it
did: False or None means that the reference body must. Ids and lengths are checked in C before anything is touched.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from fairfold.errors import InvalidRow, InvalidVector
from fairfold.kernels.hashing import Layout
from fairfold.kernels.native import pages
from fairfold.kernels.native.loader import library
from fairfold.kernels.native.packed import ID_BYTES, REAL_BYTES, moving, packed, rows_of, threads

_PLAIN = (Tensor, torch.nn.Parameter)
_OK, _BAD_LAYOUT, _BAD_ROW, _BAD_ARGUMENT, _NO_MEMORY, _UNSUPPORTED, _NOT_ACTIVE = range(7)

_grad_enabled = torch.is_grad_enabled


def serving(*tensors: Tensor, followed: bool = True) -> Any:
    """The library, if it can serve these tensors: plain ones, on the CPU, one dtype, outside of autograd.

    ``followed=False`` is for optimiser steps, which autograd does not follow whatever the tensors say.
    """
    loaded = library()
    if loaded is None:
        return None
    dtype = tensors[0].dtype
    if dtype not in REAL_BYTES:
        return None
    for tensor in tensors:
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype is not dtype:
            return None
        if followed and tensor.requires_grad and _grad_enabled():
            return None
    return loaded


def integers(*tensors: Tensor) -> bool:
    """Whether these are plain int64 or int32 tensors on the CPU."""
    for tensor in tensors:  # not all(...): a generator costs more than what it asks here
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype not in ID_BYTES:
            return False
    return True


def changed(*tensors: Tensor) -> None:
    """Tell autograd that tensors were written to behind its back."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def settle(code: int, layout: Layout | None = None, rows: Tensor | None = None, row_size: int = 1) -> bool:
    """Whether a call did its work; errors are raised, and what C does not serve is left to the reference."""
    if code == _OK:
        return True
    if code == _UNSUPPORTED:
        return False
    if code == _BAD_ROW and layout is not None and rows is not None:
        raise bad_rows(layout, rows, row_size)
    if code == _NO_MEMORY:
        raise MemoryError("no memory for the kernel's scratch space")
    if code == _NOT_ACTIVE:
        raise InvalidVector(
            "a slot or position outside of the active ones",
            "rows that took part in active_slots",
            "Make the list of active slots from all rows of the round.",
        )
    raise InvalidVector(
        f"tensors that do not fit {layout}",
        "vectors of the layout's sizes, and slots in increasing order",
        "Check their shapes.",
    )


def bad_rows(layout: Layout, rows: Tensor, row_size: int) -> InvalidRow:
    """The error for row ids outside of the table."""
    count = layout.full_size // row_size
    wrong = int(rows[(rows < 0) | (rows >= count)][0])
    return InvalidRow(f"row {wrong}", f"rows from 0 to {count - 1}", "Check the ids.")


def batch(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Values and row ids without gaps, and the length of a row."""
    shape = values.shape
    if len(shape) != 2 or rows.dim() != 1 or rows.numel() != shape[0]:
        raise InvalidVector(
            f"values of shape {tuple(shape)} for rows of shape {tuple(rows.shape)}",
            "one line of values a row",
            "Flatten a batch of ids, and its values with it.",
        )
    return values.contiguous(), rows.contiguous(), shape[1]


def slots_and_signs(layout: Layout, coordinates: Tensor) -> tuple[Tensor, Tensor] | None:
    """See :func:`fairfold.kernels.hashing.slots_and_signs`."""
    loaded = library()
    if loaded is None or not integers(coordinates):
        return None
    flat = coordinates.long().contiguous()
    slots = torch.empty_like(flat)
    signs = torch.empty_like(flat, dtype=torch.int8)
    code = loaded.fairfold_slots_and_signs(
        packed(layout), flat.data_ptr(), flat.numel(), slots.data_ptr(), signs.data_ptr()
    )
    return (slots, signs) if settle(code, layout, flat.reshape(-1)) else None


def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor | None:
    """See :func:`fairfold.kernels.reference.recover_rows`."""
    loaded = serving(compact)
    if loaded is None or not integers(rows):
        return None
    compact, rows = compact.contiguous(), rows.contiguous()
    pages.in_use(compact)
    out = compact.new_empty(rows.numel(), row_size)  # sizes one by one: torch reads a tuple of them half as fast
    code = loaded.fairfold_recover_rows(moving(layout, compact, rows, row_size, out))
    return out if settle(code, layout, rows, row_size) else None


def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> bool:
    """See :func:`fairfold.kernels.reference.recover_range`."""
    loaded = serving(compact, out)
    if loaded is None:
        return False
    compact = compact.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    pages.in_use(compact)
    code = loaded.fairfold_recover_range(
        packed(layout),
        REAL_BYTES[compact.dtype],
        compact.data_ptr(),
        compact.numel(),
        start,
        target.numel(),
        target.data_ptr(),
        threads(),
    )
    if not settle(code, layout):
        return False
    if target is out:
        changed(out)
    else:
        out.copy_(target)
    return True


def accumulate_rows(
    layout: Layout, values: Tensor, rows: Tensor, sums: Tensor, scale: float = 1.0, *, followed: bool = True
) -> bool:
    """See :func:`fairfold.kernels.reference.accumulate_rows`; ``scale`` multiplies what is added."""
    loaded = serving(sums, values, followed=followed)
    if loaded is None or not integers(rows) or not sums.is_contiguous():
        return False
    values, rows, row_size = batch(values, rows)
    pages.in_use(sums)
    code = loaded.fairfold_accumulate_rows(moving(layout, sums, rows, row_size, values), scale)
    done = settle(code, layout, rows, row_size)
    if done:
        changed(sums)
    return done


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> bool:
    """See :func:`fairfold.kernels.reference.accumulate_range`."""
    loaded = serving(sums, values)
    if loaded is None or not sums.is_contiguous() or (counts is not None and not _counts(counts, sums.numel())):
        return False
    values = values.contiguous()
    pages.in_use(sums)
    code = loaded.fairfold_accumulate_range(
        packed(layout),
        REAL_BYTES[sums.dtype],
        values.data_ptr(),
        start,
        values.numel(),
        sums.data_ptr(),
        None if counts is None else counts.data_ptr(),
        sums.numel(),
        threads(),
    )
    done = settle(code, layout)
    if done:
        changed(sums, *([] if counts is None else [counts]))
    return done


def reduce(layout: Layout, full: Tensor) -> Tensor | None:
    """See :func:`fairfold.kernels.reference.reduce`."""
    loaded = serving(full)
    if loaded is None:
        return None
    if full.shape != (layout.full_size,):
        settle(_BAD_ARGUMENT, layout)
    full = full.contiguous()
    compact = torch.empty(layout.size, dtype=full.dtype)
    pages.before_first_touch(compact)
    code = loaded.fairfold_reduce(
        packed(layout), REAL_BYTES[full.dtype], full.data_ptr(), compact.data_ptr(), compact.numel(), threads()
    )
    return compact if settle(code, layout) else None


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> bool:
    """See :func:`fairfold.kernels.reference.count_range`."""
    loaded = library()
    if loaded is None or not _counts(counts, counts.numel()):
        return False
    code = loaded.fairfold_count_range(
        packed(layout), start, stop - start, counts.data_ptr(), counts.numel(), threads()
    )
    done = settle(code, layout)
    if done:
        changed(counts)
    return done


def _counts(counts: Tensor, size: int) -> bool:
    plain = type(counts) is Tensor and counts.is_cpu and counts.dtype is torch.int32
    return plain and counts.is_contiguous() and counts.numel() == size


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """See :func:`fairfold.kernels.reference.touched_rows`."""
    loaded = serving(values)
    if loaded is None or not integers(rows):
        return None
    values, rows, row_size = batch(values, rows)
    slots = torch.empty(values.numel(), dtype=torch.int64)
    sums = torch.empty(values.numel(), dtype=values.dtype)
    touched = ctypes.c_int64()
    code = loaded.fairfold_touched_rows(
        packed(layout),
        REAL_BYTES[values.dtype],
        values.data_ptr(),
        ctypes.byref(rows_of(rows, row_size)),
        slots.data_ptr(),
        sums.data_ptr(),
        slots.numel(),
        ctypes.byref(touched),
    )
    if not settle(code, layout, rows, row_size):
        return None
    return _trimmed(slots, touched.value), _trimmed(sums, touched.value)


def active_slots(layout: Layout, rows: Tensor, row_size: int) -> Tensor | None:
    """See :func:`fairfold.kernels.reference.active_slots`."""
    loaded = library()
    if loaded is None or not integers(rows):
        return None
    rows = rows.contiguous()
    slots = torch.empty(rows.numel() * row_size, dtype=torch.int64)
    touched = ctypes.c_int64()
    code = loaded.fairfold_touched_rows(
        packed(layout),
        4,
        None,
        ctypes.byref(rows_of(rows, row_size)),
        slots.data_ptr(),
        None,
        slots.numel(),
        ctypes.byref(touched),
    )
    return _trimmed(slots, touched.value) if settle(code, layout, rows, row_size) else None


def _trimmed(buffer: Tensor, length: int) -> Tensor:
    """The used start of a buffer; copied where much of the buffer would be kept alive for nothing."""
    used = buffer[:length]
    return used if length * 2 > len(buffer) else used.clone()


def adagrad_rows(
    layout: Layout, compact: Tensor, state: Tensor, values: Tensor, rows: Tensor, rate: float, epsilon: float
) -> bool:
    """See :func:`fairfold.kernels.ops.adagrad_rows`."""
    loaded = serving(compact, state, values, followed=False)
    if loaded is None or not integers(rows) or not (compact.is_contiguous() and state.is_contiguous()):
        return False
    values, rows, row_size = batch(values, rows)
    if state.numel() != compact.numel():
        return settle(_BAD_ARGUMENT, layout)
    code = loaded.fairfold_adagrad_rows(
        moving(layout, compact, rows, row_size, values), rate, epsilon, state.data_ptr()
    )
    done = settle(code, layout, rows, row_size)
    if done:
        changed(compact, state)
    return done
