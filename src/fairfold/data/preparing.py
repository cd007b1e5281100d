"""Prepare data sets in the cache from a name, folder or file, and load them into memory."""

import csv
import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars

from fairfold.checksums import file_checksum
from fairfold.data import store
from fairfold.data.download import local_folder, resolve
from fairfold.data.files import (
    BLOCK,
    Stages,
    atomic_folder,
    blocks,
    cache_folder,
    existing_path,
    no_progress,
    no_such_file,
)
from fairfold.data.formats import NEWEST, RANDOM, SPLIT, USERS, FileFormat, Options, detect_format
from fairfold.data.images import ImageDataset, read_images, source_files
from fairfold.data.interactions import Dataset
from fairfold.data.tables import HELD_OUT_USERS, SPLITS, build_table, spool_rows
from fairfold.errors import InvalidData

log = logging.getLogger("fairfold.data")
PUBLISHED = "the publisher's"
MAX_NAME_BYTES = 100  # bytes of a source's name in that of its folder in the cache
# Folders are recognised by these names, the first that is there; each may also be gzip.
SINGLE_FILES: tuple[str, ...] = ("u.data", "ratings.dat", "ratings.csv", "BX-Book-Ratings.csv")
SINGLE_FILES += ("goodreads_interactions.csv", "goodreads_interactions.json", "goodreads_interactions_dedup.json")
TABLE_ENDINGS: tuple[str, ...] = (".parquet", ".pq", ".inter")
TABLE_ENDINGS += (".csv", ".tsv", ".json", ".jsonl", ".csv.gz", ".tsv.gz", ".json.gz", ".jsonl.gz")

# Files of titles and their separators, by the file of interactions. Id and title come first; CSV files have a header.
_TITLES = {
    "u.data": ("u.item", "|"),
    "ratings.dat": ("movies.dat", "::"),
    "ratings.csv": ("movies.csv", ","),
    "BX-Book-Ratings.csv": ("BX-Books.csv", ";"),
}


@dataclass(frozen=True)
class SourceFile:
    """One file of interactions; ``split`` is None where the publisher gives no split."""

    path: Path
    file_format: FileFormat
    split: str | None = None


@dataclass(frozen=True)
class Source:
    """The files of one data set."""

    name: str
    files: tuple[SourceFile, ...]
    titles: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """Paths of all files that are read."""
        return [*(file.path for file in self.files), *([] if self.titles is None else [self.titles])]

    @property
    def published_split(self) -> bool:
        """True if the publisher gives a split."""
        return self.files[0].split is not None


@dataclass(frozen=True)
class Prepared:
    """A prepared data set on disk."""

    folder: Path
    manifest: store.Manifest  # source, options, counts and repairs
    note: str  # why it was prepared now, or that it was in the cache


def load(source: str | Path, *, cache: str | Path | None = None, **options: Any) -> Dataset:
    r"""Load a data set; it is prepared first if the cache does not hold it yet.

    Args:
        source: A known name (``fairfold data list``), a folder in its publisher's form, a file, or a prepared folder.
        cache: Folder of prepared data; None is FAIRFOLD_CACHE, else ``~/.cache/fairfold``.
        **options: The fields of :class:`fairfold.data.formats.Options`, e.g. ``top_users=100, ratings=True``.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "mine.csv").write_text("user,item\n1,8\n1,9\n2,8\n2,7\n")
        >>> data = load(folder / "mine.csv", cache=folder / "cache")
        >>> data.num_users, data.num_items, data.item_ids[0]
        (2, 3, '8')
    """
    return store.read_dataset(_prepared_folder(source, cache, options))


def load_images(source: str | Path, *, cache: str | Path | None = None, **options: Any) -> ImageDataset:
    """Load images; arguments as for :func:`load`."""
    return store.read_image_dataset(_prepared_folder(source, cache, options))


def _prepared_folder(source: str | Path, cache: str | Path | None, options: dict[str, Any]) -> Path:
    """Find or prepare a folder, and verify its checksums; a damaged one of the cache is prepared again."""
    folder = existing_path(source)
    if folder is None and (cache_folder(cache) / str(source) / store.MANIFEST).is_file():
        folder = cache_folder(cache) / str(source)  # as `fairfold data list` names it
    if folder is None or not folder.is_dir() or not (folder / store.MANIFEST).exists():
        prepared = prepare(source, cache=cache, **options)
        try:
            store.require_whole(prepared.folder, prepared.manifest)
        except InvalidData as error:
            log.warning("%s: it is prepared again", error.given)
            prepared = prepare(source, cache=cache, refresh=True, **options)
        return prepared.folder
    if options:
        given = f"{folder} is prepared already, and {', '.join(options)} was asked for"
        remedy = "Give the source itself, or leave out the options."
        raise InvalidData(given, "no options with a prepared folder", remedy)
    store.require_whole(folder, store.read_manifest(folder))
    return folder


