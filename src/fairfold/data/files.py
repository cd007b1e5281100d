"""Folders that appear whole or not at all, where prepared data lives, and how long work tells what it is doing."""

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fairfold.errors import CannotWrite, InvalidData
from fairfold.files import sync_folder

if sys.platform != "win32":  # without it nothing tells whether a temporary folder is still in use, so none is removed
    import fcntl

Advance = Callable[[int], None]
# Called with the name of a stage and its size (0: not known); the block gets a function to count what is done.
Stages = Callable[[str, int], contextlib.AbstractContextManager[Advance]]

PARTIAL = ".partial"
LOCK = ".lock"
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def silent(_name: str, _size: int) -> Iterator[Advance]:
    """Stages that nobody watches."""
    yield lambda _done: None


def cache_folder(cache: str | Path | None = None) -> Path:
    """The folder of prepared data: the one given, else FAIRFOLD_CACHE, else the user's cache folder."""
    if cache is not None:
        return Path(cache).expanduser()
    if given := os.environ.get("FAIRFOLD_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fairfold"


def existing(source: str | Path) -> Path | None:
    """The path that a text names, if there is something; an error where the system cannot even look for it."""
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # too long a name, no permission; no such user's home
        raise InvalidData(
            f"{str(source)[:80]}{'…' if len(str(source)) > 80 else ''} cannot be looked for "
            f"({getattr(error, 'strerror', None) or error})",
            "a path that exists, or a name from `fairfold data list`",
            "Check the path.",
        ) from error


@contextlib.contextmanager
def full_disk_is_an_error(folder: Path) -> Iterator[None]:
    """Turn every form in which a full disk shows itself into one clear error."""
    try:
        yield
    except InvalidData:
        raise
    except Exception as error:
        code = getattr(error.__cause__ if isinstance(error, CannotWrite) else error, "errno", None)
        # polars passes the system's error number on inside the text of its own exception
        if code is None and (found := _OS_ERROR.search(str(error))):
            code = int(found.group(1))
        if code not in _FULL_DISK:
            raise
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise InvalidData(
            f"the disk (or quota) of {folder} is full: {free / 1e6:,.0f} MB free",
            "room for the prepared data and for a temporary copy of the source's columns",
            "Free some space, or put the cache elsewhere with --cache or FAIRFOLD_CACHE. Nothing was left behind.",
        ) from error


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A new folder to fill; it takes the name ``final`` only when the block ends well, else it is removed."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(final.parent)
        temporary, lock = _locked_beside(final)
    except OSError as error:
        raise InvalidData(
            f"cannot create or write {final.parent} ({error.strerror})",
            "a cache folder that can be written",
            "Give another one with --cache or FAIRFOLD_CACHE.",
        ) from error
    try:
        with full_disk_is_an_error(final.parent):
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
    """A new folder, and the lock that says it is in use; another one where it was swept before it had that."""
    while True:
        temporary = _beside(final)
        lock = (temporary / LOCK).open("w")
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (temporary / LOCK).exists():
            return temporary, lock
        lock.close()


def _beside(final: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=PARTIAL))


def _take_name(temporary: Path, final: Path) -> None:
    """Rename a folder over another; a folder that is in the way is moved aside first, then removed."""
    old: list[Path] = []
    while True:  # another process may do the same at the same moment
        try:
            temporary.rename(final)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        old.append(_beside(final))
        with contextlib.suppress(FileNotFoundError):
            final.rename(old[-1] / final.name)
    for aside in old:
        shutil.rmtree(aside, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders of processes that were killed: those whose lock nobody holds any more."""
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
            # Either just being made, or left between the two renames of _take_name: young ones may be alive.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime >= 3600:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
