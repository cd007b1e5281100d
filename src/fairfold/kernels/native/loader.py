"""The compiled library: find and load it, pack what C reads, and check what it returns.

Packed structures travel as bytes, which ctypes holds until the call is over. So the cache of layouts may be cleared at
any time, also while another thread is in a call.

Scatters and gathers over hundreds of megabytes wait for the page table. Linux backs memory with 2 MiB pages where it is
asked to (``madvise``): before the first touch at no cost, later by moving it. Elsewhere nothing happens.
"""

import ctypes
import logging
import os
import struct
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch  # loaded before our library, which then shares the OpenMP threads that torch has
from torch import Tensor

import fairfold.kernels.native as package
from fairfold.errors import InvalidVector
from fairfold.kernels.hashing import Layout
from fairfold.kernels.reference import bad_rows

ABI = 10  # what native/fairfold.h calls FAIRFOLD_ABI: a library of another number is not called

_NAME = "fairfold_native.so"
_SWITCH = "FAIRFOLD_NATIVE"
_log = logging.getLogger("fairfold")

_pointer, _int, _long, _double = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_packed = ctypes.c_char_p  # a structure as bytes
_SIGNATURES: dict[str, list[type]] = {
    "slots_and_signs": [_pointer, _pointer, _long, _pointer, _pointer],
    "recover_rows": [_packed],
    "recover_range": [_pointer, _int, _pointer, _long, _long, _long, _pointer, _int],
    "accumulate_rows": [_packed, _double],
    "accumulate_range": [_pointer, _int, _pointer, _long, _long, _pointer, _pointer, _long, _int],
    "count_range": [_pointer, _long, _long, _pointer, _long, _int],
    "reduce": [_pointer, _int, _pointer, _pointer, _long, _int],
    "touched_rows": [_pointer, _int, _pointer, _pointer, _pointer, _pointer, _long, _pointer],
    "recover_positions": [_int, _pointer, _long, _pointer, _pointer, _long, _pointer, _int],
    "accumulate_positions": [_int, _pointer, _pointer, _pointer, _long, _pointer, _long],
    "fold_groups": [_int, _pointer, _long, _long, _long, _pointer, _long, _int],
    "unfold_groups": [_int, _pointer, _long, _long, _long, _pointer, _long, _int, _int],
    "number": [_pointer, _long, _pointer, _pointer, _pointer],
    "pair_sums": [_pointer, _long, _pointer, _pointer, _long, _int, _pointer, _long, _pointer, _long, _int],
    "listed_pair_sums": [
        _pointer,
        _long,
        _pointer,
        _pointer,
        _long,
        _int,
        _pointer,
        _long,
        _pointer,
        _pointer,
        _long,
        _pointer,
    ],
    "symmetric_rows": [
        *(_pointer, _int, _pointer, _long, _long, _pointer, _long, _pointer, _int, _pointer, _long, _pointer, _pointer)
    ],
    "strongest": [
        *(_pointer, _long, _pointer, _int, _pointer, _long, _long, _pointer, _pointer, _long, _pointer, _pointer),
        *(_long, _int),
    ],
    "member_blocks": [
        *(_pointer, _long, _pointer, _int, _pointer, _long, _long, _pointer, _long, _pointer, _long, _int)
    ],
    "packed_products": [_packed, _pointer, _long, _pointer, _long, _pointer, _int],
    "packed_sum": [_packed, _pointer, _long, _pointer, _pointer],
    "train": [_pointer, _int, _pointer],
}