def prepare(
    source: str | Path,
    *,
    cache: str | Path | None = None,
    stages: Stages = no_progress,
    refresh: bool = False,
    block_size: int = BLOCK,
    **options: Any,
) -> Prepared:
    """Write a data set to the cache in columnar form, unless it is there already; arguments as for :func:`load`.

    ``refresh`` prepares it again even then; ``block_size`` bytes of the source are held in memory at a time.
    """
    given = Options(**options)
    path = existing_path(source) or resolve(source, cache, stages)
    if is_image_folder(path):
        return _prepare_images(path, given, cache, stages, refresh)
    found = find_source(path, given)
    if found.published_split and given.split not in (None, RANDOM) and not given.resplit:
        problem = f"split = {given.split} for {found.name}, which comes with a split of its own"
        remedy = "Add --resplit to pool what was published and split it again."
        raise InvalidData(problem, "no split, or resplit as well", remedy)

    def fill(folder: Path) -> store.Manifest:
        repairs = Counter[str]()
        rows_folder = folder / "rows"
        rows_folder.mkdir()
        with stages(f"reading {found.name}", sum(file.path.stat().st_size for file in found.files)) as advance:
            rows = spool_rows(found, rows_folder, given, repairs=repairs, block_size=block_size, advance=advance)
        with stages("choosing, numbering, splitting", 0):
            table = build_table(rows, given, published_split=found.published_split, repairs=repairs)
        with stages("writing", 0):
            shutil.rmtree(rows_folder)
            counts = store.write_table(folder, table, None if found.titles is None else read_titles(found.titles))
        left_out = {reason: count for reason, count in repairs.items() if count}
        return {"source_counts": rows.counts, "counts": counts, "repairs": left_out}

    about = {"name": found.name, "kind": "interactions", "split": _describe_split(found, given)}
    return _into_cache(about, found.paths, given, cache, stages, refresh, fill)


def is_image_folder(path: Path) -> bool:
    """True if a folder holds images in one of the known formats."""
    return path.is_dir() and (any(path.glob("*-idx[123]-*")) or any(path.glob("train/*.json")))


def _prepare_images(path: Path, options: Options, cache: str | Path | None, stages: Stages, refresh: bool) -> Prepared:
    # The MNIST images, in case the folder holds only their writers.
    known = None if path.name == "mnist" else local_folder("mnist", cache)
    images = existing_path(options.images) or resolve(options.images, cache, stages) if options.images else known

    def fill(folder: Path) -> store.Manifest:
        with stages(f"reading {path.name}", 0):
            dataset = read_images(path, images)
        with stages("writing", 0):
            store.write_images(folder, dataset)
        return {"counts": dataset.counts(), "repairs": {}}

    about = {"name": path.resolve().name, "kind": "images", "split": PUBLISHED}
    files = source_files(path, images)
    prepared = _into_cache(about, files, Options(images=options.images), cache, stages, refresh, fill)
    meaningless = ", ".join(sorted(set(options.non_default()) - {"images"}))
    note = f"{prepared.note} ({meaningless} means nothing for images)" if meaningless else prepared.note
    return replace(prepared, note=note)


def _into_cache(
    about: dict[str, str],
    files: list[Path],
    options: Options,
    cache: str | Path | None,
    stages: Stages,
    refresh: bool,
    fill: Callable[[Path], store.Manifest],
) -> Prepared:
    """Fill a folder of the cache, unless it is up to date; its name ends in a key of the files and options."""
    short = about["name"].encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    content = [[str(file.resolve()) for file in files], options.non_default()]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    final = cache_folder(cache) / f"{short}-{key}"
    note = "prepared now"
    if final.exists() and not refresh:
        try:
            manifest = store.read_manifest(final)
            if _is_unchanged(manifest, files):
                return Prepared(final, manifest, "was in the cache already")
            note = "prepared again: the source has changed"
        except InvalidData as error:
            note = f"prepared again: {error.given}"
    with atomic_folder(final) as folder:
        filled = fill(folder)
        with stages("checksum of the source", sum(file.stat().st_size for file in files)) as advance:
            source = [_fingerprint(file) | {"sha256": file_checksum(file, advance)} for file in files]
        manifest = store.write_manifest(folder, {**about, "source": source, "options": options.non_default(), **filled})
    return Prepared(final, manifest, note)


