"""Files that are either whole or not there."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    path: Path,
    content: bytes | Iterable[bytes | memoryview],
    needed: int | None = None,
    *,
    private: bool = False,
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
    try:
        descriptor = disk.create(temporary)
        try:
            if private:
                os.chmod(temporary, 0o600)
            for piece in content:
                _write_all(descriptor, memoryview(piece))
            disk.fsync(descriptor)
        finally:
            os.close(descriptor)
        disk.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        _forget(temporary)
        raise _cannot_write(path, error, needed) from error
    except BaseException:
        _forget(temporary)
        raise


def _write_all(descriptor: int, content: memoryview) -> None:
    while content.nbytes:
        written = disk.write(descriptor, content[:PIECE])
        content = content[written:]


def _sync_folder(folder: Path) -> None:
    """So that a new name survives a power cut as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        disk.fsync(descriptor)
    finally:
        os.close(descriptor)


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _cannot_write(path: Path, error: OSError, needed: int | None) -> CannotWrite:
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return CannotWrite(f"{path}: {reason}", "a file that can be written", "Check the folder and its permissions.")
    free = shutil.disk_usage(path.parent).free
    room = f"{needed:,} bytes" if needed is not None else "more room"
    return CannotWrite(
        f"{path}: {reason}, {free:,} bytes are free",
        f"{room} for this file",
        "What was there before is untouched: make room, then go on (fairfold train --out … --resume).",
    )


def remove_leftovers(folder: Path) -> None:
    """Remove what writers left that were killed."""
    for path in folder.glob(f".*{TEMPORARY}"):
        disk.remove(path)


# -- tensors -----------------------------------------------------------------------------------------------------------

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, private: bool = False
) -> dict[str, Any]:
    """Write tensors as a safetensors file, atomically, and return its size and SHA-256.

    The library's own writer holds the file in memory twice over; here a tensor goes to disk from where it lies, so
    that a table of gigabytes can be saved on a machine that just holds it.
    """
    header = _header(tensors, metadata)
    size = len(header) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    checksum = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        checksum.update(header)
        yield header
        for tensor in tensors.values():
            content = bytes_of(tensor)
            for start in range(0, content.nbytes, PIECE):
                checksum.update(content[start : start + PIECE])
                yield content[start : start + PIECE]

    write_atomically(path, pieces(), size, private=private)
    return {"file": path.name, "bytes": size, "sha256": checksum.hexdigest()}


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The length of the description, and the description: where each tensor lies behind it."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        described[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, where they lie."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data.cast("B")


def checksum_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
