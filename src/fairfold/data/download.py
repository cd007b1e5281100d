"""Downloads that show progress, resume where they broke off, and are checked before they are used."""

import contextlib
import errno
import http.client
import json
import lzma
import os
import re
import shutil
import struct
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from fairfold.data.files import Stages, atomic_folder, full_disk_is_an_error, silent
from fairfold.data.limits import check_unpacked
from fairfold.errors import InvalidData
from fairfold.files import checksum, sync_folder, write_atomically
from fairfold.version import __version__

PART = ".part"
TIMEOUT = 30.0
CHECKSUMS = "checksums.json"


class Unreachable(Exception):
    """There is no network, or the server does not give the file."""


@dataclass(frozen=True)
class Remote:
    """A file to fetch."""

    url: str
    md5: str | None = None  # its checksum where the publisher's is known for sure
    md5_url: str | None = None  # where the publisher keeps its otherwise

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rsplit("/", 1)[1]


def fetch_all(remotes: tuple[Remote, ...], target: Path, wanted: tuple[str, ...], stages: Stages = silent) -> None:
    """Fetch files, unpack archives, and put what is wanted into a folder that appears only when it is whole.

    The checksums of what came are written beside the files, so that a later copy can be compared with the first.
    """
    waiting = target.parent
    waiting.mkdir(parents=True, exist_ok=True)
    fetched = [fetch(remote, waiting / f".{target.name}.{remote.name}", stages) for remote in remotes]
    with atomic_folder(target) as folder:
        sums = {}
        for remote, file in zip(remotes, fetched, strict=True):
            sums[remote.name] = {
                "sha256": checksum(file),
                "checked_against_publisher": bool(remote.md5 or remote.md5_url),
            }
            if zipfile.is_zipfile(file):
                _unpack(file, folder, wanted)
            else:
                shutil.copyfile(file, folder / remote.name)
        write_atomically(folder / CHECKSUMS, json.dumps(sums, indent=2).encode())
    for file in fetched:
        file.unlink()


_BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError)


def _unpack(archive: Path, folder: Path, wanted: tuple[str, ...]) -> None:
    """Take the wanted files, and the publisher's README, out of an archive, whatever folder they are in."""
    unpacked, size = 0, archive.stat().st_size
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                name = member.filename.rsplit("/", 1)[-1]
                if name in wanted or name.upper().startswith("README"):
                    with packed.open(member) as source, (folder / name).open("wb") as file:
                        while block := source.read(1 << 20):
                            unpacked += len(block)
                            check_unpacked(archive, size, unpacked)
                            file.write(block)
    except InvalidData:
        raise
    except (*_BAD_ARCHIVE, OSError) as error:
        # A place before the archive's start is an invalid argument, and bad bzip2 has no number at all.
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, None):
            raise
        raise InvalidData(
            f"{archive.name} is damaged, or packed in a way that is not known ({error})",
            "a whole zip archive",
            "Remove it, and download it again.",
        ) from error


def fetch(remote: Remote, target: Path, stages: Stages = silent) -> Path:
    """Fetch one file to ``target``; what came before a break is kept beside it and continued the next time."""
    if target.exists():
        return target
    part = target.with_name(target.name + PART)
    try:
        with full_disk_is_an_error(target.parent):
            _continue(remote, part, stages)
            expected = remote.md5 or (_published_md5(remote.md5_url) if remote.md5_url else None)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise Unreachable(f"{remote.url}: {getattr(error, 'reason', None) or error}") from error
    if expected is not None and (found := checksum(part, algorithm="md5")) != expected:
        part.unlink()
        _state_file(part).unlink(missing_ok=True)
        raise InvalidData(
            f"{remote.name} came with MD5 {found}",
            f"{expected}, the publisher's",
            "It was removed; run the command again. If it happens twice, the publisher has changed the file.",
        )
    part.replace(target)
    _state_file(part).unlink(missing_ok=True)
    sync_folder(target.parent)
    return target


def _state_file(part: Path) -> Path:
    return part.with_name(part.name + ".state")


def _continue(remote: Remote, part: Path, stages: Stages) -> None:
    """Ask for what is missing; start over where the server's file is no longer the one that was begun."""
    done = part.stat().st_size if part.exists() else 0
    tag = ""
    with contextlib.suppress(OSError):
        tag = _state_file(part).read_text()
    headers = {"User-Agent": f"fairfold/{__version__}"}
    if done and tag:
        headers |= {"Range": f"bytes={done}-", "If-Range": tag}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(remote.url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing is missing, or what is here is longer than the file
            error.close()
            part.unlink()
            _continue(remote, part, stages)
            return
        raise
    with answer:
        resumed = answer.status == 206
        begun = done if resumed else 0
        length = answer.headers.get("Content-Length")
        total = begun + int(length) if length else 0
        tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        # A weak tag promises the same meaning, not the same bytes, so it cannot be resumed on.
        write_atomically(_state_file(part), (b"" if tag.startswith("W/") else tag.encode()))
        with stages(f"downloading {remote.name}", total) as advance, part.open("ab" if resumed else "wb") as file:
            advance(begun)
            while block := answer.read(1 << 18):
                file.write(block)
                advance(len(block))
            file.flush()
            os.fsync(file.fileno())
    if total and part.stat().st_size < total:
        raise ConnectionError(
            f"the connection ended after {part.stat().st_size:,} of {total:,} bytes; run it again to resume"
        )


def _published_md5(url: str) -> str:
    """The checksum in a publisher's `.md5` file: the first run of 32 hexadecimal digits."""
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        found = re.search(r"\b[0-9a-fA-F]{32}\b", answer.read(4096).decode("latin-1"))
    if found is None:
        raise ConnectionError(f"{url} holds no MD5 checksum")
    return found.group().lower()
