"""The way from a name, folder or file to a prepared data set in the cache, and from there into memory."""

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fairfold.data import lines
from fairfold.data.files import Stages, atomic_folder, cache_folder, existing, silent
from fairfold.data.images import ImageDataset, is_image_folder, read_images, source_files
from fairfold.data.interactions import Dataset
from fairfold.data.known import on_disk, resolve
from fairfold.data.options import SPLIT, Options
from fairfold.data.sources import Source, find_source, read_titles
from fairfold.data.spool import spool
from fairfold.data.store import (
    MANIFEST,
    Manifest,
    read_dataset,
    read_image_dataset,
    read_manifest,
    require_whole,
    write_images,
    write_manifest,
    write_table,
)
from fairfold.data.tables import build_table
from fairfold.errors import InvalidData
from fairfold.files import checksum

log = logging.getLogger("fairfold.data")

LONGEST_NAME = 100
"""Bytes of a source's name that go into that of its folder in the cache."""


@dataclass(frozen=True)
class Prepared:
    """A prepared data set on disk."""

    folder: Path
    manifest: Manifest  # its source, options, counts and repairs
    note: str  # why it was prepared now, or that it was there already


def load(source: str | Path, *, cache: str | Path | None = None, **options: Any) -> Dataset:
    r"""Load a data set, preparing it first when the cache does not hold it yet.

    Args:
        source: A known name (``fairfold data list``), a folder in its publisher's form, a file, or a prepared folder.
        cache: Folder of prepared data; None is FAIRFOLD_CACHE, else ``~/.cache/fairfold``.
        **options: The fields of :class:`fairfold.data.options.Options`, e.g. ``top_users=100, ratings=True``.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "mine.csv").write_text("user,item\n1,8\n1,9\n2,8\n2,7\n")
        >>> data = load(folder / "mine.csv", cache=folder / "cache")
        >>> data.num_users, data.num_items, data.item_ids[0]
        (2, 3, '8')
    """
    return read_dataset(_prepared_folder(source, cache, options))


def load_images(source: str | Path, *, cache: str | Path | None = None, **options: Any) -> ImageDataset:
    """Load images, preparing them first when the cache does not hold them yet; arguments as for :func:`load`."""
    return read_image_dataset(_prepared_folder(source, cache, options))


def _prepared_folder(source: str | Path, cache: str | Path | None, options: dict[str, Any]) -> Path:
    """A folder whose every bit is as it was written: one of the cache is prepared again where it is not."""
    folder = existing(source)
    if folder is None and (cache_folder(cache) / str(source) / MANIFEST).is_file():
        folder = cache_folder(cache) / str(source)  # as `fairfold data list` names it
    if folder is None or not folder.is_dir() or not (folder / MANIFEST).exists():
        prepared = prepare(source, cache=cache, **options)
        try:
            require_whole(prepared.folder, prepared.manifest)
        except InvalidData as error:
            log.warning("%s: it is prepared again", error.given)
            prepared = prepare(source, cache=cache, refresh=True, **options)
        return prepared.folder
    if options:
        raise InvalidData(
            f"{folder} is prepared already, and {', '.join(options)} was asked for",
            "no options with a prepared folder",
            "Give the source itself, or leave the options out.",
        )
    require_whole(folder, read_manifest(folder))
    return folder


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
    path = resolve(source, cache, stages)
    if is_image_folder(path):
        # The MNIST images, should the folder hold only their writers and the images be here.
        known = None if path.name == "mnist" else on_disk("mnist", cache)
        images = resolve(chosen.images, cache, stages) if chosen.images else known

        def fill_images(folder: Path) -> Manifest:
            with stages(f"reading {path.name}", 0):
                dataset = read_images(path, images)
            with stages("writing", 0):
                write_images(folder, dataset)
            return {"counts": dataset.counts(), "repairs": {}}

        about = {"name": path.resolve().name, "kind": "images", "split": PUBLISHED}
        without_users = Options(images=chosen.images)
        prepared = _into_cache(about, source_files(path, images), without_users, cache, stages, refresh, fill_images)
        meaningless = ", ".join(sorted(set(chosen.chosen()) - {"images"}))
        note = f"{prepared.note} ({meaningless} means nothing for images)" if meaningless else prepared.note
        return replace(prepared, note=note)
    found = find_source(path, chosen)
    if found.published_split and chosen.split is not None and not chosen.resplit:
        raise InvalidData(
            f"split = {chosen.split:g} for {found.name}, which comes with a split of its own",
            "no split, or resplit as well",
            "Add --resplit to pool what was published and split it anew.",
        )
    fill = partial(_fill_with_interactions, source=found, options=chosen, stages=stages, block_size=block_size)
    about = {"name": found.name, "kind": "interactions", "split": _split_words(found, chosen)}
    return _into_cache(about, found.paths, chosen, cache, stages, refresh, fill)


