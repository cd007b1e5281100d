"""Find the compiled library, load it, and declare its functions."""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch  # loaded before our library, which then shares the OpenMP threads that torch has

import fairfold.kernels.native as package

ABI = 8  # what native/fairfold.h calls FAIRFOLD_ABI: a library of another number is not called

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
