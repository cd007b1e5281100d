"""A table's numbers in a file that is mapped into memory, with an undo journal that leads back to a checkpoint.

Passes over the table go through the mapping, a block at a time, and give its pages back; single rows are read and
written by position, as a mapping would bring up to 2 MB around each to memory. Before numbers change, their old values
go to the journal of the last checkpoint. Going back to checkpoint N writes back what the journals from N on hold, the
newest record first. The last record of a killed process may be cut short: the file was not changed yet.
"""

import errno
import mmap
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from fairfold import atomic_io
from fairfold.checksums import Damaged

BLOCK = 1 << 20  # numbers that a pass over a table handles at a time
RECORD = struct.Struct("<QI")  # of a journal: how many numbers changed, and the CRC of their places and old values


class TableFile:
    """A flat vector in a file; ``path`` is None for a temporary one, which ends with the process and has no journal.

    With ``private`` the file is only read, and stays as it is: changes are seen by this object alone.
    """

    def __init__(
        self, path: Path, length: int, dtype: torch.dtype, *, temporary: bool = False, private: bool = False
    ) -> None:
        size = length * dtype.itemsize
        if path.stat().st_size != size:
            raise Damaged(f"{path.name}: {path.stat().st_size:,} bytes, not {size:,}")
        with atomic_io.write_errors(path), path.open("rb" if private else "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE)
        self.values = torch.frombuffer(self._map, dtype=dtype)
        self.path = None if temporary else path
        self._descriptor: int | None = None
        if not private and hasattr(os, "preadv"):
            self._descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
            weakref.finalize(self, os.close, self._descriptor)
        self._private = private
        self._journal: Path | None = None  # that of the last checkpoint; before it there is nothing to go back to

    @classmethod
    def create(cls, path: Path, length: int, dtype: torch.dtype, *, temporary: bool = False) -> "TableFile":
        """Make the file, with all its blocks allocated; one that a killed run left is replaced."""
        size = length * dtype.itemsize
        with atomic_io.write_errors(path, size):
            path.unlink(missing_ok=True)
            for journal in _journals(path):
                journal.unlink()
            atomic_io.reserve(path, size)
        made = cls(path, length, dtype, temporary=temporary)
        if temporary and sys.platform != "win32":
            path.unlink()  # the file lives as long as it is mapped
        return made

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Views of successive blocks, each with the number of its first value; pages are released on the way."""
        length = len(self.values)
        stops = [*range(BLOCK, length - 15, BLOCK), length]  # torch draws fewer than 16 numbers in another way
        for start, stop in pairwise([0, *stops]):
            yield start, self.values[start:stop]
            if start // BLOCK % 4 == 3:
                self.release()
        self.release()

    def read(self, places: Tensor) -> Tensor:
        """The numbers at some places, without mapping the pages around them."""
        if self._descriptor is None:
            return self.values.index_select(0, places)
        found = torch.empty(len(places), dtype=self.values.dtype)
        content, size = _bytes(found), self.values.itemsize
        for start, stop, place in _runs(places):
            part = content[start * size : stop * size]
            if os.preadv(self._descriptor, [part], place * size) != len(part):
                raise Damaged("a table's file that was cut short")
        return found

    def _write(self, places: Tensor, values: Tensor) -> None:
        if self._descriptor is None:
            self.values.index_copy_(0, places, values)
            return
        content, size = _bytes(values), self.values.itemsize
        for start, stop, place in _runs(places):
            part = content[start * size : stop * size]
            if os.pwrite(self._descriptor, part, place * size) != len(part):  # allocated beforehand: never short
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def release(self) -> None:
        """Give the mapped pages back to the system, which writes them to the file and may cache them."""
        if hasattr(mmap, "MADV_DONTNEED") and sys.platform == "linux" and not self._private:
            self._map.madvise(mmap.MADV_DONTNEED)

    def add(self, places: Tensor, values: Tensor) -> None:
        """Add to the numbers at distinct places; their old values are in the journal before."""
        old = self.read(places)
        if self._journal is not None:
            content = places.numpy().tobytes() + old.numpy().tobytes()
            with atomic_io.write_errors(self._journal, len(content)), self._journal.open("ab") as journal:
                journal.write(RECORD.pack(len(places), zlib.crc32(content)) + content)
                journal.flush()
                os.fsync(journal.fileno())
        with atomic_io.write_errors(self.path or Path("table")):
            self._write(places, old + values)

    def checkpoint(self, number: int) -> None:
        """Flush the file; what changes from now on can be taken back to this checkpoint."""
        assert self.path is not None
        with atomic_io.write_errors(self.path):
            self._map.flush()
            self._journal = _journal(self.path, number)
            self._journal.write_bytes(b"")

    def forget(self, before: int) -> None:
        """Remove journals of checkpoints that exist no more."""
        assert self.path is not None
        for path in _journals(self.path):
            if _number(path) < before:
                atomic_io.remove(path)

    def go_back(self, number: int) -> None:
        """Take back all that changed since a checkpoint, and begin anew from there."""
        assert self.path is not None
        later = [path for path in _journals(self.path) if _number(path) >= number]
        if number not in map(_number, later):
            raise Damaged(f"{self.path.name}: no journal of round {number}")
        for path in reversed(later):
            for places, old in _records_backwards(path, self.values.dtype):
                if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(self.values):
                    raise Damaged(f"{path.name}: places outside of the table")
                self._write(places, old)
        if self._private:
            return
        self.checkpoint(number)
        for path in later:
            if _number(path) > number:
                atomic_io.remove(path)


def whole_copy(length: int, dtype: torch.dtype, beside: Path | None) -> Tensor:
    """An empty vector: in memory, or in a temporary file beside another where it would take much of the memory."""
    size = length * dtype.itemsize
    if beside is None or not atomic_io.is_large(size):
        return torch.empty(length, dtype=dtype)
    return TableFile.create(atomic_io.temporary_path(beside), length, dtype, temporary=True).values


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.contiguous().view(torch.uint8).numpy().data) if len(values) else memoryview(b"")


def _runs(places: Tensor) -> Iterator[tuple[int, int, int]]:
    """Where runs of neighboring places begin and end, each with its first place."""
    breaks = (places.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), len(places)] if len(places) else []
    firsts = places[bounds[:-1]].tolist() if bounds else []
    return ((start, stop, first) for (start, stop), first in zip(pairwise(bounds), firsts, strict=True))


def _journal(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.undo-{number:08d}")


def _journals(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.undo-*"))


def _number(journal: Path) -> int:
    return int(journal.name.rpartition("-")[2])


def _records_backwards(path: Path, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Places and old values of a journal's records, the last first; one that was cut short is passed over."""
    with path.open("rb") as file:
        end, starts = path.stat().st_size, list[tuple[int, int, int]]()
        while file.tell() + RECORD.size <= end:
            count, checksum = RECORD.unpack(file.read(RECORD.size))
            start, length = file.tell(), count * (8 + dtype.itemsize)
            if start + length > end:
                break
            starts.append((start, length, checksum))
            file.seek(start + length)
        for place, (start, length, checksum) in reversed(list(enumerate(starts))):
            file.seek(start)
            content = bytearray(file.read(length))
            if zlib.crc32(content) != checksum:
                if place == len(starts) - 1:
                    continue
                raise Damaged(f"{path.name}: a record with another checksum than it says")
            if content:
                count = length // (8 + dtype.itemsize)
                yield (
                    torch.frombuffer(content, dtype=torch.int64, count=count),
                    torch.frombuffer(content, dtype=dtype, offset=8 * count),
                )
