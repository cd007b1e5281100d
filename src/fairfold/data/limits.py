"""How much a source may make of itself: bounds on lines and on what is decompressed, which a user can raise.

A few kilobytes of gzip can stand for gigabytes. Honest data does not come near these bounds; what does is refused
before memory or disk is full.
"""

import os
from pathlib import Path

from fairfold.errors import InvalidData

RATIO, LINE, TOTAL = "FAIRFOLD_MAX_RATIO", "FAIRFOLD_MAX_LINE", "FAIRFOLD_MAX_TOTAL"
USUAL = {
    RATIO: 200,  # bytes that may come out of one compressed byte; text gives 3 to 30, and gzip at most about 1,000
    LINE: 64 << 20,  # bytes of a line; a user with a million items fills less than ten million
    TOTAL: 1 << 40,  # bytes that may come out of one compressed file
}
UNSUSPICIOUS = 64 << 20
"""Bytes that may come out of any file, whatever the ratio: short files of zeros are common and harm nobody."""


def limit(name: str) -> int:
    """A bound: what the environment says about it, else the usual one."""
    text = os.environ.get(name)
    if not text:
        return USUAL[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) >= 1):
        raise InvalidData(f"{name}={text[:40]}", "a whole number of at least 1", f"Change or unset {name}.")
    return int(text)


def check_unpacked(path: Path, packed: int, unpacked: int) -> None:
    """Refuse a file of which ``packed`` bytes have given, or will give, so many."""
    if unpacked <= UNSUSPICIOUS:
        return
    ratio, total = limit(RATIO), limit(TOTAL)
    remedy = "Check where the file comes from; if it is right, raise"
    if unpacked > ratio * max(packed, 1):
        given = f"{path.name} makes {unpacked:,} bytes or more of {packed:,}"
        raise InvalidData(given, f"at most {ratio} bytes from one", f"{remedy} {RATIO}.")
    if unpacked > total:
        raise InvalidData(
            f"{path.name} unpacks to more than {total:,} bytes", f"at most {total:,} bytes", f"{remedy} {TOTAL}."
        )


def check_line(path: Path, length: int) -> None:
    """Refuse a line that goes on for too long."""
    most = limit(LINE)
    if length > most:
        raise InvalidData(
            f"{path.name} has a line of more than {most:,} bytes",
            "lines that end, and quotes that are closed",
            f"Check the file; if it is right, raise {LINE}.",
        )
