"""Reads files with checksums, and refuses those that are damaged.

Files of fairfold hold checksums of themselves, in one of three forms:

- JSON objects with a SHA-256 among their keys (:func:`with_checksum`, :func:`parse_with_checksum`);
- lines, appended one by one, each with a CRC-32 at its end (:func:`line_with_checksum`, :func:`parse_lines`);
- tensors with a SHA-256 in their metadata (:mod:`fairfold.runs.tensors`).

Files with a size and checksum elsewhere are compared with these (:func:`verify_file`). :func:`read_errors` turns what
goes wrong into an error that says what was needed and what to do.
"""

import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fairfold.errors import FairfoldError

CHECKSUM = "checksum"
CHUNK_BYTES = 8 << 20
"""Bytes read at a time."""

MAX_FILE_BYTES = 1 << 28
"""Largest file that is read as a whole."""

MAX_DEPTH = 64
"""Deepest nesting of JSON objects and lists; Python's own bound, 10,000 and more, does not bound memory."""

PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""Errors of readers on invalid content."""


class Damaged(ValueError):
    """Content that is not what was written, and why."""


@contextlib.contextmanager
def read_errors(what: Path | str, error: type[FairfoldError], needed: str, remedy: str) -> Iterator[None]:
    """Turn any error of reading into one that names the source, what was needed and what to do."""
    try:
        yield
    except FairfoldError:
        raise
    except OSError as problem:
        raise error(f"{what}: {problem.strerror or problem}", needed, remedy) from None
    except PARSE_ERRORS as problem:
        why = str(problem) if isinstance(problem, Damaged) else f"{type(problem).__name__}: {problem}"
        raise error(f"{what}: damaged ({why[:200]})", needed, remedy) from None


def read_limited(path: Path, largest: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file; an error where it is larger than allowed."""
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise Damaged(f"more than {largest:,} bytes")
    return content


_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def _require_shallow(text: str) -> None:
    """Raise an error for JSON that is nested too deeply, before it is parsed."""
    depth = 0
    if text.count("[") + text.count("{") > MAX_DEPTH:
        for found in _STRINGS_AND_BRACKETS.finditer(text):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(text[found.start()], 0)
            if depth > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} tables or lists within each other")


def parse_json_object(content: bytes | str) -> dict[str, Any]:
    """Parse JSON that has to be an object, without a checksum."""
    try:
        text = content if isinstance(content, str) else content.decode()
        _require_shallow(text)
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise Damaged(f"not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise Damaged("no table")
    return found


def json_checksum(values: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def with_checksum(values: Mapping[str, Any], indent: int | None = None) -> bytes:
    """JSON of values with their checksum, on one line or indented."""
    plain = json.loads(json.dumps(dict(values)))  # as it will be parsed: keys as text, tuples as lists
    text = json.dumps(plain | {CHECKSUM: json_checksum(plain)}, indent=indent, ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")  # half a surrogate pair, as JSON escapes it


def parse_with_checksum(content: bytes | str) -> dict[str, Any]:
    """Parse JSON with a checksum; :class:`Damaged` is raised where it does not match."""
    found = parse_json_object(content)
    if found.pop(CHECKSUM, None) != json_checksum(found):
        raise Damaged("another checksum than it says, or none")
    return found


def line_with_checksum(text: str, separator: str = " ") -> str:
    """A line of text with its checksum and a newline."""
    return f"{text}{separator}{zlib.crc32(text.encode()):08x}\n"


def parse_line(line: bytes, separator: str = " ") -> str | None:
    """The text of a line with a checksum, given without its newline; None where it does not match."""
    text = line.decode(errors="replace").rpartition(separator)[0]
    return text if line + b"\n" == line_with_checksum(text, separator).encode() else None


def parse_lines(content: bytes, separator: str = " ", first: int = 1) -> list[str]:
    """The texts of lines with checksums, but for a last one that was cut short; ``first`` numbers the first."""
    *lines, last = content.split(b"\n")
    found = []
    for number, line in enumerate(lines, start=first):
        text = parse_line(line, separator)
        if text is None:
            raise Damaged(f"line {number} is not what was written")
        found.append(text)
    if parse_line(last[:-1], separator) is not None:  # it was not cut short: its end is another one
        raise Damaged(f"line {first + len(lines)} is not what was written")
    return found


def file_checksum(path: Path, advance: Callable[[int], None] = lambda _done: None, algorithm: str = "sha256") -> str:
    """The hexadecimal checksum of a file; ``advance`` is called with the bytes of each chunk read."""
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def verify_file(path: Path, size: int, digest: str | None = None) -> None:
    """Raise :class:`Damaged` for a file that is missing, or of another size or SHA-256."""
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    if (found := path.stat().st_size) != size:
        raise Damaged(f"{path.name} has {found} of {size} bytes")
    if digest is not None and file_checksum(path) != digest:
        raise Damaged(f"{path.name} has another checksum")
