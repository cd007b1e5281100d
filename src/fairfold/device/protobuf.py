"""The part of protobuf that messages need: fields of numbers and bytes, and records of configuration."""

import struct
from typing import Any

from fairfold.errors import InvalidMessage

Fields = dict[int, list[Any]]  # by field number: integers, and bytes for everything else
VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types
DOUBLE_LIST, BOOL_LIST = 21, 24  # fields of lists in a value of a configuration; Flower writes [] as one of booleans
_FIXED = {DOUBLE: 8, FLOAT: 4}


def varint(number: int) -> bytes:
    """An unsigned number, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def number_field(field: int, number: int) -> bytes:
    """A field of an unsigned number; nothing for 0, as protobuf writes it."""
    return varint(field << 3) + varint(number) if number else b""


def double_field(field: int, number: float) -> bytes:
    """A field of a double; nothing for 0."""
    return varint(field << 3 | DOUBLE) + struct.pack("<d", number) if number else b""


def bytes_field(field: int, content: bytes) -> bytes:
    """A field of bytes, a text or a message, present even if it is empty."""
    return varint(field << 3 | BYTES) + varint(len(content)) + content


def text_field(field: int, text: str) -> bytes:
    """A field of a text; nothing for an empty one."""
    return bytes_field(field, text.encode()) if text else b""


def parse_fields(content: bytes) -> Fields:
    """Parse a message into its fields; refuse bytes that are no message."""
    found: Fields = {}
    place = 0

    def read_varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            if place >= len(content) or shift > 63:
                raise _invalid()
            byte = content[place]
            value |= (byte & 127) << shift
            place, shift = place + 1, shift + 7
            if byte < 128:
                return value

    while place < len(content):
        tag = read_varint()
        kind = tag & 7
        if kind == VARINT:
            found.setdefault(tag >> 3, []).append(read_varint())
            continue
        if kind not in (DOUBLE, BYTES, FLOAT):
            raise _invalid()
        size = read_varint() if kind == BYTES else _FIXED[kind]
        if place + size > len(content):
            raise _invalid()
        found.setdefault(tag >> 3, []).append(content[place : place + size])
        place += size
    return found


def _invalid() -> InvalidMessage:
    return InvalidMessage("bytes that are no message", "what Flower sends", "Both sides must run the same fairfold.")


def pack_config(facts: dict[str, Any]) -> bytes:
    """A record of configuration, in the order of its keys; values are bool, int, float, text, bytes, lists of float."""
    return b"".join(
        bytes_field(1, bytes_field(1, key.encode()) + bytes_field(2, _pack_value(value)))
        for key, value in facts.items()
    )


def _pack_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return varint(4 << 3) + varint(value)
    if isinstance(value, int):
        return varint(2 << 3) + varint((value << 1 ^ value >> 63) & (1 << 64) - 1)
    if isinstance(value, float):
        return varint(1 << 3 | DOUBLE) + struct.pack("<d", value)
    if isinstance(value, str):
        return bytes_field(5, value.encode())
    if isinstance(value, bytes):
        return bytes_field(6, value)
    numbers = struct.pack(f"<{len(value)}d", *value)
    return bytes_field(DOUBLE_LIST, bytes_field(1, numbers)) if numbers else bytes_field(BOOL_LIST, b"")


def parse_config(content: bytes) -> dict[str, Any]:
    """The facts of a record of configuration; kinds of value that no device needs stay bytes."""
    facts = {}
    for entry in parse_fields(content).get(1, []):
        fields = parse_fields(entry)
        ((kind, (value, *_)),) = parse_fields(fields[2][0]).items()
        facts[fields[1][0].decode()] = _parse_value(kind, value)
    return facts


def _parse_value(kind: int, value: Any) -> Any:
    if kind == 1:
        return struct.unpack("<d", value)[0]
    if kind == 2:
        return (value >> 1) ^ -(value & 1)
    if kind == 4:
        return bool(value)
    if kind == 5:
        return value.decode()
    if kind == DOUBLE_LIST:
        numbers = b"".join(parse_fields(value).get(1, []))
        return list(struct.unpack(f"<{len(numbers) // 8}d", numbers))
    return [] if kind == BOOL_LIST and not value else value
