"""Public data sets known by name, and downloads that show progress, resume, and are verified."""

import contextlib
import difflib
import errno
import http.client
import json
import lzma
import os
import re
import shutil
import struct
import tomllib
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fairfold import __version__
from fairfold.atomic_io import sync_folder, write_atomically
from fairfold.checksums import file_checksum
from fairfold.data.files import Stages, atomic_folder, cache_folder, check_unpacked, explain_full_disk, no_progress
from fairfold.errors import InvalidData

PART = ".part"
TIMEOUT = 30.0
CHECKSUMS = "checksums.json"
_BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError)
_TABLES = tomllib.loads((resources.files("fairfold.data") / "public_datasets.toml").read_text(encoding="utf-8"))


class Unreachable(Exception):
    """Raised when there is no network, or the server does not give the file."""


@dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    md5: str | None = None  # the publisher's checksum
    md5_url: str | None = None  # where the publisher keeps it

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.url.rsplit("/", 1)[1]


def fetch_all(remotes: tuple[Remote, ...], target: Path, wanted: tuple[str, ...], stages: Stages = no_progress) -> None:
    """Download files, unpack archives, and create a folder with the wanted files and their checksums."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fetched = [fetch(remote, target.with_name(f".{target.name}.{remote.name}"), stages) for remote in remotes]
    with atomic_folder(target) as folder:
        sums = {}
        for remote, file in zip(remotes, fetched, strict=True):
            verified = bool(remote.md5 or remote.md5_url)
            sums[remote.name] = {"sha256": file_checksum(file), "checked_against_publisher": verified}
            if zipfile.is_zipfile(file):
                _unpack(file, folder, wanted)
            else:
                shutil.copyfile(file, folder / remote.name)
        write_atomically(folder / CHECKSUMS, json.dumps(sums, indent=2).encode())
    for file in fetched:
        file.unlink()


def _unpack(archive: Path, folder: Path, wanted: tuple[str, ...]) -> None:
    """Unpack the wanted files, and the publisher's README, from any folder of an archive."""
    unpacked = 0
    size = archive.stat().st_size
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
        # An offset before the archive's start is EINVAL, and bad bzip2 has no error number.
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, None):
            raise
        given = f"{archive.name} is damaged, or packed in an unknown way ({error})"
        raise InvalidData(given, "a whole zip archive", "Remove it, and download it again.") from error


def fetch(remote: Remote, target: Path, stages: Stages = no_progress) -> Path:
    """Download one file to ``target``; an interrupted download is continued the next time."""
    if target.exists():
        return target
    part = target.with_name(target.name + PART)
    try:
        with explain_full_disk(target.parent):
            _continue(remote, part, stages)
            expected = remote.md5 or (_published_md5(remote.md5_url) if remote.md5_url else None)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise Unreachable(f"{remote.url}: {getattr(error, 'reason', None) or error}") from error
    if expected is not None and (found := file_checksum(part, algorithm="md5")) != expected:
        part.unlink()
        _state_file(part).unlink(missing_ok=True)
        remedy = "It was removed; run the command again. If it happens twice, the publisher has changed the file."
        raise InvalidData(f"{remote.name} came with MD5 {found}", f"{expected}, the publisher's", remedy)
    part.replace(target)
    _state_file(part).unlink(missing_ok=True)
    sync_folder(target.parent)
    return target


def _state_file(part: Path) -> Path:
    return part.with_name(part.name + ".state")


