"""Tensors on disk, as safetensors files that are either whole or not there."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairfold.errors import FairfoldError, InvalidCheckpoint
from fairfold.files import PIECE, write_atomically
from fairfold.sealed import Damaged, reading
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


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file; of what the library says about a file, or about the system, one form is made."""
    try:
        with safe_open(path, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise Damaged(str(error)) from None
    except RuntimeError as error:
        if isinstance(error, FairfoldError):
            raise
        raise OSError(str(error)) from None  # the library's form of what the system refuses


def write_sealed(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, private: bool = False
) -> dict[str, Any]:
    """The same with a checksum inside, for a file that has to speak for itself: :func:`read_values` asks for it."""
    seal = _seal(tensors, metadata)
    return write_tensors(path, tensors, dict(metadata) | {SEAL: seal}, private=private) | {"seal": seal}


def sealed_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The same as the content of a file, for one that travels."""
    header = _header(tensors, dict(metadata) | {SEAL: _seal(tensors, metadata)})
    return b"".join([header, *map(bytes_of, tensors.values())])


def read_values(
    path: Path, remedy: str, error: type[FairfoldError] = InvalidCheckpoint, version: int | None = None
) -> tuple[Weights, dict[str, str]]:
    """Tensors and metadata of a file with a checksum inside; refused, with what to do, where one bit is another.

    So is one whose metadata says another ``format`` than ``version``, where one is given.
    """
    with reading(path, error, "a whole file", remedy):
        with open_tensors(path) as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        said = metadata.get("format")
        other = "" if version is None or said == str(version) else f"of format {said!r}"
        unsealed = {key: value for key, value in metadata.items() if key != SEAL}
        if metadata.get(SEAL) != _seal(tensors, unsealed):
            raise Damaged(f"another checksum than it says, or none{other and f', and {other}'}")
        if other:
            raise error(f"{path}, {other}", f"format {version}", remedy)
    return tensors, metadata


def seal_of(path: Path) -> str:
    """The checksum that a file says it has."""
    with open_tensors(path) as opened:
        return str((opened.metadata() or {}).get(SEAL))


def _seal(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    shapes = {name: [_DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}
    checksum = hashlib.sha256(json.dumps([dict(metadata), shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        checksum.update(bytes_of(tensors[name]))
    return checksum.hexdigest()
