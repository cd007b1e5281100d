"""Write and read tensors as safetensors files, atomically and with checksums."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairfold.atomic_io import CHUNK_BYTES, write_atomically
from fairfold.checksums import Damaged, read_errors
from fairfold.errors import FairfoldError, InvalidCheckpoint
from fairfold.typing import Weights

CHECKSUM_KEY = "sha256"  # metadata key of a file's own checksum
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write tensors as a safetensors file, atomically, and return its size and SHA-256."""
    header = _header(tensors, metadata)
    size = len(header) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    checksum = hashlib.sha256()

    # From where the tensors are in memory: the library's own writer makes two copies of the file.
    def pieces() -> Iterator[bytes | memoryview]:
        checksum.update(header)
        yield header
        for tensor in tensors.values():
            content = tensor_bytes(tensor)
            for start in range(0, content.nbytes, CHUNK_BYTES):
                checksum.update(content[start : start + CHUNK_BYTES])
                yield content[start : start + CHUNK_BYTES]

    write_atomically(path, pieces(), size)
    return {"file": path.name, "bytes": size, "sha256": checksum.hexdigest()}


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Header of a safetensors file: its length, then types, shapes and offsets of the tensors."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        described[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """View the bytes of a tensor, without a copy where it is contiguous on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data.cast("B")


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file; errors become Damaged or OSError."""
    try:
        with safe_open(path, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise Damaged(str(error)) from None
    except RuntimeError as error:
        if isinstance(error, FairfoldError):
            raise
        raise OSError(str(error)) from None  # the library raises RuntimeError for errors of the system


def write_checked_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write tensors with a checksum in the metadata, for :func:`read_checked_tensors`."""
    return write_tensors(path, tensors, dict(metadata) | {CHECKSUM_KEY: _checksum(tensors, metadata)})


def checked_tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Content of such a file, to be sent over the network."""
    header = _header(tensors, dict(metadata) | {CHECKSUM_KEY: _checksum(tensors, metadata)})
    return b"".join([header, *map(tensor_bytes, tensors.values())])


def read_checked_tensors(
    path: Path, remedy: str, error: type[FairfoldError] = InvalidCheckpoint, version: int | None = None
) -> tuple[Weights, dict[str, str]]:
    """Read tensors and metadata, and verify their checksum; a ``format`` other than ``version`` is refused."""
    with read_errors(path, error, "a whole file", remedy):
        with open_tensors(path) as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        found = metadata.get("format")
        other = "" if version is None or found == str(version) else f"of format {found!r}"
        without_checksum = {key: value for key, value in metadata.items() if key != CHECKSUM_KEY}
        if metadata.get(CHECKSUM_KEY) != _checksum(tensors, without_checksum):
            raise Damaged(f"another checksum than it says, or none{other and f', and {other}'}")
        if other:
            raise error(f"{path}, {other}", f"format {version}", remedy)
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    shapes = {name: [_DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}
    checksum = hashlib.sha256(json.dumps([dict(metadata), shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        checksum.update(tensor_bytes(tensors[name]))
    return checksum.hexdigest()
