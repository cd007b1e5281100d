"""Where the users' own vectors are kept while a federation is simulated: in memory, or in files mapped into it.

On devices these vectors lie on a million disks. One machine that stands for all of them can do the same: a file for
each table, of which only the rows of the round's clients are in memory. The numbers are the same either way.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fairfold.errors import CannotWrite
from fairfold.files import TEMPORARY

SHARE_OF_MEMORY = 4
"""A table goes to disk by itself where it would take more than one part in so many of the machine's memory."""


@dataclass(frozen=True)
class Storage:
    """Gives tables their room: in files of a folder, or by their size and the machine's memory, or always in memory."""

    folder: Path | None = None
    choice: Literal["auto", "memory", "disk"] = "auto"

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for a table, not yet filled."""
        size = prod(shape) * dtype.itemsize
        if self.folder is None or self.choice == "memory" or (self.choice == "auto" and not _is_large(size)):
            return torch.empty(shape, dtype=dtype)
        path = self.folder / f".{name}.{os.getpid()}{TEMPORARY}"
        try:
            _reserve(path, size)
            table = torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).view(shape)
            if sys.platform != "win32":
                path.unlink()  # the file lives as long as it is mapped: whoever is killed leaves nothing behind
        except (OSError, RuntimeError) as error:
            given, needed = getattr(error, "strerror", None) or error, f"{size:,} bytes for the users' vectors"
            remedy = "Make room, name another --out, or set user_storage = 'memory'."
            raise CannotWrite(f"{path}: {given}", needed, remedy) from error
        return table


def _reserve(path: Path, size: int) -> None:
    """Make a file of which every byte has its place on the disk: written through memory, a full disk would kill."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    finally:
        os.close(descriptor)


def _is_large(size: int) -> bool:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # a system that does not tell
        return False
    return size * SHARE_OF_MEMORY > memory


class TablesPlaced(TorchFunctionMode):
    """Within its block, modules get their tables of so many rows from the storage, and fill them as they always do."""

    def __init__(self, storage: Storage, rows: int) -> None:
        super().__init__()
        self._storage, self._rows, self._made = storage, rows, 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        shape = arguments[0] if arguments else None
        if function is torch.empty and isinstance(shape, tuple) and len(shape) == 2 and shape[0] == self._rows:
            self._made += 1
            return self._storage.empty(f"table-{self._made}", shape, torch.get_default_dtype())
        return function(*arguments, **(options or {}))
