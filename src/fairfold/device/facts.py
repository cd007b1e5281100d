"""Parts of messages that are not vectors, read with type and range checks by devices and servers, without Flower."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from fairfold.checksums import parse_json_object
from fairfold.errors import InvalidMessage
from fairfold.flower.protocol import HEX_ID, WINDOW

MAX_ITEMS, MAX_TEXT, MAX_TABLE_ROWS = 2**32, 1 << 16, 4_096
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?|\.\d+)\s*(x|×|{'|'.join(UNITS)})", re.IGNORECASE)


def amount_of(capacity: str) -> tuple[Fraction, str] | None:
    """The number and the unit, in small letters, of a capacity: ``40MB`` or ``16x``; None for another form."""
    found = _AMOUNT.fullmatch(capacity.strip())
    return (Fraction(found[1]), found[2].lower()) if found is not None else None


def budget_of(capacity: str) -> Fraction | None:
    """Bytes of a capacity in bytes; None for a share of the model."""
    amount = amount_of(capacity)
    return amount[0] * UNITS[amount[1]] if amount is not None and amount[1] in UNITS else None


def invalid_message(given: str, needed: str) -> InvalidMessage:
    """Return the error for a message that does not follow the protocol."""
    return InvalidMessage(given, needed, "Both sides must run the same fairfold.")


def text_in(facts: Mapping[str, Any], key: str, longest: int = MAX_TEXT) -> str:
    """Read a text of bounded length."""
    text = facts.get(key)
    if not isinstance(text, str) or len(text) > longest:
        raise invalid_message(f"no readable {key}", f"a text of at most {longest} characters")
    return text


def number_in(facts: Mapping[str, Any], key: str, most: int, least: int = 0) -> int:
    """Read an integer within bounds."""
    number = facts.get(key)
    if type(number) is not int or not least <= number <= most:
        raise invalid_message(f"no {key} in range", f"a number from {least} to {most}")
    return number


def id_in(facts: Mapping[str, Any], key: str) -> int:
    """Read the id of an update, a run or a client, written in hexadecimal digits."""
    text = facts.get(key)
    if not isinstance(text, str) or not HEX_ID.fullmatch(text):
        raise invalid_message(f"no {key}", "sixteen hexadecimal digits")
    return int(text, 16)


def table_in(facts: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Read a JSON object of bounded length."""
    try:
        table = parse_json_object(text_in(facts, key))
        if len(table) > MAX_TABLE_ROWS:
            raise ValueError(f"{len(table)} rows")
    except InvalidMessage:
        raise
    except ValueError as error:
        raise invalid_message(f"{key} that cannot be read ({str(error)[:100]})", "a JSON object") from None
    return table


def window_in(facts: Mapping[str, Any]) -> tuple[int, range]:
    """Read the size of the catalogue and a window of its items."""
    num_items = number_in(facts, "items", MAX_ITEMS, 1)
    start = number_in(facts, "start", num_items - 1)
    return num_items, range(start, number_in(facts, "stop", min(num_items, start + WINDOW), start + 1))
