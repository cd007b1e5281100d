"""Parts of messages that are not tensors, read with type and range checks; messages of secure aggregation. No torch."""

from typing import Any

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fairfold.errors import InvalidMessage
from fairfold.flower.protocol import FACTS, HEX_ID, SECURE, VERSION

MAX_TEXT = 1 << 16
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


def text_in(facts: ConfigRecord, key: str, longest: int = MAX_TEXT) -> str:
    """Read a text of bounded length."""
    text = facts.get(key)
    if not isinstance(text, str) or len(text) > longest:
        raise invalid_message(f"no readable {key}", f"a text of at most {longest} characters")
    return text


def number_in(facts: ConfigRecord, key: str, most: int, least: int = 0) -> int:
    """Read an integer within bounds."""
    number = facts.get(key)
    if type(number) is not int or not least <= number <= most:
        raise invalid_message(f"no {key} in range", f"a number from {least} to {most}")
    return number


def id_in(facts: ConfigRecord, key: str) -> int:
    """Read the id of an update, a run or a client, written in hexadecimal digits."""
    text = facts.get(key)
    if not isinstance(text, str) or not HEX_ID.fullmatch(text):
        raise invalid_message(f"no {key}", "sixteen hexadecimal digits")
    return int(text, 16)


def invalid_message(given: str, needed: str) -> InvalidMessage:
    """Return the error for a message that does not follow the protocol."""
    return InvalidMessage(given, needed, "Both sides must run the same fairfold.")


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
