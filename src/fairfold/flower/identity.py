"""A device's name: a number of its own choice, in a file of its own, which outlives server and network.

Nothing heavy is imported here: a device that is merely asked for its capacity must not wait for torch.
"""

import os
import secrets
from pathlib import Path

from fairfold.errors import CannotWrite, InvalidState
from fairfold.files import write_atomically

FILE = "name"


def name_of(folder: Path) -> int:
    """The name of the device that lives in a folder; made when it is first asked for."""
    path = folder / FILE
    try:
        text = path.read_text(encoding="ascii")[:64].strip()
    except FileNotFoundError:
        return _new(folder, path)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidState(f"{path}: {error}", "the device's name", "Remove the file: it gets a new one.") from None
    if not text or len(text) > 16 or not all(digit in "0123456789abcdef" for digit in text):
        raise InvalidState(f"{path}: {text!r}", "the device's name", "Remove the file: it gets a new one.")
    return int(text, 16)


def _new(folder: Path, path: Path) -> int:
    name = 1 + secrets.randbelow(2**63 - 1)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(folder, 0o700)
    except OSError as error:
        raise CannotWrite(f"{folder}: {error.strerror}", "a folder to write to", "Name another.") from None
    write_atomically(path, f"{name:x}\n".encode())
    return name
