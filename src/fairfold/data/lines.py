"""Text files in blocks of whole lines: plain or gzip, any size, in the memory of one block."""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from fairfold.data.files import Advance
from fairfold.data.limits import check_line, check_unpacked
from fairfold.errors import InvalidData

BLOCK = 16 << 20
HEAD = 1 << 16
NOT_UTF8 = "lines that are not UTF-8, read as Latin-1"


def no_such_file(path: Path) -> InvalidData:
    """The error for a path where there is nothing."""
    return InvalidData(f"{path} does not exist", "a file that can be read", "Check the path.")


def unreadable(path: Path, error: OSError) -> InvalidData:
    """The error for a file that the system does not let us read."""
    return InvalidData(
        f"{str(path)[:200]} cannot be read ({error.strerror or error})",
        "a file that can be read",
        "Check the path and its permissions.",
    )


def head(path: Path) -> bytes:
    """The first bytes of a text file, decompressed, without a byte order mark, lines ended by line feeds."""
    piece = _without_mark(path, next(pieces(path, HEAD), b""))
    return piece.replace(b"\r", b"\n") if _ends_in_returns(piece) else piece


def _ends_in_returns(start: bytes) -> bool:
    """Whether the lines of a file, by its start, end in carriage returns alone, as they once did on some machines."""
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
    """Yield a text file, plain or gzip, as UTF-8 blocks that end at the end of a line.

    Lines may end in a carriage return alone, if all of them do; one longer than ``size`` makes a longer block. Where
    fields are ``quoted`` they may hold line breaks, and no block is cut inside one. Lines of a UTF-8 file that are not
    UTF-8 are read as Latin-1 and counted in ``repairs``.
    """
    counted = Counter[str]() if repairs is None else repairs
    returns = _ends_in_returns(next(pieces(path, HEAD), b""))
    rest = b""
    first = True
    for piece in pieces(path, size, advance):
        block = _without_mark(path, piece) if first else piece
        if returns:
            block = block.replace(b"\r", b"\n")
        first = False
        if rest:
            check_line(path, len(rest))
            block = rest + block
        cut = _end_of_lines(block, quoted)
        rest = block[cut:]
        if cut:
            yield _as_utf8(block[:cut], encoding, counted)
    if rest.strip():
        yield _as_utf8(rest, encoding, counted)


def _open(path: Path) -> tuple[BinaryIO, BinaryIO]:
    """The file to read from, and the one whose position tells how far on the disk that is."""
    raw = path.open("rb")
    packed = raw.read(2) == b"\x1f\x8b"  # by its first bytes and not by its name
    raw.seek(0)
    return (cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw), raw


def pieces(path: Path, size: int, advance: Advance = lambda _done: None) -> Iterator[bytes]:
    """The bytes of a file, decompressed where it is gzip, so many at a time; no more than the limits allow."""
    position = unpacked = 0
    try:
        file, raw = _open(path)
    except FileNotFoundError as error:
        raise no_such_file(path) from error
    except OSError as error:
        raise unreadable(path, error) from error
    with raw, file:
        while True:
            try:
                piece = file.read(size)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise InvalidData(
                    f"{path.name} is truncated or damaged ({error})",
                    "a whole gzip file",
                    "Download the file again; compare its size and checksum with the publisher's.",
                ) from error
            except OSError as error:
                raise unreadable(path, error) from error
            if not piece:
                return
            unpacked += len(piece)
            if file is not raw:
                check_unpacked(path, raw.tell(), unpacked)
            advance(raw.tell() - position)
            position = raw.tell()
            yield piece


def _without_mark(path: Path, block: bytes) -> bytes:
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InvalidData(f"{path.name} is UTF-16", "UTF-8 or Latin-1 text", "Save it as UTF-8.")
    return block.removeprefix(b"\xef\xbb\xbf")


def _end_of_lines(block: bytes, quoted: bool) -> int:
    """Where the last whole line of a block ends; 0 when the block holds none."""
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
