"""How much a source may make of itself: bounds on lines and on what is decompressed, which a user can raise.

A few kilobytes of gzip can stand for gigabytes. Honest data does not come near these bounds; what does is refused
before memory or disk is full.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from fairfold.errors import InvalidData

RATIO = "FAIRFOLD_MAX_RATIO"
LINE = "FAIRFOLD_MAX_LINE"
TOTAL = "FAIRFOLD_MAX_TOTAL"
UNSUSPICIOUS = 64 << 20
"""Bytes that may come out of any file, whatever the ratio: short files of zeros are common and harm nobody."""


@dataclass(frozen=True)
class Limits:
    """Bounds on one file.

    Attributes:
        ratio: Bytes that may come out of one compressed byte. Text gives 3 to 30, and gzip at most about 1,000.
        line: Bytes of a line. A user with a million items fills less than ten million.
        total: Bytes that may come out of one compressed file.
    """

    ratio: int = 200
    line: int = 64 << 20
    total: int = 1 << 40


def limits() -> Limits:
    """The bounds, with what the environment says about them."""
    usual = Limits()
    return Limits(_given(RATIO, usual.ratio), _given(LINE, usual.line), _given(TOTAL, usual.total))


def _given(name: str, usual: int) -> int:
    text = os.environ.get(name)
    if not text:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) >= 1):
        raise InvalidData(f"{name}={text[:40]}", "a whole number of at least 1", f"Change or unset {name}.")
    return int(text)


def check_unpacked(path: Path, packed: int, unpacked: int) -> None:
    """Refuse a file of which ``packed`` bytes have given, or will give, so many."""
    if unpacked <= UNSUSPICIOUS:
        return
    bounds = limits()
    if unpacked > bounds.ratio * max(packed, 1):
        raise InvalidData(
            f"{path.name} makes {unpacked:,} bytes or more of {packed:,}",
            f"at most {bounds.ratio} bytes from one",
            f"Check where the file comes from; if it is right, raise {RATIO}.",
        )
    if unpacked > bounds.total:
        raise InvalidData(
            f"{path.name} unpacks to more than {bounds.total:,} bytes",
            "less",
            f"Check where the file comes from; if it is right, raise {TOTAL}.",
        )


def check_line(path: Path, length: int) -> None:
    """Refuse a line that goes on for too long."""
    most = limits().line
    if length > most:
        raise InvalidData(
            f"{path.name} has a line of more than {most:,} bytes",
            "lines that end, and quotes that are closed",
            f"Check the file; if it is right, raise {LINE}.",
        )