def _into_cache(
    about: dict[str, str],
    files: list[Path],
    options: Options,
    cache: str | Path | None,
    stages: Stages,
    refresh: bool,
    fill: Callable[[Path], Manifest],
) -> Prepared:
    """Fill a folder of the cache, unless it holds the same already."""
    # A name may be as long as the system lets any be; ours are longer by a key: which files, with which options.
    short = about["name"].encode()[:LONGEST_NAME].decode(errors="ignore")
    what = [[str(file.resolve()) for file in files], options.chosen()]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    final = cache_folder(cache) / f"{short}-{key}"
    note = "prepared now"
    if final.exists() and not refresh:
        try:
            manifest = read_manifest(final)
            if _unchanged(manifest, files):
                return Prepared(final, manifest, "was in the cache already")
            note = "prepared again: the source has changed"
        except InvalidData as error:
            note = f"prepared again: {error.given}"
    with atomic_folder(final) as folder:
        filled = fill(folder)
        with stages("checksum of the source", sum(file.stat().st_size for file in files)) as advance:
            source = [_fingerprint(file) | {"sha256": checksum(file, advance)} for file in files]
        told = {"name": about["name"], "kind": about["kind"], "source": source, "split": about["split"]}
        manifest = write_manifest(folder, told | {"options": options.chosen()} | filled)
    return Prepared(final, manifest, note)


def _fill_with_interactions(
    folder: Path, source: Source, options: Options, stages: Stages, block_size: int
) -> Manifest:
    repairs = Counter[str]()
    rows_folder = folder / "rows"
    rows_folder.mkdir()
    with stages(f"reading {source.name}", sum(file.path.stat().st_size for file in source.files)) as advance:
        rows = spool(source, rows_folder, options, repairs=repairs, block_size=block_size, advance=advance)
    with stages("choosing, numbering, splitting", 0):
        table = build_table(rows, options, published_split=source.published_split, repairs=repairs)
    with stages("writing", 0):
        shutil.rmtree(rows_folder)
        titles = None if source.titles is None else read_titles(source.titles)
        counts = write_table(folder, table, titles)
    left_out = {reason: count for reason, count in repairs.items() if count}
    return {"source_counts": rows.counts, "counts": counts, "repairs": left_out}


PUBLISHED = "the publisher's"


def _split_words(source: Source, options: Options) -> str:
    """How the split came about, for the manifest and the output."""
    words = PUBLISHED
    if options.resplit or not source.published_split:
        words = f"{SPLIT if options.split is None else options.split:g} of every user's interactions to train on"
    if options.valid:
        words += f", {options.valid:g} of train put aside for validation"
    return words if words == PUBLISHED else f"{words}, seed {options.seed}"


def _fingerprint(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"path": str(path.resolve()), "bytes": status.st_size, "modified": status.st_mtime_ns}


def _unchanged(manifest: Manifest, files: list[Path]) -> bool:
    """Whether the source is the one that was prepared: same size and time, or else the same content."""
    recorded = manifest["source"]
    if len(recorded) != len(files):
        return False
    for then, file in zip(recorded, files, strict=True):
        now = _fingerprint(file)
        same = now == {name: then.get(name) for name in now}
        if not same and (now["bytes"] != then["bytes"] or checksum(file) != then["sha256"]):
            return False
    return True
