"""Calls of the C library for co-occurrence; the specifications are in :mod:`fairfold.kernels.cooccurrence`."""

import struct

import torch
from torch import Tensor

from fairfold.kernels.cooccurrence import PackedRows
from fairfold.kernels.native.calls import NotSupported, call, library_for
from fairfold.kernels.native.memory import REAL_BYTES, threads

_pack_table = struct.Struct("Pqqqq").pack  # fairfold_packed


def pair_sums(items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor, max_items: int) -> Tensor:
    """The packed co-occurrence matrix of weighted histories."""
    loaded = library_for(weights)
    items, begins, ends = (each.long().contiguous() for each in (items, begins, ends))
    weights = weights.contiguous()
    total = torch.zeros(max_items * (max_items + 1) // 2, dtype=weights.dtype)
    call(
        loaded.fairfold_pair_sums, items, len(items), begins, ends, len(weights),
        REAL_BYTES[weights.dtype], weights, max_items, total, len(total), threads(),
    )  # fmt: skip
    return total


def packed_products(table: PackedRows, ids: Tensor, vectors: Tensor) -> Tensor:
    """Products of vectors with chosen rows, [vectors, rows]."""
    loaded, packed = library_for(vectors), _pack(table, vectors)
    ids, vectors = ids.contiguous(), vectors.contiguous()
    out = vectors.new_empty(len(vectors), len(ids))
    call(loaded.fairfold_packed_products, packed, ids, len(ids), vectors, len(vectors), out, threads())
    return out


def packed_sum(table: PackedRows, ids: Tensor, factors: Tensor) -> Tensor:
    """The sum of chosen rows, each times its factor."""
    loaded, packed = library_for(factors), _pack(table, factors)
    ids, factors = ids.contiguous(), factors.contiguous()
    out = factors.new_zeros(table.columns)
    call(loaded.fairfold_packed_sum, packed, ids, len(ids), factors, out)
    return out


def _pack(table: PackedRows, operand: Tensor) -> bytes:
    if operand.dtype is not torch.float32 or not table.columns or not table.content.is_contiguous():
        raise NotSupported
    return _pack_table(table.content.data_ptr(), table.content.numel(), table.rows, table.columns, table.bits)
