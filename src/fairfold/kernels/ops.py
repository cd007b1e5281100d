"""The seam between mathematics and speed: what layers above call, and which body serves it.

Every operation has its specification in :mod:`fairfold.kernels.reference` and the two modules beside it. The compiled
body serves float32 and float64 tensors on the CPU, and Triton those on a CUDA device; everything else, and every tensor
that autograd follows, goes to the specification itself. All give the same slots and signs, and the same values up to
the order of a sum.

Lengths and dtypes are the caller's to check. Row ids on the CPU are checked here: an id that the table does not have
raises :class:`~fairfold.errors.InvalidRow` before anything is written.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairfold.kernels import gpu, hashing, reference, reference_active, reference_stacked
from fairfold.kernels.form import Form, Lines
from fairfold.kernels.hashing import Layout
from fairfold.kernels.native import active_calls, calls
from fairfold.kernels.reference_stacked import SlotTables

__all__ = [
    "accumulate_lines",
    "accumulate_positions",
    "accumulate_range",
    "accumulate_rows",
    "active_slots",
    "adagrad_rows",
    "adagrad_slots",
    "adam_slots",
    "add_slopes",
    "count_range",
    "number",
    "positions",
    "recover_lines",
    "recover_positions",
    "recover_range",
    "recover_rows",
    "reduce",
    "sgd_rows",
    "slots_and_signs",
    "step_prefix",
    "step_slots",
    "touched_rows",
]


def _gpu(*tensors: Tensor, followed: bool = True) -> Any:
    """The Triton body where it can serve these tensors: on a CUDA device, and not followed by autograd.

    ``followed=False`` is for optimiser steps, which autograd does not follow whatever the tensors say.
    """
    if not tensors[0].is_cuda or not gpu.available():
        return None
    if followed and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    from fairfold.kernels.gpu import calls as gpu_calls  # needs Triton, so only where it is there

    return gpu_calls


def slots_and_signs(layout: Layout, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Slots (int64) and signs (int8) of coordinates, each in [0, full_size)."""
    if body := _gpu(coordinates):
        on_device: tuple[Tensor, Tensor] = body.slots_and_signs(layout, coordinates)
        return on_device
    found = calls.slots_and_signs(layout, coordinates)
    return hashing.slots_and_signs(layout, coordinates) if found is None else found


# -- ranges of the full vector ---------------------------------------------------------------------------------------


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> None:
    """Add the signed values of coordinates [start, start + len(values)) into their slots of ``sums``, in place.

    ``counts``, where given, is raised by one for every coordinate that lands in a slot.
    """
    if body := _gpu(sums, values):
        body.accumulate_range(layout, values, start, sums, counts)
    elif not calls.accumulate_range(layout, values, start, sums, counts):
        reference.accumulate_range(layout, values, start, sums, counts)


def reduce(layout: Layout, full: Tensor) -> Tensor:
    """The signed mean of each slot over the whole full vector, 0 if it is empty.

    The numbers of :func:`accumulate_range` divided by its counts, without counts of the compact size in memory.
    """
    if body := _gpu(full):
        reduced: Tensor = body.reduce(layout, full)
        return reduced
    compact = calls.reduce(layout, full)
    return reference.reduce(layout, full) if compact is None else compact


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> None:
    """Raise ``counts`` by how many coordinates of [start, stop) live in each slot, in place."""
    if body := _gpu(counts):
        body.count_range(layout, start, stop, counts)
    elif not calls.count_range(layout, start, stop, counts):
        reference.count_range(layout, start, stop, counts)


def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> None:
    """Write the values of coordinates [start, start + len(out)) into ``out``."""
    if body := _gpu(compact, out):
        body.recover_range(layout, compact, start, out)
    elif not calls.recover_range(layout, compact, start, out):
        reference.recover_range(layout, compact, start, out)


# -- rows of a table -------------------------------------------------------------------------------------------------


def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
    """The values of chosen rows, shape (len(rows), row_size)."""
    if body := _gpu(compact):
        looked_up: Tensor = body.recover_rows(layout, compact, rows, row_size)
        return looked_up
    found = calls.recover_rows(layout, compact, rows, row_size)
    if found is not None:
        return found
    _check_rows(layout, rows, row_size)
    return reference.recover_rows(layout, compact, rows, row_size)


