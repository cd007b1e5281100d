"""Tensors in, C calls out.

Each function here serves the operation of its name in :mod:`fairfold.kernels.reference`, or raises :class:`NotServed`:
the reference body must. Ids and lengths are checked in C before anything is touched.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.kernels.form import Form, Objective, Places, Samples
from fairfold.kernels.hashing import Layout
from fairfold.kernels.native import pages
from fairfold.kernels.native.loader import library
from fairfold.kernels.native.packed import ID_BYTES, REAL_BYTES, moving, packed, rows_of, threads
from fairfold.kernels.reference import bad_rows

_PLAIN = (Tensor, torch.nn.Parameter)
_OK, _BAD_LAYOUT, _BAD_ROW, _BAD_ARGUMENT, _NO_MEMORY, _UNSUPPORTED = range(6)
_FOLD_KIND = {**REAL_BYTES, torch.int32: -4}
_OPTIMISERS = {"sgd": 0, "adagrad": 1, "adam": 2}
_pack_model = struct.Struct("qqqqPqqdqd").pack  # fairfold_model
_pack_client = struct.Struct("PqP4P4P2PqPqqPPq").pack  # fairfold_client


class NotServed(Exception):
    """The compiled body cannot serve these tensors."""


def serving(*tensors: Tensor) -> Any:
    """The library, if it can serve these tensors: plain ones, on the CPU, one real dtype, outside of autograd."""
    loaded = library()
    dtype = tensors[0].dtype
    if loaded is None or dtype not in REAL_BYTES:
        raise NotServed
    for tensor in tensors:
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype is not dtype:
            raise NotServed
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotServed
    return loaded


def _integers(*tensors: Tensor) -> None:
    """See that these are plain int64 or int32 tensors on the CPU."""
    _need(*(type(tensor) in _PLAIN and tensor.is_cpu and tensor.dtype in ID_BYTES for tensor in tensors))


def _serving_integers(*tensors: Tensor) -> Any:
    """The library, if it can serve these."""
    loaded = library()
    _need(loaded is not None)
    _integers(*tensors)
    return loaded


def _need(*conditions: bool) -> None:
    if not all(conditions):
        raise NotServed


def changed(*tensors: Tensor) -> None:
    """Tell autograd that tensors were written to behind its back."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def settle(code: int, layout: Layout | None = None, rows: Tensor | None = None, row_size: int = 1) -> None:
    """See that a call did its work: errors are raised, and what C does not serve is left to the reference."""
    if code == _OK:
        return
    if code == _UNSUPPORTED:
        raise NotServed
    if code == _BAD_ROW and layout is not None and rows is not None:
        raise bad_rows(layout, rows, row_size)
    if code == _NO_MEMORY:
        raise MemoryError("no memory for the kernel's scratch space")
    raise InvalidVector(
        f"tensors that do not fit {layout or 'each other'}",
        "vectors of the layout's sizes, and positions within them",
        "Check their shapes.",
    )


