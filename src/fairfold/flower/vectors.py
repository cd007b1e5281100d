"""Tensors as Flower's records. Nothing received is unpickled, and only the agreed sizes are allocated."""

import math
import re
from collections.abc import Collection
from typing import Any

import numpy
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from fairfold.device.facts import invalid_message
from fairfold.typing import Weights

FLOAT16, FLOAT32, FLOAT64 = "float16", "float32", "float64"
UINT8, INT32, INT64 = "uint8", "int32", "int64"
INDICES = ".indices"  # suffix of the name of a sparse vector: the array of its indices
_HEADER = re.compile(
    rb"\{'descr': '(<f4|<f2|<f8|<i8|<i4|\|u1)', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n"
)
_DTYPE_CODES = {FLOAT32: b"<f4", FLOAT16: b"<f2", FLOAT64: b"<f8", INT64: b"<i8", INT32: b"<i4", UINT8: b"|u1"}
INT32_RANGE = 1 << 31  # length of a vector up to which its indices are sent as int32
_HALF_EXPONENT = 15  # vectors are scaled below 2^15: near 2^16 rounding up would give infinity


def pack(weights: Weights, half: bool) -> tuple[ArrayRecord, list[float]]:
    """Pack vectors into a record; return it with the scale of each vector, in the order of their names.

    A half float reaches from 6e-8 to 65504. Each vector is scaled to the top of that range by a power of two, which
    changes no digit, so that only numbers a billion times smaller than the largest lose more than their last digits.
    """
    arrays, scales = {}, []
    for name in sorted(weights):
        vector = weights[name]
        scale = 1.0
        if vector.is_sparse:
            vector = vector.coalesce()
            places = vector.indices()[0]
            arrays[name + INDICES] = Array((places if len(vector) > INT32_RANGE else places.int()).numpy())
            vector = vector.values()
        if half and vector.dtype == torch.float32:
            largest = float(vector.abs().max()) if vector.numel() else 0.0
            if 0 < largest < math.inf:  # NaN and infinity are left for the receiver to refuse
                scale = 2.0 ** min(max(math.frexp(largest)[1] - _HALF_EXPONENT, -126), 127)
            vector = (vector / scale).to(torch.float16)
        arrays[name] = Array(vector.detach().view(-1).contiguous().numpy())
        scales.append(scale)
    return ArrayRecord(arrays), scales


def unpack(
    record: Any, scales: Any, sizes: dict[str, int], half: bool, dtype: str = FLOAT32, sparse: Collection[str] = ()
) -> Weights:
    """Unpack vectors, ``sparse`` ones also from values and indices; refuse other names or sizes, NaN and infinity."""
    listed = {name for name in sparse if isinstance(record, ArrayRecord) and name in sizes and name + INDICES in record}
    if not isinstance(record, ArrayRecord) or set(record) != {*sizes, *(name + INDICES for name in listed)}:
        raise invalid_message("other tensors than were sent", f"{', '.join(sizes)}")
    if not (isinstance(scales, list) and len(scales) == len(sizes)):
        raise invalid_message("no scale for every tensor", f"{len(sizes)} numbers")
    vectors: Weights = {}
    for name, scale in zip(sorted(sizes), scales, strict=True):
        if not isinstance(scale, float) or not (0 < scale < math.inf) or (not half and scale != 1.0):
            raise invalid_message("a scale that is no positive number", "what the sender divided by")
        size = sizes[name]
        indices = _indices(record[name + INDICES], size) if name in listed else None
        vector = _vector(record[name], size if indices is None else len(indices), FLOAT16 if half else dtype)
        if half:
            vector = vector.to(torch.float32).mul_(scale)
        if not bool(torch.isfinite(vector).all()):
            raise invalid_message("NaN or infinity", "finite numbers")
        if indices is not None:
            rows = indices[None].long()
            vector = torch.sparse_coo_tensor(rows, vector, (size,), check_invariants=True, is_coalesced=True)
        vectors[name] = vector
    return vectors


def _indices(array: Array, size: int) -> torch.Tensor:
    """Read the indices of a sparse vector: strictly ascending and in range."""
    if len(array.shape) != 1 or not 0 <= 2 * array.shape[0] <= size:  # beyond half, the dense vector is shorter
        raise invalid_message("wrong size", f"at most {size // 2} indices")
    indices = _vector(array, array.shape[0], INT64 if size > INT32_RANGE else INT32)
    if len(indices) and not (int(indices[0]) >= 0 and int(indices[-1]) < size and bool((indices.diff() > 0).all())):
        raise invalid_message("invalid indices", f"ascending numbers below {size}")
    return indices


def _vector(array: Array, size: int, dtype: str) -> torch.Tensor:
    """Read a vector from an ``.npy``; numpy's own reader would allocate whatever its header asks for."""
    if array.stype != "numpy.ndarray" or array.dtype != dtype:
        raise invalid_message("wrong type", f"{dtype} as numpy writes it")
    data = array.data
    start = len(data) - size * numpy.dtype(dtype).itemsize
    if tuple(array.shape) != (size,) or not 0 < start <= 4096:
        raise invalid_message("wrong size", f"{size} numbers")
    lead = data[:start]
    header = _HEADER.fullmatch(lead[10:]) if lead[:8] == b"\x93NUMPY\x01\x00" else None
    if header is None or int.from_bytes(lead[8:10], "little") != start - 10:
        raise invalid_message("not an array as numpy writes it", "a vector of .npy version 1")
    if header[1] != _DTYPE_CODES[dtype] or int(header[2]) != size:
        raise invalid_message("wrong size", f"{size} numbers")
    values = numpy.frombuffer(data, dtype=numpy.dtype(_DTYPE_CODES[dtype].decode()), offset=start)
    return torch.from_numpy(values.copy())  # aligned, writable, and independent of the message


def tensor_bytes(content: RecordDict) -> int:
    """Return the bytes of all tensors in a message, without numpy's headers."""
    arrays = [array.data for record in content.array_records.values() for array in record.values()]
    heads = [10 + int.from_bytes(data[8:10], "little") if data[:6] == b"\x93NUMPY" else 0 for data in arrays]
    return sum(max(len(data) - head, 0) for data, head in zip(arrays, heads, strict=True))