def accumulate_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor) -> None:
    """Add the signed ``values`` (len(rows), row_size) of chosen rows, which may repeat, into ``sums``, in place."""
    if body := _gpu(sums, values):
        body.accumulate_rows(layout, values, rows, sums)
    elif not calls.accumulate_rows(layout, values, rows, sums):
        _check_rows(layout, rows, values.shape[1])
        reference.accumulate_rows(layout, values, rows, sums)


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a batch as touched slots only: slots in increasing order, each once, and their summed values.

    The sums are those of :func:`accumulate_rows`; time and memory do not depend on the size of the compact vector.
    """
    if body := _gpu(values):
        touched: tuple[Tensor, Tensor] = body.touched_rows(layout, values, rows)
        return touched
    found = calls.touched_rows(layout, values, rows)
    if found is not None:
        return found
    _check_rows(layout, rows, values.shape[1])
    return reference_active.touched_rows(layout, values, rows)


def sgd_rows(layout: Layout, compact: Tensor, values: Tensor, rows: Tensor, rate: float) -> None:
    """A whole step of SGD in place: compact[slot] -= rate · (sum of the signed gradients ``values`` in that slot)."""
    if body := _gpu(compact, values, followed=False):
        body.sgd_rows(layout, compact.detach(), values.detach(), rows, rate)
        return
    if calls.accumulate_rows(layout, values, rows, compact, -rate, followed=False):
        return
    with torch.no_grad():
        slots, gradient = touched_rows(layout, values, rows)
        compact.index_add_(0, slots, gradient.to(compact.dtype), alpha=-rate)


def adagrad_rows(
    layout: Layout,
    compact: Tensor,
    state: Tensor,
    values: Tensor,
    rows: Tensor,
    rate: float,
    epsilon: float = 1e-10,
) -> None:
    """A whole step of Adagrad in place, on the slots of the batch; ``state`` is shaped like ``compact``."""
    if body := _gpu(compact, values, followed=False):
        body.adagrad_rows(layout, compact.detach(), state, values.detach(), rows, rate, epsilon)
        return
    if calls.adagrad_rows(layout, compact, state, values, rows, rate, epsilon):
        return
    with torch.no_grad():
        slots, gradient = touched_rows(layout, values, rows)
        gathered = state[slots]
        reference_active.adagrad_slots(compact, slots, gradient.to(compact.dtype), gathered, rate, epsilon)
        state[slots] = gathered


def _check_rows(layout: Layout, rows: Tensor, row_size: int) -> None:
    """Refuse ids that the table does not have: the hash would give each of them the values of some other row."""
    if not rows.is_cpu or rows.numel() == 0:  # elsewhere reading the ids would stop the device
        return
    if int(rows.min()) < 0 or int(rows.max()) >= layout.full_size // row_size:
        raise calls.bad_rows(layout, rows, row_size)


# -- the active slots of a round -------------------------------------------------------------------------------------


def active_slots(layout: Layout, rows: Tensor, row_size: int) -> Tensor:
    """The slots of all rows of a round, in increasing order, each once (int64)."""
    found = calls.active_slots(layout, rows, row_size)
    if found is not None:
        return found
    _check_rows(layout, rows, row_size)
    return reference_active.active_slots(layout, rows, row_size)


def number(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Equal keys numbered alike, in the order of their first appearance: numbers (int32), and the key of each."""
    found = active_calls.number(keys)
    return reference_active.number(keys) if found is None else found


def positions(layout: Layout, rows: Tensor, row_size: int, active: Tensor) -> tuple[Tensor, Tensor]:
    """Where each coordinate of the rows stands in ``active``, and its sign: int32 and int8, (len(rows), row_size)."""
    found = active_calls.positions(layout, rows, row_size, active)
    if found is not None:
        return found
    _check_rows(layout, rows, row_size)
    return reference_active.positions(layout, rows, row_size, active)


def recover_positions(source: Tensor, found: Tensor, signs: Tensor) -> Tensor:
    """The values of rows from ``source = compact[active]``; ``found`` and ``signs`` as :func:`positions` gives them."""
    out = active_calls.recover_positions(source, found, signs)
    return reference_active.recover_positions(source, found, signs) if out is None else out


