"""Messages as Flower's records: their facts, with the version of the protocol, and secure aggregation. No torch."""

from typing import Any

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fairfold.device.facts import invalid_message
from fairfold.flower.protocol import FACTS, SECURE, VERSION

MAX_SECURE_MESSAGE = 1 << 26  # bytes of a message that is no vector: enough for a cohort of 100,000 clients


def make_facts(**facts: Any) -> ConfigRecord:
    """Return facts as a record, with the version of the protocol."""
    return ConfigRecord({"version": VERSION, **facts})


def facts_in(content: RecordDict) -> ConfigRecord:
    """Return the facts of a message; refuse another version of the protocol."""
    facts = content.get(FACTS)
    if not isinstance(facts, ConfigRecord):
        raise invalid_message("a message without facts", f"a record {FACTS!r}")
    version = facts.get("version")
    if type(version) is not int or version != VERSION:
        raise invalid_message("another version of the protocol", f"version {VERSION}")
    return facts


def with_facts(content: RecordDict, **facts: Any) -> RecordDict:
    """Return a shallow copy of a message with some facts replaced or added."""
    copy = content.copy()
    copy[FACTS] = ConfigRecord(dict(facts_in(content)) | facts)
    return copy


# -- secure aggregation ------------------------------------------------------------------------------------------------


def pack_secure(message: bytes) -> RecordDict:
    """Wrap a message of secure aggregation in records."""
    return RecordDict({FACTS: make_facts(**{SECURE: message})})


def secure_in(content: RecordDict) -> bytes:
    """Read the message of secure aggregation from records."""
    message = facts_in(content).get(SECURE)
    if not isinstance(message, bytes) or len(message) > MAX_SECURE_MESSAGE:
        raise invalid_message("no message of secure aggregation", "one")
    return message


def pack_masked(message: bytes) -> RecordDict:
    """Wrap a masked vector in records, as an array, which Flower sends in pieces."""
    array = Array(numpy.frombuffer(message, dtype=numpy.uint8))
    return RecordDict({SECURE: ArrayRecord({SECURE: array}), FACTS: make_facts()})


def masked_in(content: RecordDict) -> memoryview:
    """Read the bytes of a masked vector; their content is checked by :mod:`fairfold.privacy.secure.messages`."""
    facts_in(content)
    record = content.get(SECURE)
    if not isinstance(record, ArrayRecord) or list(record) != [SECURE] or set(content) != {SECURE, FACTS}:
        raise invalid_message("a reply that is not masked", "a masked vector alone")
    array = record[SECURE]
    if array.stype != "numpy.ndarray" or array.dtype != "uint8" or len(array.shape) != 1:
        raise invalid_message("wrong type", "bytes")
    size = int(array.shape[0])
    if not 0 <= size < len(array.data) <= size + 4_096:
        raise invalid_message("wrong size", f"{size} bytes")
    return memoryview(array.data)[len(array.data) - size :]
