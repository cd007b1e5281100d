"""The seam between mathematics and speed: what layers above call, and which body serves it.

Every operation has its specification in :mod:`fairfold.kernels.reference`, :mod:`.reference_pairs`,
:mod:`.reference_stacked` or :mod:`.few_bits`. The compiled body serves float32 and float64 tensors on the CPU, and
Triton those on a CUDA device; everything else, and every tensor that autograd follows, goes to the specification
itself. All give the same slots and signs, and the same values up to the order of a sum.

Lengths and dtypes are the caller's to check. Row ids on the CPU are checked here: an id that the table does not have
raises :class:`~fairfold.errors.InvalidRow` before anything is written.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fairfold.kernels import few_bits, gpu, hashing, reference, reference_pairs, reference_stacked
from fairfold.kernels.form import Form, Lines
from fairfold.kernels.hashing import Layout
from fairfold.kernels.native import calls, pair_calls

P = ParamSpec("P")
R = TypeVar("R")


@cache
def _gpu_body(module: str, name: str) -> Any:
    return getattr(import_module(f"fairfold.kernels.gpu.{module}"), name)  # needs Triton, so only where it is there


def _on_gpu(arguments: tuple[Any, ...]) -> bool:
    """Whether Triton can serve these: on a CUDA device, and not followed by autograd."""
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    followed = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    return not followed and any(one.is_cuda for one in tensors)


def _served(
    specification: Callable[P, R], native: Callable[P, R] | None = None, on_gpu: str | None = None
) -> Callable[P, R]:
    """The operation by the body of the same name that can serve: Triton's (a module of ``gpu``), C, or plain torch."""
    name = specification.__name__

    @wraps(specification)
    def serve(*given: P.args, **named: P.kwargs) -> R:
        if on_gpu is not None and gpu.available() and _on_gpu(given):
            found: R = _gpu_body(on_gpu, name)(*given, **named)
            return found
        if native is not None:
            try:
                return native(*given, **named)
            except calls.NotServed:
                pass
        return specification(*given, **named)

    return serve


slots_and_signs = _served(hashing.slots_and_signs, calls.slots_and_signs, "calls")
accumulate_range = _served(reference.accumulate_range, calls.accumulate_range, "calls")
reduce = _served(reference.reduce, calls.reduce, "calls")
count_range = _served(reference.count_range, calls.count_range, "calls")
recover_range = _served(reference.recover_range, calls.recover_range, "calls")
recover_rows = _served(reference.recover_rows, calls.recover_rows, "calls")
accumulate_rows = _served(reference.accumulate_rows, calls.accumulate_rows, "calls")
touched_rows = _served(reference.touched_rows, calls.touched_rows, "calls")
fold_groups = _served(reference.fold_groups, calls.fold_groups)
unfold_groups = _served(reference.unfold_groups, calls.unfold_groups)
number = _served(reference.number, calls.number)
recover_positions = _served(reference.recover_positions, calls.recover_positions)
accumulate_positions = _served(reference.accumulate_positions, calls.accumulate_positions)
pair_sums = _served(reference_pairs.pair_sums, pair_calls.pair_sums)
packed_products = _served(few_bits.packed_products, pair_calls.packed_products)
packed_sum = _served(few_bits.packed_sum, pair_calls.packed_sum)
recover_lines = _served(reference.recover_lines, None, "cohort")
accumulate_lines = _served(reference.accumulate_lines, None, "cohort")
step_prefix = torch.no_grad()(_served(reference.step_prefix, None, "cohort"))
step_slots = torch.no_grad()(_served(reference_stacked.step_slots, None, "cohort"))


def sgd_rows(layout: Layout, compact: Tensor, values: Tensor, rows: Tensor, rate: float) -> None:
    """A whole step of SGD in place: compact[slot] -= rate · (sum of the signed gradients ``values`` in that slot).

    To be called where autograd is off, as it is in a backward.
    """
    if compact.dtype in (torch.float32, torch.float64):
        accumulate_rows(layout, values, rows, compact, -rate)
    else:  # adding many small steps to a short type would lose them: add them up first
        slots, gradient = touched_rows(layout, values, rows)
        compact.index_add_(0, slots, gradient.to(compact.dtype), alpha=-rate)


def add_slopes(form: Form, regulariser: float, values: Tensor, gradient: Tensor, lines: Lines) -> bool:
    """Add the gradient of a cohort's step in one pass; False where nothing but autograd serves."""
    if not gpu.available() or not _on_gpu((values, gradient)):
        return False
    served: bool = _gpu_body("cohort", "add_slopes")(form, regulariser, values, gradient, lines)
    return served