def _batch(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Values and row ids without gaps, and the length of a row."""
    shape = values.shape
    if len(shape) != 2 or rows.dim() != 1 or rows.numel() != shape[0]:
        raise InvalidVector(
            f"values of shape {tuple(shape)} for rows of shape {tuple(rows.shape)}",
            "one line of values per row",
            "Flatten a batch of ids, and its values with it.",
        )
    return values.contiguous(), rows.contiguous(), shape[1]


def slots_and_signs(layout: Layout, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.hashing.slots_and_signs`."""
    loaded = _serving_integers(coordinates)
    flat = coordinates.long().contiguous()
    slots, signs = torch.empty_like(flat), torch.empty_like(flat, dtype=torch.int8)
    code = loaded.fairfold_slots_and_signs(
        packed(layout), flat.data_ptr(), flat.numel(), slots.data_ptr(), signs.data_ptr()
    )
    settle(code, layout, flat.reshape(-1))
    return slots, signs


# -- ranges of the full vector ---------------------------------------------------------------------------------------


def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> None:
    """See :func:`.reference.recover_range`."""
    loaded = serving(compact, out)
    compact = compact.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    pages.in_use(compact)
    code = loaded.fairfold_recover_range(
        packed(layout), REAL_BYTES[compact.dtype], compact.data_ptr(), compact.numel(),
        start, target.numel(), target.data_ptr(), threads(),
    )  # fmt: skip
    settle(code, layout)
    if target is out:
        changed(out)
    else:
        out.copy_(target)


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> None:
    """See :func:`.reference.accumulate_range`."""
    loaded = serving(sums, values)
    _need(sums.is_contiguous(), counts is None or _are_counts(counts, sums.numel()))
    values = values.contiguous()
    pages.in_use(sums)
    code = loaded.fairfold_accumulate_range(
        packed(layout), REAL_BYTES[sums.dtype], values.data_ptr(), start, values.numel(),
        sums.data_ptr(), None if counts is None else counts.data_ptr(), sums.numel(), threads(),
    )  # fmt: skip
    settle(code, layout)
    changed(sums, *([] if counts is None else [counts]))


def reduce(layout: Layout, full: Tensor) -> Tensor:
    """See :func:`.reference.reduce`."""
    loaded = serving(full)
    if full.shape != (layout.full_size,):
        settle(_BAD_ARGUMENT, layout)
    compact = torch.empty(layout.size, dtype=full.dtype)
    pages.before_first_touch(compact)
    full = full.contiguous()
    code = loaded.fairfold_reduce(
        packed(layout), REAL_BYTES[full.dtype], full.data_ptr(), compact.data_ptr(), compact.numel(), threads()
    )
    settle(code, layout)
    return compact


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> None:
    """See :func:`.reference.count_range`."""
    loaded = _serving_integers(counts)
    _need(_are_counts(counts, counts.numel()))
    code = loaded.fairfold_count_range(
        packed(layout), start, stop - start, counts.data_ptr(), counts.numel(), threads()
    )
    settle(code, layout)
    changed(counts)


def _are_counts(counts: Tensor, size: int) -> bool:
    plain = type(counts) is Tensor and counts.is_cpu and counts.dtype is torch.int32
    return plain and counts.is_contiguous() and counts.numel() == size


def fold_groups(values: Tensor, repeats: int, chunk: int) -> Tensor:
    """See :func:`.reference.fold_groups`."""
    loaded = _serving_integers(values) if values.dtype is torch.int32 else serving(values)
    _need(values.numel() % (repeats * chunk) == 0)
    values = values.contiguous()
    out = torch.empty(values.numel() // repeats, dtype=values.dtype)
    code = loaded.fairfold_fold_groups(
        _FOLD_KIND[values.dtype], values.data_ptr(), values.numel(), repeats, chunk,
        out.data_ptr(), out.numel(), threads(),
    )  # fmt: skip
    settle(code)
    return out


def unfold_groups(values: Tensor, repeats: int, chunk: int, out: Tensor) -> None:
    """See :func:`.reference.unfold_groups`."""
    loaded = serving(values, out)
    _need(out.is_contiguous())
    values, add = values.contiguous(), 0
    code = loaded.fairfold_unfold_groups(
        REAL_BYTES[values.dtype], values.data_ptr(), values.numel(), repeats, chunk,
        out.data_ptr(), out.numel(), add, threads(),
    )  # fmt: skip
    settle(code)
    changed(out)


# -- rows of a table -------------------------------------------------------------------------------------------------


def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
    """See :func:`.reference.recover_rows`."""
    loaded = serving(compact)
    _integers(rows)
    compact, rows = compact.contiguous(), rows.contiguous()
    pages.in_use(compact)
    out = compact.new_empty(rows.numel(), row_size)  # sizes one by one: torch reads a tuple of them half as fast
    settle(loaded.fairfold_recover_rows(moving(layout, compact, rows, row_size, out)), layout, rows, row_size)
    return out


def accumulate_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor, scale: float = 1.0) -> None:
    """See :func:`.reference.accumulate_rows`."""
    loaded = serving(sums, values)
    _integers(rows)
    _need(sums.is_contiguous())
    values, rows, row_size = _batch(values, rows)
    pages.in_use(sums)
    code = loaded.fairfold_accumulate_rows(moving(layout, sums, rows, row_size, values), scale)
    settle(code, layout, rows, row_size)
    changed(sums)


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.reference.touched_rows`."""
    loaded = serving(values)
    _integers(rows)
    values, rows, row_size = _batch(values, rows)
    slots, sums = torch.empty(values.numel(), dtype=torch.int64), torch.empty(values.numel(), dtype=values.dtype)
    touched = ctypes.c_int64()
    code = loaded.fairfold_touched_rows(
        packed(layout), REAL_BYTES[values.dtype], values.data_ptr(), rows_of(rows, row_size),
        slots.data_ptr(), sums.data_ptr(), slots.numel(), ctypes.byref(touched),
    )  # fmt: skip
    settle(code, layout, rows, row_size)
    return _trimmed(slots, touched.value), _trimmed(sums, touched.value)


def _trimmed(buffer: Tensor, length: int) -> Tensor:
    """The used start of a buffer; copied where much of the buffer would be kept alive for nothing."""
    used = buffer[:length]
    return used if length * 2 > len(buffer) else used.clone()


# -- the active slots of a round -------------------------------------------------------------------------------------


def number(keys: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.reference.number`."""
    loaded = _serving_integers(keys)
    flat, found = keys.long().contiguous(), ctypes.c_int64()
    numbers, distinct = torch.empty_like(flat, dtype=torch.int32), torch.empty_like(flat).view(-1)
    pointers = numbers.data_ptr(), distinct.data_ptr(), ctypes.byref(found)
    settle(loaded.fairfold_number(flat.data_ptr(), flat.numel(), *pointers))
    return numbers, distinct[: found.value]


def _indexed(found: Tensor, signs: Tensor) -> bool:
    """Whether positions and signs are as C takes them."""
    right = found.dtype is torch.int32 and signs.dtype is torch.int8 and found.shape == signs.shape
    return right and found.is_cpu and signs.is_cpu


def recover_positions(source: Tensor, found: Tensor, signs: Tensor) -> Tensor:
    """See :func:`.reference.recover_positions`."""
    loaded = serving(source)
    _need(_indexed(found, signs))
    source, found, signs = source.contiguous(), found.contiguous(), signs.contiguous()
    out = torch.empty(found.shape, dtype=source.dtype)
    code = loaded.fairfold_recover_positions(
        REAL_BYTES[source.dtype], source.data_ptr(), source.numel(), found.data_ptr(), signs.data_ptr(),
        found.numel(), out.data_ptr(), threads(),
    )  # fmt: skip
    settle(code)
    return out


def accumulate_positions(values: Tensor, found: Tensor, signs: Tensor, sums: Tensor) -> None:
    """See :func:`.reference.accumulate_positions`."""
    loaded = serving(sums, values)
    _need(_indexed(found, signs), values.shape == found.shape, sums.is_contiguous())
    values, found, signs = values.contiguous(), found.contiguous(), signs.contiguous()
    code = loaded.fairfold_accumulate_positions(
        REAL_BYTES[sums.dtype], values.data_ptr(), found.data_ptr(), signs.data_ptr(),
        found.numel(), sums.data_ptr(), sums.numel(),
    )  # fmt: skip
    settle(code)
    changed(sums)


# -- a client's whole round in one call: the specification is backends/stepped.py --------------------------------------


def train(
    form: Form,
    objective: Objective,
    values: Tensor,
    pull: Tensor | None,
    items: Sequence[Places],
    users: Sequence[Places],
    dense: Places,
    samples: Samples,
) -> None:
    """Train ``values``, all that the client trains, in place; raises :class:`NotServed` where C cannot.

    ``pull`` is a weight a value that draws it to where it started. ``items`` ([rows, columns] each) and ``users``
    ([columns]) are those that the form has, in its order; ``dense`` has all dense tensors, one after another.
    """
    loaded = serving(*(tensor for tensor in (values, pull, samples.targets) if tensor is not None))
    _need(values.is_contiguous())
    kept: list[Tensor] = []

    def address(tensor: Tensor | None, dtype: torch.dtype) -> int:
        if tensor is None:
            return 0
        kept.append(tensor.to(dtype).contiguous())
        return kept[-1].data_ptr()

    def places(found: Places) -> tuple[int, int]:
        return address(found.positions, torch.int32), address(found.signs, torch.int8)

    def both(found: Sequence[Places]) -> list[int]:
        """Of the product branch and of the network, 0 for one that the form has not."""
        rest = iter(found)
        branches = [places(next(rest)) if has else (0, 0) for has in (form.product > 0, bool(form.layers))]
        return [pointer for branch in branches for pointer in branch]

    model = _pack_model(
        *(form.product, form.user, form.item, len(form.layers), address(torch.tensor(form.layers), torch.int64)),
        *(form.output, objective.rating, objective.regulariser, _OPTIMISERS[objective.optimiser], objective.rate),
    )
    client = _pack_client(
        *(values.data_ptr(), values.numel(), address(pull, values.dtype)),
        *(*both(items), *both(users), *places(dense), len(items[0].positions)),
        *(address(samples.rows, torch.int32), *samples.rows.shape, address(samples.targets, values.dtype)),
        *(address(samples.ends, torch.int64), samples.ends.numel()),
    )
    settle(loaded.fairfold_train(model, REAL_BYTES[values.dtype], client))
    changed(values)
