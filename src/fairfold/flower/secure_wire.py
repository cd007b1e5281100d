"""Messages of secure sums as Flower's records, without torch."""

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fairfold.flower.facts import facts_in, refused
from fairfold.flower.protocol import FACTS, SECURE, VERSION

LARGEST_MESSAGE = 1 << 26  # bytes of a message that is no vector: a cohort of 100,000 devices


def pack_secure(message: bytes) -> RecordDict:
    """A message of a secure sum."""
    return RecordDict({FACTS: ConfigRecord({"version": VERSION, SECURE: message})})


def secure_in(content: RecordDict) -> bytes:
    """The same again."""
    found = facts_in(content).get(SECURE)
    if not isinstance(found, bytes) or len(found) > LARGEST_MESSAGE:
        raise refused("no message of a secure sum", "one")
    return found


def has_secure(content: RecordDict) -> bool:
    """Whether what is asked for is to be said under masks."""
    return SECURE in facts_in(content)


def with_secure(content: RecordDict, message: bytes) -> RecordDict:
    """An order or a question that is to be answered under masks."""
    copy = content.copy()
    copy[FACTS] = ConfigRecord(dict(facts_in(content)) | {SECURE: message})
    return copy


def pack_masked(message: bytes) -> RecordDict:
    """A vector under its masks: as an array, which Flower sends in pieces."""
    words = Array(numpy.frombuffer(message, dtype=numpy.uint8))
    return RecordDict({SECURE: ArrayRecord({SECURE: words}), FACTS: ConfigRecord({"version": VERSION})})


def masked_in(content: RecordDict) -> memoryview:
    """The same again, as bytes: what stands in them is for the reader of secure messages to say."""
    facts_in(content)
    record = content.get(SECURE)
    if not isinstance(record, ArrayRecord) or list(record) != [SECURE] or set(content) != {SECURE, FACTS}:
        raise refused("an answer that is not under masks", "a secure sum's vector alone")
    array = record[SECURE]
    if array.stype != "numpy.ndarray" or array.dtype != "uint8" or len(array.shape) != 1:
        raise refused("wrong type", "bytes")
    size = int(array.shape[0])
    if not 0 <= size < len(array.data) <= size + 4_096:
        raise refused("wrong size", f"{size} bytes")
    return memoryview(array.data)[len(array.data) - size :]
