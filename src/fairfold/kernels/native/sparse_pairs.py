"""Calls of the C library for :mod:`fairfold.kernels.sparse_pairs`."""

import ctypes

import torch
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.kernels.native.calls import contiguous_ids, require_integers, require_lengths, require_supported
from fairfold.kernels.native.loader import ID_BYTES, REAL_BYTES, call, library_for, threads


def listed_pair_sums(
    items: Tensor, begins: Tensor, ends: Tensor, weights: Tensor, max_items: int
) -> tuple[Tensor, Tensor]:
    """The pairs that occur in weighted histories: positions in the packed matrix, and sums."""
    loaded = library_for(weights)
    items, begins, ends = contiguous_ids(items, begins, ends)
    weights = weights.contiguous()
    require_lengths(begins, ends, weights)
    histories = items, len(items), begins, ends, len(weights), REAL_BYTES[weights.dtype], weights, max_items
    needed = ctypes.c_int64()
    call(loaded.fairfold_listed_pair_sums, *histories, None, None, 0, ctypes.byref(needed))
    # Memory behind what is found is never touched, and takes no room.
    places, sums = torch.empty(max(1, needed.value), dtype=torch.int64), weights.new_empty(max(1, needed.value))
    found = ctypes.c_int64()
    call(loaded.fairfold_listed_pair_sums, *histories, places, sums, len(places), ctypes.byref(found))
    return places[: found.value], sums[: found.value]


def _contiguous_rows(starts: Tensor, columns: Tensor, values: Tensor) -> list[Tensor]:
    """A matrix by rows as C reads it."""
    require_supported(columns.dim() == 1)
    require_lengths(columns, values)
    return [*contiguous_ids(starts), columns.contiguous(), values.contiguous()]


def symmetric_rows(
    places: Tensor, values: Tensor, rows: int, kind: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix by rows, and its diagonal, from the pairs of its triangle that occur."""
    loaded = library_for(values)
    require_supported(kind in ID_BYTES, dtype in REAL_BYTES)
    (places,), values = contiguous_ids(places), values.contiguous()
    require_lengths(places, values)
    room, found = 2 * len(places), ctypes.c_int64()
    starts, diagonal = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float64)
    columns, numbers = torch.empty(room, dtype=kind), torch.empty(room, dtype=dtype)
    given = places, REAL_BYTES[values.dtype], values, len(places), rows
    into = starts, ID_BYTES[kind], columns, REAL_BYTES[dtype], numbers, room, diagonal
    call(loaded.fairfold_symmetric_rows, *given, *into, ctypes.byref(found))
    return starts, columns[: found.value], numbers[: found.value], diagonal


def strongest(
    starts: Tensor, columns: Tensor, values: Tensor, roots: Tensor, users: Tensor | None, most: int
) -> tuple[Tensor, Tensor]:
    """The strongest columns of every row of a matrix, and their strengths."""
    of_rows = [roots] if users is None else [roots, users]
    loaded = library_for(values, *of_rows)
    require_integers(columns)
    starts, columns, values = _contiguous_rows(starts, columns, values)
    require_lengths(starts, *of_rows)
    weights = [each.contiguous() for each in of_rows]
    found, strengths = torch.empty(len(starts), most, dtype=torch.int64), values.new_empty(len(starts), most)
    matrix = starts, ID_BYTES[columns.dtype], columns, REAL_BYTES[values.dtype], values, len(values), len(starts)
    into = most, found, strengths, found.numel(), threads()
    call(loaded.fairfold_strongest, *matrix, weights[0], weights[1] if len(weights) > 1 else None, *into)
    return found, strengths


def member_blocks(starts: Tensor, columns: Tensor, values: Tensor, members: Tensor) -> Tensor:
    """Blocks of a square matrix around its rows."""
    loaded = library_for(values)
    require_integers(columns, members)
    starts, columns, values = _contiguous_rows(starts, columns, values)
    members = members.long().contiguous()
    if members.dim() != 2 or len(members) != len(starts):
        raise InvalidVector(f"members of shape {tuple(members.shape)}", f"{len(starts)} lists", "Check the shapes.")
    blocks = values.new_empty(*members.shape, members.shape[1])
    matrix = starts, ID_BYTES[columns.dtype], columns, REAL_BYTES[values.dtype], values, len(values), len(starts)
    call(loaded.fairfold_member_blocks, *matrix, members, members.shape[1], blocks, blocks.numel(), threads())
    return blocks
