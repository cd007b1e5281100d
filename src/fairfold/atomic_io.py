"""Writes files atomically: a file is either whole or not there, also after a crash."""

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fairfold.errors import CannotWrite

CHUNK_BYTES = 8 << 20
"""Bytes written at a time."""

TEMPORARY = ".tmp"
SHARE_OF_MEMORY = 4  # what takes more than a quarter of the machine's memory goes to disk
NEW_FILE = os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags that open a file only where there is none, and no link: another account may write to the same folder."""


class Disk:
    """The system calls that change files; tests replace them to fail or to be killed at each."""

    def create(self, path: Path) -> int:
        """Open a new file and return its descriptor."""
        return os.open(path, os.O_WRONLY | NEW_FILE, 0o666)

    def write(self, descriptor: int, piece: memoryview) -> int:
        """Write some bytes and return how many were taken."""
        return os.write(descriptor, piece)

    def fsync(self, descriptor: int) -> None:
        """Flush a file to the disk."""
        os.fsync(descriptor)

    def replace(self, old: Path, new: Path) -> None:
        """Rename a file over another."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)


disk = Disk()


def temporary_path(path: Path) -> Path:
    """A new name beside a file that nobody can foresee."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}{TEMPORARY}")


def write_atomically(
    path: Path, content: bytes | Iterable[bytes | memoryview], needed: int | None = None, *, private: bool = False
) -> None:
    """Write a file atomically: to a temporary file beside it, flushed, then renamed.

    Args:
        path: Path of the file.
        content: Its bytes, or pieces of them in order.
        needed: Its size for the error message, where it is known beforehand.
        private: Whether only its owner may read it, from the first byte on.
    """
    if isinstance(content, bytes):
        needed, content = len(content), (content,)
    temporary = temporary_path(path)
    with write_errors(path, needed):
        try:
            descriptor = disk.create(temporary)
            try:
                if private:
                    os.chmod(temporary, 0o600)
                for piece in content:
                    left = memoryview(piece)
                    while left.nbytes:
                        left = left[disk.write(descriptor, left[:CHUNK_BYTES]) :]
                disk.fsync(descriptor)
            finally:
                os.close(descriptor)
            disk.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def write_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn system errors on a file or folder into :class:`CannotWrite`, but for a lock that is taken."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise cannot_write(path, error, needed) from error


def reserve(path: Path, size: int) -> None:
    """Create a file with all its blocks allocated: with holes, writes to a mapping would crash on a full disk."""
    with os.fdopen(os.open(path, os.O_RDWR | NEW_FILE, 0o600), "w+b") as file:
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def is_large(size: int) -> bool:
    """Whether so many bytes are better kept in a file: more than a quarter of the machine's memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # a system without these figures
        return False
    return size * SHARE_OF_MEMORY > memory


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with write_errors(path):
        disk.remove(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that a new name survives a power cut."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        disk.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError, needed: int | None = None) -> CannotWrite:
    """The error for a file, which may need so many bytes, that could not be written."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return CannotWrite(f"{path}: {reason}", "a file that can be written", "Check the folder and its permissions.")
    free = shutil.disk_usage(path.parent).free
    room = f"{needed:,} bytes" if needed is not None else "more room"
    remedy = "What was there before is untouched: make room, then go on (fairfold train --out … --resume)."
    return CannotWrite(f"{path}: {reason}, {free:,} bytes are free", f"{room} for this file", remedy)


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder and its parents, flushed to disk; only its owner may enter a private one."""
    try:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        for new in missing:
            sync_folder(new.parent)
        if private:
            os.chmod(folder, 0o700)
    except OSError as error:
        raise CannotWrite(f"{folder}: {error.strerror}", "a folder to write to", "Name another.") from None


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter."""
    make_folder(folder, private=True)


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files of writers that were killed."""
    for path in folder.glob(f".*{TEMPORARY}"):
        remove(path)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on a folder; without ``wait`` BlockingIOError is raised where it is taken."""
    try:
        import fcntl
    except ImportError:  # a system without locks
        yield
        return
    with write_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with write_errors(folder):
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
