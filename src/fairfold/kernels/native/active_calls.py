"""C calls for the active slots of a round, and for vectors of different sizes; see :mod:`.calls` for the manners."""

import ctypes

import torch
from torch import Tensor

from fairfold.kernels.hashing import Layout
from fairfold.kernels.native.calls import changed, integers, serving, settle
from fairfold.kernels.native.loader import library
from fairfold.kernels.native.packed import REAL_BYTES, packed, rows_of, threads

_FOLD_KIND = {torch.float32: 4, torch.float64: 8, torch.int32: -4}


def positions(layout: Layout, rows: Tensor, row_size: int, active: Tensor) -> tuple[Tensor, Tensor] | None:
    """See :func:`fairfold.kernels.reference_active.positions`."""
    loaded = library()
    if loaded is None or not integers(rows, active):
        return None
    rows, active = rows.contiguous(), active.long().contiguous()
    found = torch.empty(len(rows), row_size, dtype=torch.int32)
    signs = torch.empty(len(rows), row_size, dtype=torch.int8)
    code = loaded.fairfold_positions(
        packed(layout),
        ctypes.byref(rows_of(rows, row_size)),
        active.data_ptr(),
        active.numel(),
        found.data_ptr(),
        signs.data_ptr(),
        threads(),
    )
    return (found, signs) if settle(code, layout, rows, row_size) else None


def number(keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """See :func:`fairfold.kernels.reference_active.number`."""
    loaded = library()
    if loaded is None or not integers(keys):
        return None
    flat = keys.long().contiguous()
    numbers, distinct, found = (
        torch.empty_like(flat, dtype=torch.int32),
        torch.empty_like(flat).view(-1),
        ctypes.c_int64(),
    )
    code = loaded.fairfold_number(
        flat.data_ptr(), flat.numel(), numbers.data_ptr(), distinct.data_ptr(), ctypes.byref(found)
    )
    return (numbers, distinct[: found.value]) if settle(code) else None


def _indexed(found: Tensor, signs: Tensor) -> bool:
    """Whether positions and signs are as :func:`positions` makes them."""
    right = found.dtype is torch.int32 and signs.dtype is torch.int8 and found.shape == signs.shape
    return right and found.is_cpu and signs.is_cpu


def recover_positions(source: Tensor, found: Tensor, signs: Tensor) -> Tensor | None:
    """See :func:`fairfold.kernels.reference_active.recover_positions`."""
    loaded = serving(source)
    if loaded is None or not _indexed(found, signs):
        return None
    source, found, signs = source.contiguous(), found.contiguous(), signs.contiguous()
    out = torch.empty(found.shape, dtype=source.dtype)
    code = loaded.fairfold_recover_positions(
        REAL_BYTES[source.dtype],
        source.data_ptr(),
        source.numel(),
        found.data_ptr(),
        signs.data_ptr(),
        found.numel(),
        out.data_ptr(),
        threads(),
    )
    return out if settle(code) else None


def accumulate_positions(values: Tensor, found: Tensor, signs: Tensor, sums: Tensor) -> bool:
    """See :func:`fairfold.kernels.reference_active.accumulate_positions`."""
    loaded = serving(sums, values)
    if loaded is None or not _indexed(found, signs) or values.shape != found.shape or not sums.is_contiguous():
        return False
    values, found, signs = values.contiguous(), found.contiguous(), signs.contiguous()
    code = loaded.fairfold_accumulate_positions(
        REAL_BYTES[sums.dtype],
        values.data_ptr(),
        found.data_ptr(),
        signs.data_ptr(),
        found.numel(),
        sums.data_ptr(),
        sums.numel(),
    )
    done = settle(code)
    if done:
        changed(sums)
    return done


def _stepping(compact: Tensor, slots: Tensor, *vectors: Tensor) -> bool:
    """Whether an optimiser step can be taken in C: vectors without gaps, one entry a slot."""
    if not integers(slots) or slots.dtype is not torch.int64 or not compact.is_contiguous():
        return False
    return all(vector.shape == slots.shape and vector.is_contiguous() for vector in (slots, *vectors))


def adagrad_slots(compact: Tensor, slots: Tensor, gradient: Tensor, state: Tensor, rate: float, epsilon: float) -> bool:
    """See :func:`fairfold.kernels.reference_active.adagrad_slots`."""
    loaded = serving(compact, gradient, state, followed=False)
    if loaded is None or not _stepping(compact, slots, gradient, state):
        return False
    code = loaded.fairfold_adagrad_slots(
        REAL_BYTES[compact.dtype],
        compact.data_ptr(),
        compact.numel(),
        slots.data_ptr(),
        slots.numel(),
        gradient.data_ptr(),
        state.data_ptr(),
        rate,
        epsilon,
    )
    done = settle(code)
    if done:
        changed(compact, state)
    return done


def adam_slots(
    compact: Tensor,
    slots: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int,
    rate: float,
    betas: tuple[float, float],
    epsilon: float,
) -> bool:
    """See :func:`fairfold.kernels.reference_active.adam_slots`."""
    loaded = serving(compact, gradient, mean, square, followed=False)
    if loaded is None or not _stepping(compact, slots, gradient, mean, square):
        return False
    code = loaded.fairfold_adam_slots(
        REAL_BYTES[compact.dtype],
        compact.data_ptr(),
        compact.numel(),
        slots.data_ptr(),
        slots.numel(),
        gradient.data_ptr(),
        mean.data_ptr(),
        square.data_ptr(),
        step,
        rate,
        *betas,
        epsilon,
    )
    done = settle(code)
    if done:
        changed(compact, mean, square)
    return done


def fold_groups(values: Tensor, repeats: int, chunk: int) -> Tensor | None:
    """See :func:`fairfold.kernels.reference_chain.fold_groups`."""
    kind = _FOLD_KIND.get(values.dtype)
    loaded = library() if kind == _FOLD_KIND[torch.int32] and values.is_cpu else serving(values)
    if loaded is None or kind is None or values.numel() % (repeats * chunk):
        return None
    values = values.contiguous()
    out = torch.empty(values.numel() // repeats, dtype=values.dtype)
    code = loaded.fairfold_fold_groups(
        kind, values.data_ptr(), values.numel(), repeats, chunk, out.data_ptr(), out.numel(), threads()
    )
    return out if settle(code) else None


def unfold_groups(values: Tensor, repeats: int, chunk: int, out: Tensor, add: bool) -> bool:
    """See :func:`fairfold.kernels.reference_chain.unfold_groups`."""
    loaded = serving(values, out)
    if loaded is None or not out.is_contiguous():
        return False
    values = values.contiguous()
    code = loaded.fairfold_unfold_groups(
        REAL_BYTES[values.dtype],
        values.data_ptr(),
        values.numel(),
        repeats,
        chunk,
        out.data_ptr(),
        out.numel(),
        int(add),
        threads(),
    )
    done = settle(code)
    if done:
        changed(out)
    return done
