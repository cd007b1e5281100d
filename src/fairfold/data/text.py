"""Read text files, plain or gzip, in blocks of whole lines, within limits on lines and on decompression."""

import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from fairfold.data.cache import Advance
from fairfold.errors import InvalidData

BLOCK = 16 << 20
HEAD = 1 << 16
NOT_UTF8 = "lines that are not UTF-8, read as Latin-1"
# Limits, so that a few kilobytes of gzip cannot fill memory or disk; users can raise them.
RATIO, LINE, TOTAL = "FAIRFOLD_MAX_RATIO", "FAIRFOLD_MAX_LINE", "FAIRFOLD_MAX_TOTAL"
DEFAULT_LIMITS = {
    RATIO: 200,  # decompressed bytes per compressed byte; text has 3 to 30, gzip can reach about 1,000
    LINE: 64 << 20,  # bytes of a line; a user with a million items fills less than ten million
    TOTAL: 1 << 40,  # decompressed bytes of one file
}
UNSUSPICIOUS = 64 << 20  # decompressed bytes that any file may have, whatever the ratio


def no_such_file(path: Path) -> InvalidData:
    """Make the error for a path that does not exist."""
    return InvalidData(f"{path} does not exist", "a file that can be read", "Check the path.")


def unreadable(path: Path, error: OSError) -> InvalidData:
    """Make the error for a file that the operating system refuses to read."""
    given = f"{str(path)[:200]} cannot be read ({error.strerror or error})"
    return InvalidData(given, "a file that can be read", "Check the path and its permissions.")


def head(path: Path) -> bytes:
    """Start of a text file, decompressed, without a byte order mark, lines ended by line feeds."""
    piece = _without_mark(path, next(pieces(path, HEAD), b""))
    return piece.replace(b"\r", b"\n") if _ends_in_returns(piece) else piece


def _ends_in_returns(start: bytes) -> bool:
    """True if lines end in carriage returns alone, as on old systems."""
    return b"\r" in start[:-1] and b"\n" not in start


def blocks(
    path: Path,
    *,
    size: int = BLOCK,
    quoted: bool = False,
    encoding: str = "utf-8",
    repairs: Counter[str] | None = None,
    advance: Advance = lambda _done: None,
) -> Iterator[bytes]:
    """Yield a text file, plain or gzip, as UTF-8 blocks of about ``size`` bytes that end at the end of a line.

    Where fields are ``quoted`` they may hold line breaks, and no block is cut inside one. Lines of a UTF-8 file that
    are not UTF-8 are read as Latin-1 and counted in ``repairs``.
    """
    counted = Counter[str]() if repairs is None else repairs
    returns = _ends_in_returns(next(pieces(path, HEAD), b""))
    rest = b""
    for number, piece in enumerate(pieces(path, size, advance)):
        block = piece if number else _without_mark(path, piece)
        block = block.replace(b"\r", b"\n") if returns else block
        if rest:
            check_line(path, len(rest))
            block = rest + block
        cut = _end_of_lines(block, quoted)
        rest = block[cut:]
        if cut:
            yield _as_utf8(block[:cut], encoding, counted)
    if rest.strip():
        yield _as_utf8(rest, encoding, counted)


def pieces(path: Path, size: int, advance: Advance = lambda _done: None) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed where it is gzip, ``size`` at a time, within the limits."""
    position = unpacked = 0
    try:
        raw: BinaryIO = path.open("rb")
        packed = raw.read(2) == b"\x1f\x8b"  # the magic number of gzip
        raw.seek(0)
    except FileNotFoundError as error:
        raise no_such_file(path) from error
    except OSError as error:
        raise unreadable(path, error) from error
    file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
    with raw, file:
        while True:
            try:
                piece = file.read(size)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                remedy = "Download the file again; compare its size and checksum with the publisher's."
                given = f"{path.name} is truncated or damaged ({error})"
                raise InvalidData(given, "a whole gzip file", remedy) from error
            except OSError as error:
                raise unreadable(path, error) from error
            if not piece:
                return
            unpacked += len(piece)
            if packed:
                check_unpacked(path, raw.tell(), unpacked)
            advance(raw.tell() - position)
            position = raw.tell()
            yield piece


def _without_mark(path: Path, block: bytes) -> bytes:
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InvalidData(f"{path.name} is UTF-16", "UTF-8 or Latin-1 text", "Save it as UTF-8.")
    return block.removeprefix(b"\xef\xbb\xbf")


def _end_of_lines(block: bytes, quoted: bool) -> int:
    """End of the last whole line of a block; 0 if it holds none."""
    cut = block.rfind(b"\n") + 1
    if not quoted or not cut:
        return cut
    inside = block.count(b'"', 0, cut) % 2 == 1
    while cut and inside:
        earlier = block.rfind(b"\n", 0, cut - 1) + 1
        inside ^= block.count(b'"', earlier, cut) % 2 == 1
        cut = earlier
    return cut


def _as_utf8(block: bytes, encoding: str, repairs: Counter[str]) -> bytes:
    if encoding != "utf-8":
        return block.decode(encoding).encode()
    try:
        block.decode()
    except UnicodeDecodeError:
        if b"\n" in block:
            return b"\n".join(_as_utf8(line, encoding, repairs) for line in block.split(b"\n"))
        repairs[NOT_UTF8] += 1
        return block.decode("latin-1").encode()
    return block


def limit(name: str) -> int:
    """Value of a limit: from the environment, else the default."""
    text = os.environ.get(name)
    if not text:
        return DEFAULT_LIMITS[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) >= 1):
        raise InvalidData(f"{name}={text[:40]}", "a whole number of at least 1", f"Change or unset {name}.")
    return int(text)


def check_unpacked(path: Path, packed: int, unpacked: int) -> None:
    """Refuse a file whose ``packed`` bytes decompress to too many."""
    if unpacked <= UNSUSPICIOUS:
        return
    ratio, total = limit(RATIO), limit(TOTAL)
    remedy = "Check where the file comes from; if it is right, raise"
    if unpacked > ratio * max(packed, 1):
        given = f"{path.name} makes {unpacked:,} bytes or more of {packed:,}"
        raise InvalidData(given, f"at most {ratio} bytes from one", f"{remedy} {RATIO}.")
    if unpacked > total:
        given = f"{path.name} unpacks to more than {total:,} bytes"
        raise InvalidData(given, f"at most {total:,} bytes", f"{remedy} {TOTAL}.")


def check_line(path: Path, length: int) -> None:
    """Refuse a line that is too long."""
    if length > limit(LINE):
        given = f"{path.name} has a line of more than {limit(LINE):,} bytes"
        remedy = f"Check the file; if it is right, raise {LINE}."
        raise InvalidData(given, "lines that end, and quotes that are closed", remedy)
