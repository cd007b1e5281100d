"""What a piece of a program allocates at most, counted by ``allocations.c`` at every call of malloc and its like.

Resident memory is of a whole process, and rests where it once was: it cannot show what a single message has cost.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
HERE = sys.platform == "linux" and COMPILER is not None
"""Whether they can be counted on this machine."""


@contextmanager
def counting() -> Iterator[dict[str, str]]:
    """The environment of a program that is to be started with the counter in it."""
    if COMPILER is None:
        sys.exit("no C compiler to build the counter with")
    with tempfile.TemporaryDirectory() as place:
        library = Path(place) / "allocations.so"
        source = Path(__file__).with_suffix(".c")
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O2", str(source), "-o", str(library)], check=True)
        yield os.environ | {"LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc"}


class Allocations:
    """The counter that was preloaded into this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._reset, self._live, self._most = (
            getattr(library, f"allocations_{name}") for name in ("reset", "live", "most")
        )
        self._live.restype = self._most.restype = ctypes.c_long

    def around(self, work: Callable[[], object]) -> int:
        """Bytes that were allocated during some work at most, beyond those before it."""
        self._reset()
        before = int(self._live())
        work()
        return int(self._most()) - before


def counted() -> bool:
    """Whether the counter is in this process."""
    return hasattr(ctypes.CDLL(None), "allocations_most")
