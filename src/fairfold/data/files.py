"""Read text in blocks, within limits on lines and decompression, and Parquet; folders that are whole or not there."""

import contextlib
import errno
import gzip
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from fairfold.atomic_io import sync_folder
from fairfold.errors import CannotWrite, InvalidData

if TYPE_CHECKING:
    import polars

Advance = Callable[[int], None]
# Called with a stage's name and size (0: unknown); the context gives a function that counts what is done.
Stages = Callable[[str, int], contextlib.AbstractContextManager[Advance]]
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
    piece = _without_byte_order_mark(path, next(pieces(path, HEAD), b""))
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
        block = piece if number else _without_byte_order_mark(path, piece)
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


def _without_byte_order_mark(path: Path, block: bytes) -> bytes:
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


@contextlib.contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Turn every kind of error that polars raises about a file into one InvalidData."""
    import polars  # devices train without it

    try:
        yield
    except InvalidData:
        raise
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        given = f"{path.name} is not Parquet, truncated or damaged ({reason})"
        raise InvalidData(given, "a whole Parquet file", "Write or download it again.") from error


def read_parquet(path: Path, *, memory_map: bool = True) -> "polars.DataFrame":
    """Read a whole Parquet file; without a memory map where it will be overwritten."""
    import polars

    with parquet_errors(path):
        return polars.read_parquet(path, glob=False, memory_map=memory_map)


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


if sys.platform != "win32":  # without locks temporary folders of killed processes are not removed
    import fcntl

PARTIAL = ".partial"
LOCK = ".lock"
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def no_progress(_name: str, _size: int) -> Iterator[Advance]:
    """Stages whose progress is not shown."""
    yield lambda _done: None


def cache_folder(cache: str | Path | None = None) -> Path:
    """Folder of prepared data: the one given, else FAIRFOLD_CACHE, else the user's cache folder."""
    if cache is not None:
        return Path(cache).expanduser()
    if given := os.environ.get("FAIRFOLD_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fairfold"


def existing_path(source: str | Path) -> Path | None:
    """Path of a source if it exists, else None; an error where the system cannot look it up."""
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # too long a name, no permission; no such user's home
        name = f"{str(source)[:80]}{'…' if len(str(source)) > 80 else ''}"
        given = f"{name} cannot be looked for ({getattr(error, 'strerror', None) or error})"
        needed = "a path that exists, or a name from `fairfold data list`"
        raise InvalidData(given, needed, "Check the path.") from error


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Turn every error that a full disk causes into one InvalidData."""
    try:
        yield
    except InvalidData:
        raise
    except Exception as error:
        code = getattr(error.__cause__ if isinstance(error, CannotWrite) else error, "errno", None)
        # polars gives the system's error number in the text of its own exception
        if code is None and (found := _OS_ERROR.search(str(error))):
            code = int(found.group(1))
        if code not in _FULL_DISK:
            raise
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        given = f"the disk (or quota) of {folder} is full: {free / 1e6:,.0f} MB free"
        needed = "room for the prepared data and for a temporary copy of the source's columns"
        remedy = "Free some space, or put the cache elsewhere with --cache or FAIRFOLD_CACHE. Nothing was left behind."
        raise InvalidData(given, needed, remedy) from error


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Create a temporary folder to fill; it is renamed to ``final`` if the block succeeds, else removed."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(final.parent)
        temporary, lock = _locked_beside(final)
    except OSError as error:
        given = f"cannot create or write {final.parent} ({error.strerror})"
        remedy = "Give another one with --cache or FAIRFOLD_CACHE."
        raise InvalidData(given, "a cache folder that can be written", remedy) from error
    try:
        with explain_full_disk(final.parent):
            yield temporary
            for path in sorted(temporary.rglob("*")):
                if path.is_file() and path.name != LOCK:
                    with path.open("rb+") as file:
                        os.fsync(file.fileno())
            sync_folder(temporary)
            _take_name(temporary, final)
    finally:
        lock.close()
        shutil.rmtree(temporary, ignore_errors=True)
    (final / LOCK).unlink(missing_ok=True)
    sync_folder(final.parent)


def _locked_beside(final: Path) -> tuple[Path, IO[str]]:
    """Create and lock a temporary folder; try again if another process removed it before it was locked."""
    while True:
        temporary = _make_temporary_folder(final)
        lock = (temporary / LOCK).open("w")
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (temporary / LOCK).exists():
            return temporary, lock
        lock.close()


def _make_temporary_folder(final: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=PARTIAL))


def _take_name(temporary: Path, final: Path) -> None:
    """Rename a folder over another, which is moved aside first, then removed."""
    old: list[Path] = []
    while True:  # another process may do the same at the same moment
        try:
            temporary.rename(final)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        old.append(_make_temporary_folder(final))
        with contextlib.suppress(FileNotFoundError):
            final.rename(old[-1] / final.name)
    for aside in old:
        shutil.rmtree(aside, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove temporary folders of killed processes: those whose lock is not held."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(f".*{PARTIAL}"):
        if not folder.is_dir():
            continue
        try:
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)  # while it is held
        except FileNotFoundError:
            # Either just being created, or left between the two renames of _take_name: young ones may be in use.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime >= 3600:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
