"""The one reader of bytes: type, size and range are checked before anything is made of them."""

import struct
from collections.abc import Set

import numpy

from fairfold.errors import InvalidMessage

MOST_DEVICES = 1 << 16


class Reader:
    """Takes a message apart; whatever is not there, too much or out of range is refused."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.left = memoryview(data)

    def take(self, many: int) -> bytes:
        """So many bytes."""
        return bytes(self.view(many))

    def view(self, many: int) -> memoryview:
        """The same without a copy."""
        if many > len(self.left):
            raise unreadable("a message that ends too early")
        found, self.left = self.left[:many], self.left[many:]
        return found

    def number(self, size: int, most: int, least: int = 0) -> int:
        """A whole number of some bytes, within bounds."""
        found = int.from_bytes(self.view(size), "big")
        if not least <= found <= most:
            raise unreadable(f"{found} out of range")
        return found

    def count(self, size: int, most: int) -> int:
        """How many parts of a size follow: never more than there are bytes for."""
        found = self.number(4, most)
        if found * size > len(self.left):
            raise unreadable("fewer parts than announced")
        return found

    def end(self) -> None:
        """Nothing may be left."""
        if len(self.left):
            raise unreadable("more than a message has")


def unreadable(given: str) -> InvalidMessage:
    """The refusal of a message that cannot be read."""
    return InvalidMessage(given, "a message of a secure sum", "Both sides must run the same fairfold.")


def set_bytes(members: Set[int], of: int) -> bytes:
    """Some of the members of a cohort, as they travel."""
    chosen = numpy.zeros(of, dtype=bool)
    chosen[list(members)] = True
    return struct.pack(">I", of) + numpy.packbits(chosen).tobytes()


def set_in(reader: Reader) -> tuple[frozenset[int], int]:
    """The same again, and how many members there are."""
    of = reader.number(4, MOST_DEVICES, 1)
    bits = numpy.unpackbits(numpy.frombuffer(reader.take((of + 7) // 8), dtype=numpy.uint8))
    if bits[of:].any():
        raise unreadable("members beyond the cohort")
    return frozenset(bits.nonzero()[0].tolist()), of
