"""What comes from a disk or a network is believed only once it is known to be what was written: the one place for that.

Files of fairfold hold checksums of themselves, in one of three forms:

- plain values are JSON with a SHA-256 among them (:func:`sealed_values`, :func:`values_in`);
- lines, which may be appended one by one, each end with a CRC-32 (:func:`sealed_line`, :func:`lines_in`);
- tensors have a SHA-256 in their metadata (:mod:`fairfold.runs.tensors`).

Files that others list are compared with the list (:func:`require_same`). Whoever reads says once, in :func:`reading`,
what was needed and what to do. So a flipped bit is an error with words, or one that changes nothing that is read.
"""

import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairfold.errors import FairfoldError
from fairfold.files import checksum

CHECKSUM = "checksum"
LARGEST = 1 << 28
"""Bytes of a file that is read as a whole; tensors and columns are not."""

DEEPEST = 64
"""Tables and lists within each other. Python's own bound is not one of memory: from 3.12 on it is 10,000 and more."""

SENSELESS = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""What readers stumble over where something was written that makes no sense."""


class Damaged(ValueError):
    """Something is not what was written, and why."""


@contextlib.contextmanager
def reading(what: Path | str, error: type[FairfoldError], needed: str, remedy: str) -> Iterator[None]:
    """Whatever goes wrong while something is read is an error that names it, and says what to do."""
    try:
        yield
    except FairfoldError:
        raise
    except OSError as problem:
        raise error(f"{what}: {problem.strerror or problem}", needed, remedy) from None
    except SENSELESS as problem:
        why = str(problem) if isinstance(problem, Damaged) else f"{type(problem).__name__}: {problem}"
        raise error(f"{what}: damaged ({why[:200]})", needed, remedy) from None


def content_of(path: Path, largest: int = LARGEST) -> bytes:
    """A file that is small by what it is."""
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise Damaged(f"more than {largest:,} bytes")
    return content


_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def _require_shallow(text: str) -> None:
    """Refuse JSON in which too much stands within each other, before anything is made of it."""
    depth = 0
    if text.count("[") + text.count("{") > DEEPEST:
        for found in _STRINGS_AND_BRACKETS.finditer(text):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(text[found.start()], 0)
            if depth > DEEPEST:
                raise ValueError(f"more than {DEEPEST} tables or lists within each other")


def table_in(content: bytes | str) -> dict[str, Any]:
    """JSON that has to be a table; nothing says that it is what was written."""
    try:
        text = content if isinstance(content, str) else content.decode()
        _require_shallow(text)
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise Damaged(f"not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise Damaged("no table")
    return found


def checksum_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def sealed_values(values: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Plain values as JSON, on one line or indented, with their checksum."""
    plain = json.loads(json.dumps(dict(values)))  # as they will be read: with texts as keys, and lists for tuples
    text = json.dumps(plain | {CHECKSUM: checksum_of(plain)}, indent=indent, ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")  # half a character of somebody's name, as JSON has it


def values_in(content: bytes | str) -> dict[str, Any]:
    """The same values, if they are."""
    found = table_in(content)
    if found.pop(CHECKSUM, None) != checksum_of(found):
        raise Damaged("another checksum than it says, or none")
    return found


def sealed_line(text: str, separator: str = " ") -> str:
    """A line with its checksum, and its end."""
    return f"{text}{separator}{zlib.crc32(text.encode()):08x}\n"


def line_in(line: bytes, separator: str = " ") -> str | None:
    """The text of such a line, given without its end; None where it is not what was written."""
    text = line.decode(errors="replace").rpartition(separator)[0]
    return text if line + b"\n" == sealed_line(text, separator).encode() else None


def lines_in(content: bytes, separator: str = " ", first: int = 1) -> list[str]:
    """The texts of all such lines, but for a last one that a kill cut short; ``first`` is the first one's number."""
    *lines, last = content.split(b"\n")
    found = []
    for number, line in enumerate(lines, start=first):
        text = line_in(line, separator)
        if text is None:
            raise Damaged(f"line {number} is not what was written")
        found.append(text)
    if line_in(last[:-1], separator) is not None:  # it was not cut short: its end is another one
        raise Damaged(f"line {first + len(lines)} is not what was written")
    return found


def require_same(path: Path, size: int, digest: str | None = None) -> None:
    """Refuse a file that is missing, or not of this size, or not of this SHA-256 where one is given."""
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    if (found := path.stat().st_size) != size:
        raise Damaged(f"{path.name} has {found} of {size} bytes")
    if digest is not None and checksum(path) != digest:
        raise Damaged(f"{path.name} has another checksum")
