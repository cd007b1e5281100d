"""Vectors as Flower's records. Nothing that arrives is unpickled, and nothing is allocated but what was agreed on."""

import math
import re
from collections.abc import Collection
from typing import Any

import numpy
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from fairfold.flower.facts import refused
from fairfold.values import Weights

FULL, HALF = "float32", "float16"
DOUBLE, WHOLE, PLACE, BYTE = "float64", "int64", "int32", "uint8"
PLACES = ".places"  # after the name of a sparse vector: where its numbers stand
_HEADER = re.compile(
    rb"\{'descr': '(<f4|<f2|<f8|<i8|<i4|\|u1)', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n"
)
_CODES = {FULL: b"<f4", HALF: b"<f2", DOUBLE: b"<f8", WHOLE: b"<i8", PLACE: b"<i4", BYTE: b"|u1"}
_HALF_EXPONENT = 15  # the largest number of a vector is brought below 2^15: at 2^16 rounding up would be infinity


def pack(weights: Weights, half: bool) -> tuple[ArrayRecord, list[float]]:
    """Vectors as records, and by what each has to be multiplied on arrival, in the order of their names.

    A half float reaches from 6e-8 to 65504. Each vector is brought to the top of that by a power of two, which changes
    no digit, so that only numbers a billion times smaller than the largest lose more than their last digits.
    """
    arrays, scales = {}, []
    for name in sorted(weights):
        vector, scale = weights[name], 1.0
        if vector.is_sparse:
            vector = vector.coalesce()
            arrays[name + PLACES] = Array(vector.indices()[0].int().numpy())
            vector = vector.values()
        if half and vector.dtype == torch.float32:
            scale = _scale(float(vector.abs().max()) if vector.numel() else 0.0)
            vector = (vector / scale).to(torch.float16)
        arrays[name] = Array(vector.detach().contiguous().numpy())
        scales.append(scale)
    return ArrayRecord(arrays), scales


def _scale(largest: float) -> float:
    if not (0 < largest < math.inf):
        return 1.0  # zero; NaN and infinity are left for the receiver to refuse
    return 2.0 ** min(max(math.frexp(largest)[1] - _HALF_EXPONENT, -126), 127)


def unpack(
    record: Any, scales: Any, sizes: dict[str, int], half: bool, dtype: str = FULL, sparse: Collection[str] = ()
) -> Weights:
    """Vectors from records; refused unless they are exactly those expected, and finite.

    Some may come ``sparse``: fewer numbers, and where they stand.
    """
    listed = {name for name in sparse if isinstance(record, ArrayRecord) and name in sizes and name + PLACES in record}
    if not isinstance(record, ArrayRecord) or set(record) != {*sizes, *(name + PLACES for name in listed)}:
        raise refused("other tensors than were sent", f"{', '.join(sizes)}")
    if not (isinstance(scales, list) and len(scales) == len(sizes)):
        raise refused("no scale for every tensor", f"{len(sizes)} numbers")
    found: Weights = {}
    for name, scale in zip(sorted(sizes), scales, strict=True):
        if not isinstance(scale, float) or not (0 < scale < math.inf) or (not half and scale != 1.0):
            raise refused("a scale that is no positive number", "what the sender divided by")
        places = _places(record[name + PLACES], sizes[name]) if name in listed else None
        vector = _vector(record[name], sizes[name] if places is None else len(places), HALF if half else dtype)
        if half:
            vector = vector.to(torch.float32).mul_(scale)
        if not bool(torch.isfinite(vector).all()):
            raise refused("NaN or infinity", "finite numbers")
        found[name] = vector
        if places is not None:
            where, shape = places[None].long(), (sizes[name],)
            found[name] = torch.sparse_coo_tensor(where, vector, shape, check_invariants=True, is_coalesced=True)
    return found


def _places(array: Array, size: int) -> torch.Tensor:
    """Where the numbers of a sparse vector stand: each place once, in order."""
    if len(array.shape) != 1 or not 0 <= 2 * array.shape[0] <= size:  # else all numbers are shorter
        raise refused("wrong size", f"at most {size // 2} places")
    places = _vector(array, array.shape[0], PLACE)
    if len(places) and not (int(places[0]) >= 0 and int(places[-1]) < size and bool((places.diff() > 0).all())):
        raise refused("places that are none", f"numbers below {size} that ascend")
    return places


def _vector(array: Array, size: int, dtype: str) -> torch.Tensor:
    """A vector from an ``.npy`` of exactly the expected content, without numpy's own reader.

    That one believes the header and allocates what it asks for.
    """
    if array.stype != "numpy.ndarray" or array.dtype != dtype:
        raise refused("wrong type", f"{dtype} as numpy writes it")
    data, itemsize = array.data, numpy.dtype(dtype).itemsize
    if tuple(array.shape) != (size,) or not size * itemsize < len(data) <= size * itemsize + 4096:
        raise refused("wrong size", f"{size} numbers")
    start = len(data) - size * itemsize
    lead = data[:start]
    header = _HEADER.fullmatch(lead[10:]) if lead[:8] == b"\x93NUMPY\x01\x00" else None
    if header is None or int.from_bytes(lead[8:10], "little") != start - 10:
        raise refused("not an array as numpy writes it", "a vector of .npy version 1")
    if header[1] != _CODES[dtype] or int(header[2]) != size:
        raise refused("wrong size", f"{size} numbers")
    values = numpy.frombuffer(data, dtype=numpy.dtype(_CODES[dtype].decode()), offset=start)
    return torch.from_numpy(values.copy())  # memory of its own: aligned, writable, and the message can go


def bytes_in(content: RecordDict) -> int:
    """Of the numbers in a message, as they came: without what numpy writes before them."""
    arrays = [array.data for record in content.array_records.values() for array in record.values()]
    heads = [10 + int.from_bytes(data[8:10], "little") if data[:6] == b"\x93NUMPY" else 0 for data in arrays]
    return sum(max(len(data) - head, 0) for data, head in zip(arrays, heads, strict=True))
