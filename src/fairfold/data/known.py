"""The public data sets known by name: where they come from, under which terms, and which files they are."""

import difflib
import os
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fairfold.data import download
from fairfold.data.files import Stages, cache_folder, existing, silent
from fairfold.errors import InvalidData


@dataclass(frozen=True)
class KnownSet:
    """A public data set."""

    name: str  # the name it is asked for by
    page: str  # the publisher's
    terms: str  # licence or terms of use, in short; the page has them in full
    files: tuple[str, ...]  # those that are read, once they are in a folder
    downloads: tuple[download.Remote, ...] = ()  # none where a person has to accept terms, choose or run a script
    how: str = ""  # to get the files where there is nothing to download by itself


def _read() -> dict[str, KnownSet]:
    tables = tomllib.loads((resources.files("fairfold.data") / "known.toml").read_text(encoding="utf-8"))
    found = {}
    for name, told in tables.items():
        downloads = tuple(download.Remote(**remote) for remote in told.get("downloads", ()))
        found[name] = KnownSet(name, told["page"], told["terms"], tuple(told["files"]), downloads, told.get("how", ""))
    return found


KNOWN = _read()


def data_folders(name: str, cache: str | Path | None = None) -> list[Path]:
    """Where the files of a known set are looked for, in this order."""
    own = os.environ.get("FAIRFOLD_DATA")
    folders = [Path(own).expanduser() / name] if own else []
    return [*folders, cache_folder(cache) / "downloads" / name]


def on_disk(name: str, cache: str | Path | None = None) -> Path | None:
    """The folder with the files of a known set, or None when they are not here."""
    return next((folder for folder in data_folders(name, cache) if folder.is_dir() and any(folder.iterdir())), None)


def resolve(source: str | Path, cache: str | Path | None = None, stages: Stages = silent) -> Path:
    """The folder or file of a source: an existing path, or a known name whose files are here or can be fetched."""
    path = existing(source)
    if path is not None:
        return path
    known = KNOWN.get(str(source))
    if known is None:
        word = str(source).lower()[:200]
        close = ", ".join(name for name in KNOWN if word.split("-")[0] in name or word in name.replace("-", ""))
        close = close or ", ".join(difflib.get_close_matches(word, KNOWN, n=2))
        raise InvalidData(
            f"{str(source)[:200]} is neither a file or folder nor a known data set",
            "a path that exists, or a name from `fairfold data list`",
            f"Did you mean one of: {close}?" if close else "Check the path.",
        )
    if (folder := on_disk(known.name, cache)) is not None:
        return folder
    target = data_folders(known.name, cache)[-1]
    if not known.downloads:
        raise by_hand(known, target, "cannot be downloaded by itself")
    try:
        download.fetch_all(known.downloads, target, known.files, stages)
    except download.Unreachable as error:
        raise by_hand(known, target, f"could not be downloaded ({error})") from error
    return target


def by_hand(known: KnownSet, target: Path, why: str) -> InvalidData:
    """The error that says which files to put where."""
    urls = ", ".join(remote.url for remote in known.downloads)
    fetch = known.how or f"Get {urls} on a machine with a network (page: {known.page})"
    return InvalidData(
        f"{known.name} {why}",
        f"{', '.join(known.files)} in {target}",
        f"{fetch.rstrip('.')}. Terms: {known.terms}. FAIRFOLD_DATA may name another folder that holds {known.name}/.",
    )