def _describe_split(source: Source, options: Options) -> str:
    description = PUBLISHED
    if options.resplit or not source.published_split:
        description = f"{options.share:g} of every user's interactions to train on"
        if options.by_time:
            newest = "" if options.split == NEWEST else f" {1 - SPLIT:g}"
            description = f"the newest{newest} of every user's interactions held out"
        if options.split == USERS:
            description = f"{HELD_OUT_USERS:g} of the users held out, with {SPLIT:g} of their interactions as histories"
    if options.valid:
        description += f", {options.valid:g} of train put aside for validation"
    if description == PUBLISHED:
        return description
    time = source.files[0].file_format.time
    column = f"column {time + 1 if isinstance(time, int) else repr(time)}"
    if options.by_time:
        return f"{description}, by the times in {column}"
    unused = "" if time is None else f"; the times in {column} are not used (split = 'newest' would)"
    return f"{description}, at random with seed {options.seed}{unused}"


def _fingerprint(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"path": str(path.resolve()), "bytes": status.st_size, "modified": status.st_mtime_ns}


def _is_unchanged(manifest: store.Manifest, files: list[Path]) -> bool:
    """True if the source is the one that was prepared: same size and time, or else the same content."""

    def same(file: Path, then: dict[str, Any]) -> bool:
        now = _fingerprint(file)
        recorded = {name: then.get(name) for name in now}
        return now == recorded or (now["bytes"] == then["bytes"] and file_checksum(file) == then["sha256"])

    return len(manifest["source"]) == len(files) and all(map(same, files, manifest["source"]))


def find_source(path: Path, options: Options | None = None) -> Source:
    """Find the files of a data set: one file, or a folder in its publisher's form."""
    if not path.exists():
        raise no_such_file(path)
    if path.is_dir():
        folder = path
        name = path.resolve().name
        found = _find_files(path)
    elif path.is_file():
        folder = path.parent
        name = path.name.split(".")[0]
        found = [(None, path)]
        if name in ("ratings", "u", "train"):  # the folder's name is more specific
            name = folder.name
    else:
        given = f"{path} is neither a file nor a folder"
        raise InvalidData(given, "a file or folder of interactions", "Copy the data into a file.")
    files = tuple(SourceFile(file, detect_format(file, options), split) for split, file in found)
    titles, _ = _TITLES.get(files[0].path.name.removesuffix(".gz"), ("", ""))
    if files[0].path.suffix == ".inter":  # RecBole's
        titles = files[0].path.name.removesuffix(".inter").removesuffix(f".{files[0].split}") + ".item"
    return Source(name, files, folder / titles if titles and (folder / titles).is_file() else None)


def _find_files(folder: Path) -> list[tuple[str | None, Path]]:
    for pattern in ("{}.txt", "*.{}.rating", "*.{}.inter", "{}.csv", "{}.tsv", "{}.parquet"):
        found = {split: _first_file(folder, pattern.format(split)) for split in SPLITS}
        if (train := found["train"]) is not None:
            if found["test"] is None:
                given = f"{folder} has {train.name} and no test file"
                remedy = f"Give the file itself ({train}) to have it split, or add the test file."
                raise InvalidData(given, "both, or one file without a split", remedy)
            return [(split, file) for split, file in found.items() if file is not None]
    for name in SINGLE_FILES:
        if (file := _first_file(folder, name)) is not None:
            return [(None, file)]
    entries = sorted(folder.iterdir())
    tables = [path for path in entries if path.name.lower().endswith(TABLE_ENDINGS)]
    if len(tables) == 1 or [path.suffix for path in entries] == [".txt"]:
        return [(None, (tables or entries)[0])]
    names = ", ".join(path.name for path in entries[:12]) or "nothing"
    needed = "one of the forms in docs/data.md, or a single CSV, TSV, JSON lines or Parquet file"
    raise InvalidData(f"{folder} holds {names}", needed, "Name the file with the interactions.")


def _first_file(folder: Path, pattern: str) -> Path | None:
    return next((path for ending in ("", ".gz") for path in sorted(folder.glob(pattern + ending))), None)


def read_titles(path: Path) -> polars.DataFrame:
    """Read ids and titles of items, as text; lines that cannot be read are left out."""
    # Read as UTF-8, and as Latin-1 where it is not: movies.dat comes in both.
    text = (line.rstrip("\r") for block in blocks(path) for line in block.decode().split("\n"))
    separator = dict(_TITLES.values()).get(path.name)
    if path.suffix == ".csv" or separator is None:
        next(text, None)
    separator = separator or "\t"  # RecBole's
    fields = (_split_title(line, separator) for line in text)
    pairs = [(found[0], found[1]) for found in fields if len(found) >= 2]
    frame = polars.DataFrame(pairs, schema={"id": polars.String, "title": polars.String}, orient="row")
    return frame.unique("id", keep="first", maintain_order=True)


def _split_title(line: str, separator: str) -> list[str]:
    if separator == ",":
        try:
            return next(csv.reader([line]), [])
        except csv.Error:  # a field that is too long
            return []
    return [field.strip('"') for field in line.split(separator)]