@dataclass(frozen=True, slots=True)
class Status:
    """Whether the compiled kernels serve."""

    available: bool  # whether they are loaded
    reason: str  # why not, or where they were found
    instructions: str = ""  # avx512, avx2 or portable
    threaded: bool = False  # whether they use more than one thread: built with OpenMP, and not in a forked process


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None, and where it is or why there is none."""
    if os.environ.get(_SWITCH) == "0":
        return None, f"switched off by {_SWITCH}=0"
    # An editable install keeps what was compiled apart from the sources; the package's path has both folders.
    found = [path for folder in package.__path__ if (path := Path(folder) / _NAME).is_file()]
    if not found:
        return None, "not built: there was no working C compiler when fairfold was installed"
    try:
        library = ctypes.CDLL(str(found[0]))
        version = library.fairfold_abi()
    except (OSError, AttributeError) as error:
        return None, f"{found[0]} cannot be loaded: {error}"
    if version != ABI:
        return None, f"{found[0]} was built from other sources (ABI {version}, needed {ABI}): install fairfold again"
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"fairfold_{name}")
        function.argtypes, function.restype = arguments, _int
    library.fairfold_instructions.argtypes, library.fairfold_instructions.restype = [], ctypes.c_char_p
    library.fairfold_use_instructions.argtypes = [ctypes.c_char_p]
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
    return library, str(found[0])


def library() -> ctypes.CDLL | None:
    """The loaded library, or None; the first time there is none for want of a build, that is logged."""
    loaded, reason = _load()
    if loaded is None and not reason.startswith("switched off"):
        _log_once(reason)
    return loaded


@cache
def _log_once(reason: str) -> None:
    _log.warning("fairfold runs without its compiled kernels, several times slower on the CPU (%s).", reason)


def status() -> Status:
    """Whether the compiled kernels serve this process, and if not, why."""
    loaded, reason = _load()
    if loaded is None:
        return Status(available=False, reason=reason)
    return Status(True, reason, loaded.fairfold_instructions().decode(), bool(loaded.fairfold_threaded()))


def use_instructions(name: str) -> bool:
    """Use another instruction set than the best one; False where the processor lacks it. For tests."""
    loaded, _ = _load()
    return loaded is not None and loaded.fairfold_use_instructions(name.encode()) == 0


def workers() -> int:
    """The number of threads that may each train a client in compiled code: 1 where there is none."""
    return torch.get_num_threads() if library() is not None else 1


def use_single_thread() -> None:
    """Let the calling thread, one of several workers, start no OpenMP threads, in torch or in our library."""
    torch.get_num_threads()  # torch sets up a new thread when it is first asked, and would undo what follows
    if (loaded := library()) is not None:
        loaded.fairfold_work_alone()


def _after_fork() -> None:
    """Let a forked child use one thread: OpenMP threads do not survive a fork, and it would wait for them for ever.

    Ours are cared for in C, torch's here.
    """
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


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
        _advise_pages(tensor, _HUGEPAGE)


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
    _advise_pages(tensor, _HUGEPAGE)
    _advise_pages(tensor, _COLLAPSE)


def _advise_pages(tensor: Tensor, advice: int) -> None:
    if _libc is None:
        return
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
    if last > first:  # a refusal is no error
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that C may read and write."""

_OK, _BAD_LAYOUT, _BAD_ROW, BAD_ARGUMENT, _NO_MEMORY, _UNSUPPORTED = range(6)


class NotSupported(Exception):
    """The C library cannot work on these tensors."""


def library_for(*tensors: Tensor) -> Any:
    """The library, if it supports these tensors: plain ones, on the CPU, one real dtype, outside of autograd."""
    loaded = library()
    dtype = tensors[0].dtype
    if loaded is None or dtype not in REAL_BYTES:
        raise NotSupported
    for tensor in tensors:
        if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.dtype is not dtype:
            raise NotSupported
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotSupported
    return loaded


def call(
    function: Any, *arguments: Any, layout: Layout | None = None, rows: Tensor | None = None, row_size: int = 1
) -> None:
    """Call a function of the library, tensors as pointers, and raise the error that it returns."""
    code = function(*(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments))
    check_result(code, layout, rows, row_size)


def check_result(code: int, layout: Layout | None = None, rows: Tensor | None = None, row_size: int = 1) -> None:
    """Raise the error of a call's result code, :class:`NotSupported` among them."""
    if code == _OK:
        return
    if code == _UNSUPPORTED:
        raise NotSupported
    if code == _BAD_ROW and layout is not None and rows is not None:
        raise bad_rows(layout, rows, row_size)
    if code == _NO_MEMORY:
        raise MemoryError("no memory for the kernel's scratch space")
    needed = "vectors of the layout's sizes, and positions within them"
    raise InvalidVector(f"tensors that do not fit {layout or 'each other'}", needed, "Check their shapes.")
