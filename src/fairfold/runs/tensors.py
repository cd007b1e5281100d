"""Tensors on disk, as safetensors files that are either whole or not there."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairfold.errors import InvalidCheckpoint
from fairfold.files import PIECE, write_atomically
from fairfold.values import Weights

SEAL = "sha256"
"""Key of the metadata that holds a file's own checksum."""

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


def open_tensors(path: Path) -> Any:
    """Open a safetensors file; OSError where the system refuses that, of which the library makes a RuntimeError."""
    try:
        return safe_open(path, "pt")
    except RuntimeError as error:
        raise OSError(str(error)) from None


def write_sealed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The same with a checksum inside, for a file that has to speak for itself: :func:`read_sealed` asks for it."""
    return write_tensors(path, tensors, dict(metadata) | {SEAL: _seal(tensors, metadata)})


def read_sealed(path: Path, remedy: str) -> tuple[Weights, dict[str, str]]:
    """Tensors and metadata of a file with a checksum inside; refused, with what to do, where one bit is another."""
    try:
        with open_tensors(path) as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise InvalidCheckpoint(f"{path}: {error}", "a whole file", remedy) from None
    if metadata.pop(SEAL, None) != _seal(tensors, metadata):
        raise InvalidCheckpoint(f"{path}: another checksum than it says, or none", "a whole file", remedy)
    return tensors, metadata


def _seal(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    shapes = {name: [_DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}
    checksum = hashlib.sha256(json.dumps([dict(metadata), shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        checksum.update(bytes_of(tensors[name]))
    return checksum.hexdigest()
