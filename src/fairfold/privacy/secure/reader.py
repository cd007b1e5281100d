"""Reads the bytes of messages: what is missing, left over or out of range is refused before anything is built of it."""

import struct
from collections.abc import Set

from fairfold.errors import InvalidMessage

MAX_CLIENTS = 1 << 16


class Reader:
    """Cursor over a message that refuses missing, excess or out-of-range content."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.rest = memoryview(data)

    def take(self, num_bytes: int) -> bytes:
        """Consume and copy the next bytes."""
        return bytes(self.view(num_bytes))

    def view(self, num_bytes: int) -> memoryview:
        """Consume the next bytes without a copy."""
        if num_bytes > len(self.rest):
            raise unreadable("a message that ends too early")
        taken, self.rest = self.rest[:num_bytes], self.rest[num_bytes:]
        return taken

    def number(self, size: int, most: int, least: int = 0) -> int:
        """Consume a big-endian unsigned integer of ``size`` bytes within bounds."""
        value = int.from_bytes(self.view(size), "big")
        if not least <= value <= most:
            raise unreadable(f"{value} out of range")
        return value

    def count(self, size: int, most: int) -> int:
        """Consume the number of parts that follow, each of ``size`` bytes; never more than there are bytes for."""
        parts = self.number(4, most)
        if parts * size > len(self.rest):
            raise unreadable("fewer parts than announced")
        return parts

    def by_member(self, size: int) -> dict[int, bytes]:
        """Consume byte strings of one size, each with the member that it belongs to; none may come twice."""
        parts = self.count(4 + size, MAX_CLIENTS)
        found = {self.number(4, MAX_CLIENTS): self.take(size) for _ in range(parts)}
        if len(found) < parts:
            raise unreadable("two parts for one member")
        return found

    def members(self) -> tuple[frozenset[int], int]:
        """Consume a set of cohort members, written by :func:`pack_members`, and the size of the cohort."""
        cohort_size = self.number(4, MAX_CLIENTS, 1)
        bits = "".join(f"{byte:08b}" for byte in self.view((cohort_size + 7) // 8))
        if "1" in bits[cohort_size:]:
            raise unreadable("members beyond the cohort")
        return frozenset(member for member, bit in enumerate(bits) if bit == "1"), cohort_size

    def end(self) -> None:
        """Refuse bytes beyond the end of the message."""
        if len(self.rest):
            raise unreadable("more than a message has")


def unreadable(given: str) -> InvalidMessage:
    """The error for a message that cannot be parsed."""
    return InvalidMessage(given, "a message of secure aggregation", "Both sides must run the same fairfold.")


def pack_members(members: Set[int], cohort_size: int) -> bytes:
    """A set of cohort members as a bit mask, preceded by the size of the cohort."""
    bits = bytearray((cohort_size + 7) // 8)
    for member in members:
        bits[member // 8] |= 128 >> member % 8
    return struct.pack(">I", cohort_size) + bits


def pack_by_member(parts: dict[int, bytes]) -> bytes:
    """Byte strings of one size, each preceded by its member; read by :meth:`Reader.by_member`."""
    return struct.pack(">I", len(parts)) + b"".join(struct.pack(">I", member) + part for member, part in parts.items())
