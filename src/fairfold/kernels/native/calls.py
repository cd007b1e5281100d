"""Calls of the C library with tensors.

Each function computes the operation of its name in :mod:`fairfold.kernels.reference`, or raises ``NotSupported``:
then plain torch must. Ids and lengths are checked in C before anything is touched.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.kernels.hashing import Layout
from fairfold.kernels.native import loader
from fairfold.kernels.native.loader import (
    BAD_ARGUMENT,
    ID_BYTES,
    PLAIN,
    REAL_BYTES,
    NotSupported,
    call,
    check_result,
    library,
    library_for,
    pack_layout,
    pack_move,
    pack_rows,
    threads,
)
from fairfold.kernels.reference import PackedRows
from fairfold.kernels.training import LocalSamples, ModelForm, Objective, SignedPositions

_FOLD_KIND = {**REAL_BYTES, torch.int32: -4}
_LOSSES = {"bpr": 0, "ratings": 1, "softmax": 2}
_OPTIMIZERS = {"sgd": 0, "adagrad": 1, "adam": 2}
_pack_model = struct.Struct("qqqqPqqdqd").pack  # fairfold_model
_pack_table = struct.Struct("Pqqqq").pack  # fairfold_packed
_pack_client = struct.Struct("PqP4P4P2PqPqqPPq").pack  # fairfold_client


def _library_for_integers(*tensors: Tensor) -> Any:
    loaded = library()
    require_supported(loaded is not None)
    require_integers(*tensors)
    return loaded


def require_integers(*tensors: Tensor) -> None:
    """Raise unless these are plain int64 or int32 tensors on the CPU."""
    require_supported(*(type(tensor) in PLAIN and tensor.is_cpu and tensor.dtype in ID_BYTES for tensor in tensors))


def contiguous_ids(*tensors: Tensor) -> list[Tensor]:
    """Lists of ids as C reads them: contiguous, of 64 bits."""
    require_integers(*tensors)
    require_supported(*(tensor.dim() == 1 for tensor in tensors))
    return [tensor.long().contiguous() for tensor in tensors]


def require_lengths(*tensors: Tensor) -> None:
    """Refuse lists of different lengths: C takes one length for all."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise InvalidVector(f"tensors of shapes {shapes}", "lists of one length", "Check their shapes.")


def require_supported(*conditions: bool) -> None:
    """Raise ``NotSupported`` unless all of these hold."""
    if not all(conditions):
        raise NotSupported


def mark_changed(*tensors: Tensor) -> None:
    """Mark tensors as modified in place, for autograd."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _contiguous_batch(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Values and row ids, contiguous, and the length of a row."""
    shape = values.shape
    if len(shape) != 2 or rows.dim() != 1 or rows.numel() != shape[0]:
        given = f"values of shape {tuple(shape)} for rows of shape {tuple(rows.shape)}"
        raise InvalidVector(given, "one line of values per row", "Flatten a batch of ids, and its values with it.")
    return values.contiguous(), rows.contiguous(), shape[1]


