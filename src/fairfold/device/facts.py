"""Parts of messages that are not vectors, read with type and range checks: ``flower.messages`` without Flower."""

from typing import Any

from fairfold.checksums import parse_json_object
from fairfold.errors import InvalidMessage
from fairfold.flower.protocol import HEX_ID, WINDOW

MAX_ITEMS, MAX_TEXT = 2**32, 1 << 16


def invalid_message(given: str, needed: str) -> InvalidMessage:
    """Return the error for a message that does not follow the protocol."""
    return InvalidMessage(given, needed, "Both sides must run the same fairfold.")


def number_in(facts: dict[str, Any], key: str, most: int, least: int = 0) -> int:
    """Read an integer within bounds."""
    number = facts.get(key)
    if type(number) is not int or not least <= number <= most:
        raise invalid_message(f"no {key} in range", f"a number from {least} to {most}")
    return number


def id_in(facts: dict[str, Any], key: str) -> int:
    """Read an id, written in hexadecimal digits."""
    text = facts.get(key)
    if not isinstance(text, str) or not HEX_ID.fullmatch(text):
        raise invalid_message(f"no {key}", "sixteen hexadecimal digits")
    return int(text, 16)


def table_in(facts: dict[str, Any], key: str) -> dict[str, Any]:
    """Read a JSON object of bounded length."""
    text = facts.get(key)
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise invalid_message(f"no readable {key}", f"a text of at most {MAX_TEXT} characters")
    try:
        return parse_json_object(text)
    except ValueError as error:
        raise invalid_message(f"{key} that cannot be read ({str(error)[:100]})", "a JSON object") from None


def window_in(facts: dict[str, Any]) -> tuple[int, range]:
    """Read the size of the catalogue and a window of its items."""
    num_items = number_in(facts, "items", MAX_ITEMS, 1)
    start = number_in(facts, "start", num_items - 1)
    return num_items, range(start, number_in(facts, "stop", min(num_items, start + WINDOW), start + 1))