def _continue(remote: Remote, part: Path, stages: Stages) -> None:
    """Request the missing bytes; start over if the server's file has changed."""
    done = part.stat().st_size if part.exists() else 0
    tag = ""
    with contextlib.suppress(OSError):
        tag = _state_file(part).read_text()
    headers = {"User-Agent": f"fairfold/{__version__}"}
    if done and tag:
        headers |= {"Range": f"bytes={done}-", "If-Range": tag}
    try:
        response = urllib.request.urlopen(urllib.request.Request(remote.url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not done:
            raise
        error.close()  # nothing is missing, or the part is longer than the file
        part.unlink()
        _continue(remote, part, stages)
        return
    with response:
        resumed = response.status == 206
        start = done if resumed else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else 0
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        # A weak tag promises the same meaning, not the same bytes, so it cannot be resumed on.
        write_atomically(_state_file(part), (b"" if tag.startswith("W/") else tag.encode()))
        with stages(f"downloading {remote.name}", total) as advance, part.open("ab" if resumed else "wb") as file:
            advance(start)
            while block := response.read(1 << 18):
                file.write(block)
                advance(len(block))
            file.flush()
            os.fsync(file.fileno())
    if (size := part.stat().st_size) < total:
        raise ConnectionError(f"the connection ended after {size:,} of {total:,} bytes; run it again to resume")


def _published_md5(url: str) -> str:
    """Read the checksum of a publisher's `.md5` file: the first run of 32 hexadecimal digits."""
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        found = re.search(r"\b[0-9a-fA-F]{32}\b", response.read(4096).decode("latin-1"))
    if found is None:
        raise ConnectionError(f"{url} holds no MD5 checksum")
    return found.group().lower()


@dataclass(frozen=True)
class Published:
    """What papers report on the split that a public data set comes with, recognized by its numbers of interactions."""

    train: int
    test: int
    metric: str
    values: Mapping[str, float]

    def on(self, train: int, test: int, metric: str) -> Mapping[str, float]:
        """What papers report by a metric on a split into so many interactions: nothing if it is another one."""
        return self.values if (self.train, self.test, self.metric) == (train, test, metric) else {}


@dataclass(frozen=True)
class PublicDataset:
    """A public data set: where it comes from, under which terms, and which files it has."""

    name: str
    page: str  # the publisher's
    terms: str  # license or terms of use, in short; the page has them in full
    files: tuple[str, ...]  # files that are read
    downloads: tuple[Remote, ...] = ()  # none where a person has to accept terms, choose or run a script
    how: str = ""  # instructions where there is no download
    published: Published | None = None  # what papers report on its split


def _public_dataset(
    name: str, files: list[str], downloads: Iterable[Any] = (), published: Any = None, **texts: str
) -> PublicDataset:
    remotes = tuple(Remote(**remote) for remote in downloads)
    known = None if published is None else Published(**published)
    return PublicDataset(name, files=tuple(files), downloads=remotes, published=known, **texts)


PUBLIC_DATASETS = {name: _public_dataset(name, **table) for name, table in _TABLES.items()}


def data_folders(name: str, cache: str | Path | None = None) -> list[Path]:
    """Folders in which the files of a public data set are looked for, in this order."""
    given = os.environ.get("FAIRFOLD_DATA")
    return [*([Path(given).expanduser() / name] if given else []), cache_folder(cache) / "downloads" / name]


def local_folder(name: str, cache: str | Path | None = None) -> Path | None:
    """Folder with the files of a public data set, or None if they are not on this machine."""
    return next((folder for folder in data_folders(name, cache) if folder.is_dir() and any(folder.iterdir())), None)


def resolve(source: str | Path, cache: str | Path | None = None, stages: Stages = no_progress) -> Path:
    """The folder of a public data set, by its name; it is downloaded if needed."""
    known = PUBLIC_DATASETS.get(str(source))
    if known is None:
        given = str(source).lower()[:200]
        close = [name for name in PUBLIC_DATASETS if given.split("-")[0] in name or given in name.replace("-", "")]
        names = ", ".join(close or difflib.get_close_matches(given, PUBLIC_DATASETS, n=2))
        problem = f"{str(source)[:200]} is neither a file or folder nor a known data set"
        remedy = f"Did you mean one of: {names}?" if names else "Check the path."
        raise InvalidData(problem, "a path that exists, or a name from `fairfold data list`", remedy)
    if (folder := local_folder(known.name, cache)) is not None:
        return folder
    target = data_folders(known.name, cache)[-1]
    if not known.downloads:
        raise _manual_download(known, target, "cannot be downloaded by itself")
    try:
        fetch_all(known.downloads, target, known.files, stages)
    except Unreachable as error:
        raise _manual_download(known, target, f"could not be downloaded ({error})") from error
    return target


def _manual_download(known: PublicDataset, target: Path, why: str) -> InvalidData:
    """Make the error that names the files to download by hand and their folder."""
    urls = ", ".join(remote.url for remote in known.downloads)
    remedy = (known.how or f"Get {urls} on a machine with a network (page: {known.page})").rstrip(".")
    remedy += f". Terms: {known.terms}. FAIRFOLD_DATA may name another folder with {known.name}/."
    return InvalidData(f"{known.name} {why}", f"{', '.join(known.files)} in {target}", remedy)
