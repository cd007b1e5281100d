"""The cache of prepared data: its folder, atomic creation of folders in it, and progress of long work."""

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

from fairfold.atomic_io import sync_folder
from fairfold.errors import CannotWrite, InvalidData

if sys.platform != "win32":  # without locks temporary folders of killed processes are not removed
    import fcntl

Advance = Callable[[int], None]
# Called with a stage's name and size (0: unknown); the context gives a function that counts what is done.
Stages = Callable[[str, int], contextlib.AbstractContextManager[Advance]]
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
    """Rename a folder over another, which is moved aside first, then removed."""
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
