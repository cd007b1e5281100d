"""Large vectors on large pages: what a scatter or gather over hundreds of megabytes waits for is the page table.

Linux backs memory with 2 MiB pages where it is asked to (``madvise``). Asked before the first touch it costs nothing;
memory in use is moved at once, in a few milliseconds, by newer kernels, and in the background by older ones. Elsewhere
nothing happens. The numbers do not change.
"""

import ctypes
import sys
from collections import OrderedDict

from torch import Tensor

LEAST_BYTES = 8 * 2**20
"""Vectors smaller than this are left alone: the page table of so little memory stays in cache."""

_PAGE = 2**21
_HUGEPAGE, _COLLAPSE = 14, 25
_REMEMBERED = 64

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_moved: OrderedDict[tuple[int, int], None] = OrderedDict()


def before_first_touch(tensor: Tensor) -> None:
    """Ask for large pages under a vector that has just been allocated."""
    if tensor.nbytes >= LEAST_BYTES:
        _advise(tensor, _HUGEPAGE)


def in_use(tensor: Tensor) -> None:
    """Ask for large pages under a vector that will be read or written all over, once for each vector."""
    size = tensor.nbytes
    if size < LEAST_BYTES:
        return
    key = (tensor.data_ptr(), size)
    if key in _moved:
        return
    _moved[key] = None
    if len(_moved) > _REMEMBERED:
        _moved.popitem(last=False)
    _advise(tensor, _HUGEPAGE)
    _advise(tensor, _COLLAPSE)


def _advise(tensor: Tensor, advice: int) -> None:
    if _libc is None:
        return
    start, size = tensor.data_ptr(), tensor.nbytes
    first = -(-start // _PAGE) * _PAGE
    last = (start + size) // _PAGE * _PAGE
    if last > first:  # a refusal is no error: the advice is only a wish
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
