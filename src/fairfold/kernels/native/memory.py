"""Memory as C sees it: structures packed to bytes, and large vectors on huge pages.

Packed structures travel as bytes, which ctypes holds until the call is over. So the cache of layouts may be cleared at
any time, also while another thread is in a call.

Scatters and gathers over hundreds of megabytes wait for the page table. Linux backs memory with 2 MiB pages where it is
asked to (``madvise``): before the first touch at no cost, later by moving it. Elsewhere nothing happens.
"""

import ctypes
import struct
import sys
from collections import OrderedDict

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
_MAX_LAYOUTS = 1024


def pack_layout(layout: Layout) -> bytes:
    """A layout as C's ``fairfold_layout``."""
    # Cached by identity, as hashing the dataclass would cost as much as a small lookup; the layout is stored beside, so
    # that its identity stays its own.
    known = _layouts.get(id(layout))
    if known is not None:
        return known[0]
    if len(_layouts) >= _MAX_LAYOUTS:
        _layouts.clear()
    packed = _pack_layout(layout.full_size, layout.head, layout.tail, layout.chunk, layout.key, layout.signed)
    _layouts[id(layout)] = (packed, layout)
    return packed


def pack_rows(rows: Tensor, row_size: int) -> bytes:
    """A batch of row ids as C's ``fairfold_rows``, which points into ``rows`` and does not keep it alive."""
    return _pack_rows(rows.data_ptr(), ID_BYTES[rows.dtype], rows.numel(), row_size)


def pack_move(layout: Layout, compact: Tensor, rows: Tensor, row_size: int, values: Tensor) -> bytes:
    """Rows to move between ``compact`` and ``values`` as C's ``fairfold_move``, which keeps neither alive.

    Packed, not a ``ctypes.Structure`` or ten arguments: those take as long as the lookup of a few hundred short rows.
    """
    return _pack_move(
        *(pack_layout(layout), REAL_BYTES[compact.dtype], compact.data_ptr(), compact.numel()),
        *(rows.data_ptr(), ID_BYTES[rows.dtype], rows.numel(), row_size, values.data_ptr(), threads()),
    )


MIN_HUGE_BYTES = 8 * 2**20  # smaller vectors are left alone: the page table of so little memory stays in cache

_PAGE = 2**21
_HUGEPAGE, _COLLAPSE = 14, 25
_MAX_ADVISED = 64

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_advised: OrderedDict[tuple[int, int], None] = OrderedDict()


def use_huge_pages_for_new(tensor: Tensor) -> None:
    """Ask for huge pages under a vector that has just been allocated."""
    if tensor.nbytes >= MIN_HUGE_BYTES:
        _advise(tensor, _HUGEPAGE)


def use_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under a vector in use, once for each vector."""
    if tensor.nbytes < MIN_HUGE_BYTES:
        return
    key = (tensor.data_ptr(), tensor.nbytes)
    if key in _advised:
        return
    _advised[key] = None
    if len(_advised) > _MAX_ADVISED:
        _advised.popitem(last=False)
    _advise(tensor, _HUGEPAGE)
    _advise(tensor, _COLLAPSE)


def _advise(tensor: Tensor, advice: int) -> None:
    if _libc is None:
        return
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
    if last > first:  # a refusal is no error
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