def slots_and_signs(layout: Layout, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """The slot and sign of each coordinate, by the hash."""
    loaded = _library_for_integers(coordinates)
    flat = coordinates.long().contiguous()
    slots, signs = torch.empty_like(flat), torch.empty_like(flat, dtype=torch.int8)
    arguments = pack_layout(layout), flat, flat.numel(), slots, signs
    call(loaded.fairfold_slots_and_signs, *arguments, layout=layout, rows=flat.reshape(-1))
    return slots, signs


# -- ranges of the full vector ---------------------------------------------------------------------------------------
def recover_range(layout: Layout, compact: Tensor, start: int, out: Tensor) -> None:
    """Write the values of a range of coordinates."""
    loaded = library_for(compact, out)
    compact = compact.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    loader.use_huge_pages(compact)
    source = pack_layout(layout), REAL_BYTES[compact.dtype], compact, compact.numel()
    call(loaded.fairfold_recover_range, *source, start, target.numel(), target, threads(), layout=layout)
    if target is out:
        mark_changed(out)
    else:
        out.copy_(target)


def accumulate_range(layout: Layout, values: Tensor, start: int, sums: Tensor, counts: Tensor | None = None) -> None:
    """Add the signed values of a range of coordinates into their slots."""
    loaded = library_for(sums, values)
    require_supported(sums.is_contiguous(), counts is None or _are_counts(counts, sums.numel()))
    values = values.contiguous()
    loader.use_huge_pages(sums)
    source = pack_layout(layout), REAL_BYTES[sums.dtype], values, start, values.numel()
    call(loaded.fairfold_accumulate_range, *source, sums, counts, sums.numel(), threads(), layout=layout)
    mark_changed(sums, *([] if counts is None else [counts]))


def reduce(layout: Layout, full: Tensor) -> Tensor:
    """The signed mean of each slot."""
    loaded = library_for(full)
    if full.shape != (layout.full_size,):
        check_result(BAD_ARGUMENT, layout)
    compact = torch.empty(layout.size, dtype=full.dtype)
    loader.use_huge_pages_for_new(compact)
    full = full.contiguous()
    source = pack_layout(layout), REAL_BYTES[full.dtype], full
    call(loaded.fairfold_reduce, *source, compact, compact.numel(), threads(), layout=layout)
    return compact


def count_range(layout: Layout, start: int, stop: int, counts: Tensor) -> None:
    """Count the coordinates of a range in each slot."""
    loaded = _library_for_integers(counts)
    require_supported(_are_counts(counts, counts.numel()))
    source = pack_layout(layout), start, stop - start
    call(loaded.fairfold_count_range, *source, counts, counts.numel(), threads(), layout=layout)
    mark_changed(counts)


def _are_counts(counts: Tensor, size: int) -> bool:
    plain = type(counts) is Tensor and counts.is_cpu and counts.dtype is torch.int32
    return plain and counts.is_contiguous() and counts.numel() == size


def fold_groups(values: Tensor, repeats: int, chunk: int) -> Tensor:
    """The slots of a larger size, summed to those of a smaller."""
    loaded = _library_for_integers(values) if values.dtype is torch.int32 else library_for(values)
    require_supported(values.numel() % (repeats * chunk) == 0)
    values = values.contiguous()
    out = torch.empty(values.numel() // repeats, dtype=values.dtype)
    sizes = values.numel(), repeats, chunk
    call(loaded.fairfold_fold_groups, _FOLD_KIND[values.dtype], values, *sizes, out, out.numel(), threads())
    return out


def unfold_groups(values: Tensor, repeats: int, chunk: int, out: Tensor) -> None:
    """The slots of a smaller size, repeated to those of a larger."""
    loaded = library_for(values, out)
    require_supported(out.is_contiguous())
    values = values.contiguous()
    source, add = (REAL_BYTES[values.dtype], values, values.numel()), 0
    call(loaded.fairfold_unfold_groups, *source, repeats, chunk, out, out.numel(), add, threads())
    mark_changed(out)


# -- rows of a table -------------------------------------------------------------------------------------------------
def recover_rows(layout: Layout, compact: Tensor, rows: Tensor, row_size: int) -> Tensor:
    """The values of chosen rows of a table, recovered from its compact vector."""
    loaded = library_for(compact)
    require_integers(rows)
    compact, rows = compact.contiguous(), rows.contiguous()
    loader.use_huge_pages(compact)
    out = compact.new_empty(rows.numel(), row_size)  # sizes one by one: torch reads a tuple of them half as fast
    check_result(loaded.fairfold_recover_rows(pack_move(layout, compact, rows, row_size, out)), layout, rows, row_size)
    return out


def accumulate_rows(layout: Layout, values: Tensor, rows: Tensor, sums: Tensor, scale: float = 1.0) -> None:
    """Add the signed values of chosen rows, times ``scale``, into their slots."""
    loaded = library_for(sums, values)
    require_integers(rows)
    require_supported(sums.is_contiguous())
    values, rows, row_size = _contiguous_batch(values, rows)
    loader.use_huge_pages(sums)
    code = loaded.fairfold_accumulate_rows(pack_move(layout, sums, rows, row_size, values), scale)
    check_result(code, layout, rows, row_size)
    mark_changed(sums)


def touched_rows(layout: Layout, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The touched slots of a batch of rows, and their sums."""
    loaded = library_for(values)
    require_integers(rows)
    values, rows, row_size = _contiguous_batch(values, rows)
    slots, sums = (torch.empty(values.numel(), dtype=dtype) for dtype in (torch.int64, values.dtype))
    count = ctypes.c_int64()
    source = pack_layout(layout), REAL_BYTES[values.dtype], values, pack_rows(rows, row_size)
    results = slots, sums, slots.numel(), ctypes.byref(count)
    call(loaded.fairfold_touched_rows, *source, *results, layout=layout, rows=rows, row_size=row_size)
    return _trimmed_copy(slots, count.value), _trimmed_copy(sums, count.value)


def _trimmed_copy(buffer: Tensor, length: int) -> Tensor:
    """The used start of a buffer; copied where it would keep a much larger buffer alive."""
    return buffer[:length] if length * 2 > len(buffer) else buffer[:length].clone()


# -- the active slots of a round -------------------------------------------------------------------------------------
def factorize(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of keys in the order of their first appearance, and the distinct keys."""
    loaded = _library_for_integers(keys)
    flat, count = keys.long().contiguous(), ctypes.c_int64()
    numbers, distinct = torch.empty_like(flat, dtype=torch.int32), torch.empty_like(flat).view(-1)
    call(loaded.fairfold_number, flat, flat.numel(), numbers, distinct, ctypes.byref(count))
    return numbers, distinct[: count.value]


def _are_positions(positions: Tensor, signs: Tensor) -> bool:
    right = positions.dtype is torch.int32 and signs.dtype is torch.int8 and positions.shape == signs.shape
    return right and positions.is_cpu and signs.is_cpu


def recover_positions(source: Tensor, positions: Tensor, signs: Tensor) -> Tensor:
    """Signed values at positions of a vector."""
    loaded = library_for(source)
    require_supported(_are_positions(positions, signs))
    source, positions, signs = source.contiguous(), positions.contiguous(), signs.contiguous()
    out = torch.empty(positions.shape, dtype=source.dtype)
    vector = REAL_BYTES[source.dtype], source, source.numel()
    call(loaded.fairfold_recover_positions, *vector, positions, signs, positions.numel(), out, threads())
    return out


def accumulate_positions(values: Tensor, positions: Tensor, signs: Tensor, sums: Tensor) -> None:
    """Add signed values at positions of a vector."""
    loaded = library_for(sums, values)
    require_supported(_are_positions(positions, signs), values.shape == positions.shape, sums.is_contiguous())
    values, positions, signs = values.contiguous(), positions.contiguous(), signs.contiguous()
    signed = values, positions, signs, positions.numel()
    call(loaded.fairfold_accumulate_positions, REAL_BYTES[sums.dtype], *signed, sums, sums.numel())
    mark_changed(sums)


# -- a client's whole round in one call: the specification is backends/active_set.py -----------------------------------
def train_client(
    form: ModelForm,
    objective: Objective,
    values: Tensor,
    prox_weights: Tensor | None,
    items: Sequence[SignedPositions],
    users: Sequence[SignedPositions],
    dense: SignedPositions,
    samples: LocalSamples,
) -> None:
    """Take all gradient steps of a client's round on ``values``, in place; ``prox_weights`` pull to where each started.

    ``items`` ([rows, columns]) and ``users`` ([columns]) are those of the form's branches; ``dense`` has all tensors.
    """
    loaded = library_for(*(tensor for tensor in (values, prox_weights, samples.targets) if tensor is not None))
    require_supported(values.is_contiguous())
    alive: list[Tensor] = []  # until the call is over

    def address(tensor: Tensor | None, dtype: torch.dtype) -> int:
        if tensor is None:
            return 0
        alive.append(tensor.to(dtype).contiguous())
        return alive[-1].data_ptr()

    def addresses(signed: SignedPositions) -> tuple[int, int]:
        return address(signed.positions, torch.int32), address(signed.signs, torch.int8)

    def of_branches(signed: Sequence[SignedPositions]) -> list[int]:
        """Addresses for the product branch and the network, 0 for a branch that the form does not have."""
        rest = iter(signed)
        branches = [addresses(next(rest)) if has else (0, 0) for has in (form.product > 0, bool(form.layers))]
        return [pointer for branch in branches for pointer in branch]

    model = _pack_model(
        *(form.product, form.user, form.item, len(form.layers), address(torch.tensor(form.layers), torch.int64)),
        *(form.output, _LOSSES[objective.loss], objective.l2, _OPTIMIZERS[objective.optimizer], objective.lr),
    )
    client = _pack_client(
        *(values.data_ptr(), values.numel(), address(prox_weights, values.dtype)),
        *(*of_branches(items), *of_branches(users), *addresses(dense), len(items[0].positions)),
        *(address(samples.rows, torch.int32), *samples.rows.shape, address(samples.targets, values.dtype)),
        *(address(samples.ends, torch.int64), samples.ends.numel()),
    )
    check_result(loaded.fairfold_train(model, REAL_BYTES[values.dtype], client))
    mark_changed(values)


def pair_sums(items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor, max_items: int) -> Tensor:
    """The packed co-occurrence matrix of weighted histories."""
    loaded = library_for(weights)
    items, begins, ends = contiguous_ids(items, begins, ends)
    weights = weights.contiguous()
    require_lengths(begins, ends, weights)
    total = torch.zeros(max_items * (max_items + 1) // 2, dtype=weights.dtype)
    histories = items, len(items), begins, ends, len(weights), REAL_BYTES[weights.dtype], weights
    call(loaded.fairfold_pair_sums, *histories, max_items, total, len(total), threads())
    return total


def packed_products(table: PackedRows, ids: Tensor, vectors: Tensor) -> Tensor:
    """Products of vectors with chosen rows, [vectors, rows]."""
    loaded, packed = library_for(vectors), _packed_table(table, vectors)
    (ids,), vectors = contiguous_ids(ids), vectors.contiguous()
    if vectors.shape != (len(vectors), table.columns):
        raise InvalidVector(f"vectors of shape {tuple(vectors.shape)}", f"{table.columns} columns", "Check the shapes.")
    out = vectors.new_empty(len(vectors), len(ids))
    call(loaded.fairfold_packed_products, packed, ids, len(ids), vectors, len(vectors), out, threads())
    return out


def packed_sum(table: PackedRows, ids: Tensor, factors: Tensor) -> Tensor:
    """The sum of chosen rows, each times its factor."""
    loaded, packed = library_for(factors), _packed_table(table, factors)
    (ids,), factors = contiguous_ids(ids), factors.contiguous()
    require_lengths(ids, factors)
    out = factors.new_zeros(table.columns)
    call(loaded.fairfold_packed_sum, packed, ids, len(ids), factors, out)
    return out


def _packed_table(table: PackedRows, operand: Tensor) -> bytes:
    content = table.content
    require_supported(operand.dtype is torch.float32, operand.dim() > 0, table.columns > 0)
    require_supported(type(content) is Tensor, content.is_cpu, content.dtype is torch.uint8, content.is_contiguous())
    return _pack_table(table.content.data_ptr(), table.content.numel(), table.rows, table.columns, table.bits)
