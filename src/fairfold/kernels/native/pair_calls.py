"""What correlations need, in C: sums of pairs, and rows that are read as they are stored.

The specifications are :mod:`fairfold.kernels.reference_pairs` and :mod:`fairfold.kernels.few_bits`.
"""

import struct

import torch
from torch import Tensor

from fairfold.kernels.few_bits import PackedRows
from fairfold.kernels.native.calls import NotServed, serving, settle
from fairfold.kernels.native.packed import REAL_BYTES, threads

_pack_table = struct.Struct("Pqqqq").pack  # fairfold_packed


def pair_sums(items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor, leading: int) -> Tensor:
    """See :func:`.reference_pairs.pair_sums`."""
    loaded = serving(weights)
    items, begins, ends, weights = (of.contiguous() for of in (items.long(), begins.long(), ends.long(), weights))
    total = torch.zeros(leading * (leading + 1) // 2, dtype=weights.dtype)
    code = loaded.fairfold_pair_sums(
        items.data_ptr(), len(items), begins.data_ptr(), ends.data_ptr(), len(weights),
        REAL_BYTES[weights.dtype], weights.data_ptr(), leading, total.data_ptr(), len(total), threads(),
    )  # fmt: skip
    settle(code)
    return total


def packed_products(table: PackedRows, ids: Tensor, vectors: Tensor) -> Tensor:
    """See :func:`.few_bits.packed_products`."""
    loaded, form, ids = serving(vectors), _form(table, vectors), ids.contiguous()
    vectors, found = vectors.contiguous(), vectors.new_empty(len(vectors), len(ids))
    pointers = vectors.data_ptr(), len(vectors), found.data_ptr()
    settle(loaded.fairfold_packed_products(form, ids.data_ptr(), len(ids), *pointers, threads()))
    return found


def packed_sum(table: PackedRows, ids: Tensor, factors: Tensor) -> Tensor:
    """See :func:`.few_bits.packed_sum`."""
    loaded, form, ids = serving(factors), _form(table, factors), ids.contiguous()
    factors, found = factors.contiguous(), factors.new_zeros(table.columns)
    settle(loaded.fairfold_packed_sum(form, ids.data_ptr(), len(ids), factors.data_ptr(), found.data_ptr()))
    return found


def _form(table: PackedRows, beside: Tensor) -> bytes:
    if beside.dtype is not torch.float32 or not table.columns or not table.content.is_contiguous():
        raise NotServed
    return _pack_table(table.content.data_ptr(), table.content.numel(), table.rows, table.columns, table.bits)
