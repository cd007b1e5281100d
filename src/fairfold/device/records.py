"""Content-addressed objects of messages: configurations, and vectors in ``.npy`` that are cut into chunks."""

import hashlib
import json
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairfold.device.protobuf import bytes_field, pack_config, parse_config
from fairfold.errors import InvalidMessage

CHUNK_BYTES = 5 * 1024 * 1024  # Flower's length of a chunk of an array
MAX_HEADER_BYTES = 4_096
_TYPES = {  # by type code of the standard library's arrays: numpy's code, and the name of the type
    "e": ("<f2", "float16"), "f": ("<f4", "float32"), "d": ("<f8", "float64"), "i": ("<i4", "int32"),
    "q": ("<i8", "int64"), "B": ("|u1", "uint8"),
}  # fmt: skip
_CODES = {name: (code, numpy_code) for code, (numpy_code, name) in _TYPES.items()}
_HEADER = re.compile(rb"\{'descr': '(.{3})', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n")

Vector = Any  # array.array: a class that cannot be subscripted before Python 3.12
Objects = dict[str, bytes]  # content of objects, by their SHA-256
Records = dict[str, dict[str, Any]]


def float32(number: float) -> float:
    """A number in single precision."""
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


def _invalid(given: str, needed: str) -> InvalidMessage:
    return InvalidMessage(given, needed, "Both sides must run the same fairfold.")


@dataclass
class ObjectTree:
    """An object's id, and the objects that it refers to."""

    object_id: str
    children: list["ObjectTree"] = field(default_factory=list)

    def packed(self) -> bytes:
        """The tree as protobuf."""
        return bytes_field(1, self.object_id.encode()) + b"".join(bytes_field(2, kid.packed()) for kid in self.children)


def add_object(kind: str, children: list[ObjectTree], body: bytes, objects: Objects) -> ObjectTree:
    """Add an object to others; its id is the SHA-256 of its kind, its children's ids, its length and its body."""
    unique = list({child.object_id: child for child in children}.values())
    head = f"{kind} {','.join(child.object_id for child in unique)} {len(body)}"
    content = head.encode() + b"\0" + body
    object_id = hashlib.sha256(content).hexdigest()
    objects[object_id] = content
    return ObjectTree(object_id, unique)


def split_object(content: bytes) -> tuple[str, list[str], bytes]:
    """Kind, children's ids and body of an object."""
    head, _, body = content.partition(b"\0")
    kind, children, length = head.decode().split(" ")
    if int(length) != len(body):
        raise _invalid("an object of another length than it says", "a whole one")
    return kind, children.split(",") if children else [], body


# -- vectors -----------------------------------------------------------------------------------------------------------


def pack_vector(vector: Vector) -> bytes:
    """A vector as numpy writes it, ``.npy`` version 1."""
    head = f"{{'descr': '{_TYPES[vector.typecode][0]}', 'fortran_order': False, 'shape': ({len(vector)},), }}"
    head += " " * (-(len(head) + 11) % 64) + "\n"
    return b"".join([b"\x93NUMPY\x01\x00", struct.pack("<H", len(head)), head.encode(), vector.tobytes()])


def parse_vector(data: bytes, dtype: str, size: int) -> Vector:
    """Read a vector of an agreed size; half floats become an array of single ones."""
    if dtype not in _CODES:
        raise _invalid(f"an array of type {dtype[:20]!r}", " or ".join(sorted(_CODES)))
    code, numpy_code = _CODES[dtype]
    start = 10 + int.from_bytes(data[8:10], "little")
    header = _HEADER.fullmatch(data[10:start]) if data[:8] == b"\x93NUMPY\x01\x00" else None
    if header is None or start > MAX_HEADER_BYTES or header[1].decode() != numpy_code or int(header[2]) != size:
        raise _invalid("not an array as numpy writes it", f"{size} numbers of .npy version 1")
    if len(data) - start != size * struct.calcsize(code):
        raise _invalid("wrong size", f"{size} numbers")
    if code == "e":
        return array("f", struct.unpack(f"<{size}e", data[start:]))
    return array(code, data[start:])


# -- records -----------------------------------------------------------------------------------------------------------


def pack_records(records: Mapping[str, Mapping[str, Any]], objects: Objects) -> ObjectTree:
    """Add records to objects: of arrays where the values are vectors, else of configuration."""
    trees, names = [], {}
    for name, record in records.items():
        is_arrays = not record or isinstance(next(iter(record.values())), array)
        if is_arrays:
            tree = _pack_arrays(record, objects)
        else:
            tree = add_object("ConfigRecord", [], pack_config(dict(record)), objects)
        names[name] = tree.object_id
        trees.append(tree)
    return add_object("RecordDict", trees, json.dumps(names).encode(), objects)


def _pack_arrays(arrays: Mapping[str, Vector], objects: Objects) -> ObjectTree:
    trees, names = [], {}
    for name, vector in arrays.items():
        data = pack_vector(vector)
        pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        chunks = [add_object("ArrayChunk", [], piece, objects) for piece in pieces]
        order = list(dict.fromkeys(chunk.object_id for chunk in chunks))
        described = {
            "dtype": _TYPES[vector.typecode][1], "shape": [len(vector)], "stype": "numpy.ndarray",
            "arraychunk_ids": [order.index(chunk.object_id) for chunk in chunks],
        }  # fmt: skip
        tree = add_object("Array", chunks, json.dumps(described).encode(), objects)
        names[name] = tree.object_id
        trees.append(tree)
    return add_object("ArrayRecord", trees, json.dumps(names).encode(), objects)


def parse_records(record_dict: str, objects: Objects) -> Records:
    """The records of a message from its objects."""
    found: Records = {}
    for name, object_id in json.loads(split_object(objects[record_dict])[2]).items():
        kind, _, body = split_object(objects[object_id])
        if kind == "ConfigRecord":
            found[name] = parse_config(body)
        elif kind == "ArrayRecord":
            found[name] = {key: _parse_array(one, objects) for key, one in json.loads(body).items()}
    return found


def _parse_array(object_id: str, objects: Objects) -> Vector:
    _, children, body = split_object(objects[object_id])
    facts = json.loads(body)
    if facts["stype"] != "numpy.ndarray" or len(facts["shape"]) != 1:
        raise _invalid("wrong type", "a vector as numpy writes it")
    data = b"".join(split_object(objects[children[place]])[2] for place in facts["arraychunk_ids"])
    return parse_vector(data, facts["dtype"], int(facts["shape"][0]))
