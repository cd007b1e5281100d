"""Files that are either whole or not there."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: written beside it, flushed to disk, then renamed over it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name survives a power cut as well
    finally:
        os.close(folder)