def accumulate_positions(values: Tensor, found: Tensor, signs: Tensor, sums: Tensor) -> None:
    """Add the signed values of rows into ``sums``, which has one entry an active slot, in place."""
    if not active_calls.accumulate_positions(values, found, signs, sums):
        reference_active.accumulate_positions(values, found, signs, sums)


@torch.no_grad()
def step_prefix(
    values: Tensor, gradient: Tensor, moments: Sequence[Tensor], rates: Tensor, moving: Tensor, number: Tensor
) -> None:
    """One optimiser step on a front part of the values; see :func:`fairfold.kernels.reference_active.step_prefix`.

    On a GPU nothing waits for the device, so that steps can be captured.
    """
    if body := _gpu(values, gradient):
        body.step_prefix(values, gradient, moments, rates, moving, number)
    else:
        reference_active.step_prefix(values, gradient, moments, rates, moving, number)


@torch.no_grad()
def step_slots(
    full: Tensor,
    gradient: Tensor,
    values: Tensor,
    moments: Sequence[Tensor],
    tables: SlotTables,
    rates: Tensor,
    number: Tensor,
) -> None:
    """One step of a cohort, and its weights realised; see :func:`fairfold.kernels.reference_stacked.step_slots`.

    On a GPU nothing waits for the device, and sums have a fixed order.
    """
    if body := _gpu(values, gradient):
        body.step_slots(full, gradient, values, moments, tables, rates, number)
    else:
        reference_stacked.step_slots(full, gradient, values, moments, tables, rates, number)


def add_slopes(form: Form, regulariser: float, values: Tensor, gradient: Tensor, lines: Lines) -> bool:
    """Add the gradient of a cohort's step in one pass; False where nothing but autograd serves."""
    body = _gpu(values, gradient)
    return body is not None and bool(body.add_slopes(form, regulariser, values, gradient, lines))


def recover_lines(source: Tensor, found: Tensor, signs: Tensor, lines: Tensor) -> Tensor:
    """:func:`recover_positions` of chosen lines of ``found`` and ``signs``, shape (*lines.shape, row length)."""
    if body := _gpu(source):
        looked_up: Tensor = body.recover_lines(source, found, signs, lines)
        return looked_up
    flat = lines.reshape(-1)
    rows = recover_positions(source, found.index_select(0, flat), signs.index_select(0, flat))
    return rows.view(*lines.shape, found.shape[1])


def accumulate_lines(values: Tensor, found: Tensor, signs: Tensor, lines: Tensor, sums: Tensor) -> None:
    """:func:`accumulate_positions` at chosen lines of ``found`` and ``signs``, in place."""
    if body := _gpu(sums, values):
        body.accumulate_lines(values, found, signs, lines, sums)
        return
    flat = lines.reshape(-1)
    rows = values.reshape(len(flat), found.shape[1])
    accumulate_positions(rows, found.index_select(0, flat), signs.index_select(0, flat), sums)


@torch.no_grad()
def adagrad_slots(
    compact: Tensor, slots: Tensor, gradient: Tensor, state: Tensor, rate: float, epsilon: float = 1e-10
) -> None:
    """One step of ``torch.optim.Adagrad`` on increasing slots of ``compact``, in place; one gradient and state a slot.

    To step on a gathered vector, pass ``torch.arange(len(vector))`` as its slots.
    """
    if not active_calls.adagrad_slots(compact, slots, gradient, state, rate, epsilon):
        reference_active.adagrad_slots(compact, slots, gradient, state, rate, epsilon)


@torch.no_grad()
def adam_slots(
    compact: Tensor,
    slots: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> None:
    """Step number ``step`` (from 1) of ``torch.optim.Adam`` on increasing slots of ``compact``, in place.

    Exact over a round if ``slots`` are all active slots of the round, at every step: an active slot keeps moving by its
    moments in steps that do not touch it.
    """
    if not active_calls.adam_slots(compact, slots, gradient, mean, square, step, rate, betas, epsilon):
        reference_active.adam_slots(compact, slots, gradient, mean, square, step, rate, betas, epsilon)
