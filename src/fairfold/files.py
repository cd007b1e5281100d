"""Files that are either whole or not there: the one place where they are written."""

import contextlib
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fairfold.errors import CannotWrite

PIECE = 8 << 20
"""Bytes handed to the system at a time: what is written is never copied as a whole."""

TEMPORARY = ".tmp"


class Disk:
    """The few calls by which files change. Tests replace them to fail, or to be killed, at each one of them."""

    def create(self, path: Path) -> int:
        """Open a new file and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)

    def write(self, descriptor: int, piece: memoryview) -> int:
        """Write some bytes and return how many were taken."""
        return os.write(descriptor, piece)

    def fsync(self, descriptor: int) -> None:
        """Wait until the disk has it."""
        os.fsync(descriptor)

    def replace(self, old: Path, new: Path) -> None:
        """Rename, over what may be there."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)


disk = Disk()


def write_atomically(
    path: Path, content: bytes | Iterable[bytes | memoryview], needed: int | None = None, *, private: bool = False
) -> None:
    """Replace ``path`` by ``content``: written beside it, flushed to disk, then renamed over it.

    Args:
        path: Of the file.
        content: All of it, or its pieces in order.
        needed: Its size, where that is known beforehand: the error says how much room was missing.
        private: Only its owner may read it, from the first byte on.
    """
    if isinstance(content, bytes):
        needed, content = len(content), (content,)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    with saying(path, needed):
        try:
            descriptor = disk.create(temporary)
            try:
                if private:
                    os.chmod(temporary, 0o600)
                for piece in content:
                    left = memoryview(piece)
                    while left.nbytes:
                        left = left[disk.write(descriptor, left[:PIECE]) :]
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
def saying(path: Path, needed: int | None = None) -> Iterator[None]:
    """Whatever the system refuses of a file or folder is an error with words; but for a lock that another one holds."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise cannot_write(path, error, needed) from error


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with saying(path):
        disk.remove(path)


def sync_folder(folder: Path) -> None:
    """So that a new name survives a power cut as well."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        disk.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError, needed: int | None = None) -> CannotWrite:
    """Why a file, which may need so many bytes, could not be written."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return CannotWrite(f"{path}: {reason}", "a file that can be written", "Check the folder and its permissions.")
    free = shutil.disk_usage(path.parent).free
    room = f"{needed:,} bytes" if needed is not None else "more room"
    remedy = "What was there before is untouched: make room, then go on (fairfold train --out … --resume)."
    return CannotWrite(f"{path}: {reason}, {free:,} bytes are free", f"{room} for this file", remedy)


def checksum(path: Path, advance: Callable[[int], None] = lambda _done: None, algorithm: str = "sha256") -> str:
    """The checksum of a file's content, as hexadecimal digits; ``advance`` is told of bytes as they are read."""
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while block := file.read(PIECE):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder, and those above it, unless it is there; a private one is its owner's alone, old or new.

    Those that are new are flushed, so that none of them is lost with the power.
    """
    try:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        for made in missing:
            sync_folder(made.parent)
        if private:
            os.chmod(folder, 0o700)
    except OSError as error:
        raise CannotWrite(f"{folder}: {error.strerror}", "a folder to write to", "Name another.") from None


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone may enter."""
    make_folder(folder, private=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what writers left that were killed."""
    for path in folder.glob(f".*{TEMPORARY}"):
        remove(path)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Have a folder to oneself, after all others who ask for that, or at once (else BlockingIOError).

    The system drops the lock of a killed process.
    """
    try:
        import fcntl
    except ImportError:  # a system without it: nothing guards the folder
        yield
        return
    with saying(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with saying(folder):
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
