"""What stands in a message beside its vectors: read with its type and its range, without torch."""

from flwr.app import ConfigRecord, RecordDict

from fairfold.errors import InvalidMessage
from fairfold.flower.protocol import DIGITS, FACTS, VERSION

LONGEST_TEXT = 1 << 16


def facts_in(content: RecordDict) -> ConfigRecord:
    """The facts of a message, of this version of the protocol."""
    facts = content.get(FACTS)
    if not isinstance(facts, ConfigRecord):
        raise refused("a message without facts", f"a record {FACTS!r}")
    version = facts.get("version")
    if type(version) is not int or version != VERSION:
        raise refused("another version of the protocol", f"version {VERSION}")
    return facts


def text_in(facts: ConfigRecord, key: str, longest: int = LONGEST_TEXT) -> str:
    """A text of bounded length."""
    text = facts.get(key)
    if not isinstance(text, str) or len(text) > longest:
        raise refused(f"no readable {key}", f"a text of at most {longest} characters")
    return text


def number_in(facts: ConfigRecord, key: str, most: int, least: int = 0) -> int:
    """A whole number within bounds."""
    number = facts.get(key)
    if type(number) is not int or not least <= number <= most:
        raise refused(f"no {key} in range", f"a number from {least} to {most}")
    return number


def word_in(facts: ConfigRecord, key: str) -> int:
    """The number of a word, of a run or of a device: written in hexadecimal digits."""
    text = facts.get(key)
    if not isinstance(text, str) or not DIGITS.fullmatch(text):
        raise refused(f"no {key}", "sixteen hexadecimal digits")
    return int(text, 16)


def refused(given: str, needed: str) -> InvalidMessage:
    """The refusal of a message."""
    return InvalidMessage(given, needed, "Both sides must run the same fairfold.")
