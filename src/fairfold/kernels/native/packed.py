"""The C forms of what a call reads, made so that no call can outlive them.

They travel as bytes: inside of the argument they belong to, or as an argument itself, which ctypes holds until the call
is over. So a layout may be forgotten here at any time, also while another thread is in a call that reads it.
"""

import struct

import torch
from torch import Tensor

from fairfold.kernels.hashing import Layout

REAL_BYTES = {torch.float32: 4, torch.float64: 8}
ID_BYTES = {torch.int64: 8, torch.int32: 4}

threads = torch.get_num_threads

_pack_layout = struct.Struct("qqqqQq").pack
_pack_rows = struct.Struct("Pqqq").pack
_pack_move = struct.Struct("48sqPqPqqqPq").pack
_layouts: dict[int, tuple[bytes, Layout]] = {}
_MOST_LAYOUTS = 1024


def packed(layout: Layout) -> bytes:
    """The C form (``fairfold_layout``) of a layout.

    Kept by identity, since hashing the dataclass would cost as much as a small lookup; the layout is kept with it, so
    that its identity stays its own.
    """
    known = _layouts.get(id(layout))
    if known is not None:
        return known[0]
    if len(_layouts) >= _MOST_LAYOUTS:
        _layouts.clear()
    form = _pack_layout(layout.full_size, layout.head, layout.tail, layout.chunk, layout.key, layout.signed)
    _layouts[id(layout)] = (form, layout)
    return form


def rows_of(rows: Tensor, row_size: int) -> bytes:
    """The C form (``fairfold_rows``) of a batch of row ids; it points into ``rows`` and does not keep it alive."""
    return _pack_rows(rows.data_ptr(), ID_BYTES[rows.dtype], rows.numel(), row_size)


def moving(layout: Layout, compact: Tensor, rows: Tensor, row_size: int, values: Tensor) -> bytes:
    """The C form (``fairfold_move``) of rows between ``compact`` and ``values``; it keeps neither alive.

    Packed, not a ``ctypes.Structure`` or ten arguments: those take as long as the lookup of a few hundred short rows.
    """
    return _pack_move(
        *(packed(layout), REAL_BYTES[compact.dtype], compact.data_ptr(), compact.numel()),
        *(rows.data_ptr(), ID_BYTES[rows.dtype], rows.numel(), row_size, values.data_ptr(), threads()),
    )
