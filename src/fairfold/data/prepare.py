"""The way from a name, folder or file to a prepared data set in the cache, and from there into memory."""

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairfold.data import lines
from fairfold.data.files import atomic_folder, cache_folder, checksum
from fairfold.data.interactions import Dataset
from fairfold.data.options import Options
from fairfold.data.progress import Stages, silent
from fairfold.data.sources import Source, find_source, read_titles
from fairfold.data.spool import spool
from fairfold.data.store import MANIFEST, Manifest, read_dataset, read_manifest, write_manifest, write_table
from fairfold.data.tables import build_table, source_counts
from fairfold.errors import InvalidData


@dataclass(frozen=True)
class Prepared:
    """A prepared data set on disk.

    Attributes:
        folder: Where it is.
        manifest: Its source, options, counts and repairs.
        note: Why it was prepared now, or that it was there already.
    """

    folder: Path
    manifest: Manifest
    note: str


def load(source: str | Path, *, cache: str | Path | None = None, stages: Stages = silent, **options: Any) -> Dataset:
    """Load a data set, preparing it first when the cache does not hold it yet.

    Args:
        source: A known name (``fairfold data list``), a folder in its publisher's form, a file, or a prepared folder.
        cache: Folder of prepared data; None is FAIRFOLD_CACHE, else ``~/.cache/fairfold``.
        stages: Where progress is shown.
        **options: The fields of :class:`fairfold.data.options.Options`, e.g. ``top_users=100, ratings=True``.
    """
    folder = Path(source).expanduser()
    if (folder / MANIFEST).exists():
        if options:
            raise InvalidData(
                f"{folder} is prepared already, and {', '.join(options)} was asked for",
                "no options with a prepared folder",
                "Give the source itself, or leave the options out.",
            )
        return read_dataset(folder)
    return read_dataset(prepare(source, cache=cache, stages=stages, **options).folder)


def prepare(
    source: str | Path,
    *,
    cache: str | Path | None = None,
    stages: Stages = silent,
    refresh: bool = False,
    block_size: int = lines.BLOCK,
    **options: Any,
) -> Prepared:
    """Write a data set to the cache in columnar form, unless it is there already.

    Args:
        source: A known name, a folder in its publisher's form, or a file.
        cache: Folder of prepared data; None is FAIRFOLD_CACHE, else ``~/.cache/fairfold``.
        stages: Where progress is shown.
        refresh: Prepare again even when it is there.
        block_size: Bytes of the source held in memory at a time.
        **options: The fields of :class:`fairfold.data.options.Options`.
    """
    chosen = Options(**options)
    root = cache_folder(cache)
    path = Path(source).expanduser()
    found = find_source(path, chosen.wanted)
    _check_split(found, chosen)
    final = root / f"{found.name}-{_key(found, chosen)}"
    note = "prepared now"
    if final.exists() and not refresh:
        try:
            manifest = read_manifest(final)
            if _unchanged(manifest, found):
                return Prepared(final, manifest, "was in the cache already")
            note = "prepared again: the source has changed"
        except InvalidData as error:
            note = f"prepared again: {error.given}"
    with atomic_folder(final) as folder:
        manifest = _prepare(found, chosen, folder, stages, block_size)
    return Prepared(final, manifest, note)


def _prepare(source: Source, options: Options, folder: Path, stages: Stages, block_size: int) -> Manifest:
    repairs = Counter[str]()
    sizes = [file.path.stat().st_size for file in source.files]
    published_ids = source.files[0].layout.kind == "lines"
    rows_folder = folder / "rows"
    rows_folder.mkdir()
    with stages(f"reading {source.name}", sum(sizes)) as advance:
        rows = spool(source, rows_folder, repairs=repairs, block_size=block_size, advance=advance)
    with stages("checksum of the source", sum(sizes)) as advance:
        files = [_fingerprint(file.path) | {"sha256": checksum(file.path, advance)} for file in source.files]
    with stages("counting", 0):
        counts_in_source = source_counts(rows, published_ids=published_ids)
    with stages("choosing, numbering, splitting", 0):
        table = build_table(
            rows,
            options,
            num_users=counts_in_source["users"],
            published_split=source.published_split,
            published_ids=published_ids,
            repairs=repairs,
        )
    with stages("writing", 0):
        shutil.rmtree(rows_folder)
        titles = None if source.titles is None else read_titles(source.titles)
        counts = write_table(folder, table, titles)
    return write_manifest(
        folder,
        {
            "name": source.name,
            "kind": "interactions",
            "source": files,
            "published_split": source.published_split and not options.resplit,
            "options": options.chosen(),
            "source_counts": counts_in_source,
            "counts": counts,
            "repairs": {reason: count for reason, count in repairs.items() if count},
        },
    )


def _check_split(source: Source, options: Options) -> None:
    if source.published_split and options.split is not None and not options.resplit:
        raise InvalidData(
            f"split = {options.split:g} for {source.name}, which comes with a split of its own",
            "no split, or resplit as well",
            "Add --resplit to pool what was published and split it anew.",
        )


def _key(source: Source, options: Options) -> str:
    """Short name of what is prepared: which files, with which options."""
    what = [[str(file.path.resolve()) for file in source.files], options.chosen()]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _fingerprint(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"path": str(path.resolve()), "bytes": status.st_size, "modified": status.st_mtime_ns}


def _unchanged(manifest: Manifest, source: Source) -> bool:
    """Whether the source is the one that was prepared: same size and time, or else the same content."""
    recorded = manifest["source"]
    if len(recorded) != len(source.files):
        return False
    for then, file in zip(recorded, source.files, strict=True):
        now = _fingerprint(file.path)
        if now == {name: then.get(name) for name in now}:
            continue
        if now["bytes"] != then["bytes"] or checksum(file.path) != then["sha256"]:
            return False
    return True
