"""The operations that other packages call, each by the fastest body that supports its tensors.

The C library serves float32 and float64 tensors on the CPU, and Triton those on a CUDA device; everything else, and
every tensor that autograd follows, goes to the specification. All give the same slots and signs, and the same values up
to the order of a sum. Lengths and dtypes are the caller's to check. A row id on the CPU that the table does not have
raises :class:`~fairfold.errors.InvalidRow` before anything is written.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fairfold.kernels import gpu, hashing, reference, sparse_pairs, training
from fairfold.kernels.hashing import Layout
from fairfold.kernels.native import calls
from fairfold.kernels.native import sparse_pairs as sparse_calls
from fairfold.kernels.native.loader import NotSupported
from fairfold.kernels.training import LookupBuffers, ModelForm

P = ParamSpec("P")
R = TypeVar("R")


@cache
def _gpu_body(module: str, name: str) -> Any:
    return getattr(import_module(f"fairfold.kernels.gpu.{module}"), name)  # imports Triton, so only where it is there


def _on_gpu(arguments: tuple[Any, ...]) -> bool:
    """Whether Triton supports these arguments: on a CUDA device, and not followed by autograd."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not followed and any(tensor.is_cuda for tensor in tensors)


def _dispatched(
    specification: Callable[P, R], native: Callable[P, R] | None = None, gpu_module: str | None = None
) -> Callable[P, R]:
    """The operation, dispatched to the body of its name in a module of ``gpu``, to C, or to the specification."""
    name = specification.__name__

    @wraps(specification)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        if gpu_module is not None and gpu.available() and _on_gpu(args):
            result: R = _gpu_body(gpu_module, name)(*args, **kwargs)
            return result
        if native is not None:
            try:
                return native(*args, **kwargs)
            except NotSupported:
                pass
        return specification(*args, **kwargs)

    return dispatch


slots_and_signs = _dispatched(hashing.slots_and_signs, calls.slots_and_signs, "calls")
accumulate_range = _dispatched(reference.accumulate_range, calls.accumulate_range, "calls")
reduce = _dispatched(reference.reduce, calls.reduce, "calls")
count_range = _dispatched(reference.count_range, calls.count_range, "calls")
recover_range = _dispatched(reference.recover_range, calls.recover_range, "calls")
recover_rows = _dispatched(reference.recover_rows, calls.recover_rows, "calls")
accumulate_rows = _dispatched(reference.accumulate_rows, calls.accumulate_rows, "calls")
touched_rows = _dispatched(reference.touched_rows, calls.touched_rows, "calls")
fold_groups = _dispatched(reference.fold_groups, calls.fold_groups)
unfold_groups = _dispatched(reference.unfold_groups, calls.unfold_groups)
factorize = _dispatched(reference.factorize, calls.factorize)
recover_positions = _dispatched(reference.recover_positions, calls.recover_positions)
accumulate_positions = _dispatched(reference.accumulate_positions, calls.accumulate_positions)
pair_sums = _dispatched(reference.pair_sums, calls.pair_sums)
listed_pair_sums = _dispatched(sparse_pairs.listed_pair_sums, sparse_calls.listed_pair_sums)
symmetric_rows = _dispatched(sparse_pairs.symmetric_rows, sparse_calls.symmetric_rows)
strongest = _dispatched(sparse_pairs.strongest, sparse_calls.strongest)
member_blocks = _dispatched(sparse_pairs.member_blocks, sparse_calls.member_blocks)
packed_products = _dispatched(reference.packed_products, calls.packed_products)
packed_sum = _dispatched(reference.packed_sum, calls.packed_sum)
recover_lines = _dispatched(reference.recover_lines, None, "training")
accumulate_lines = _dispatched(reference.accumulate_lines, None, "training")
step_prefix = torch.no_grad()(_dispatched(reference.step_prefix, None, "training"))
step_slots = torch.no_grad()(_dispatched(training.step_slots, None, "training"))


def sgd_rows(layout: Layout, compact: Tensor, values: Tensor, rows: Tensor, lr: float) -> None:
    """Take a step of SGD in place, autograd being off: compact[slot] -= lr · (sum of the signed ``values`` in it)."""
    if compact.dtype in (torch.float32, torch.float64):
        accumulate_rows(layout, values, rows, compact, -lr)
    else:  # adding many small steps to a short type would lose them: add them up first
        slots, gradient = touched_rows(layout, values, rows)
        compact.index_add_(0, slots, gradient.to(compact.dtype), alpha=-lr)


def add_gradients(form: ModelForm, l2: float, values: Tensor, gradient: Tensor, lookups: LookupBuffers) -> bool:
    """Add the gradient of a cohort's step in one pass on a GPU; False where only autograd can."""
    if not gpu.available() or not _on_gpu((values, gradient)):
        return False
    done: bool = _gpu_body("training", "add_gradients")(form, l2, values, gradient, lookups)
    return done
