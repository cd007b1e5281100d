"""Write and read prepared data: Parquet files (arrays of images) and a manifest with checksums."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import polars
import torch
from torch import Tensor

from fairfold import __version__, checksums
from fairfold.atomic_io import write_atomically
from fairfold.checksums import file_checksum
from fairfold.data.files import read_parquet
from fairfold.data.images import ImageDataset, Images
from fairfold.data.interactions import Dataset, Interactions, offsets_of
from fairfold.data.tables import HISTORY, SPLITS, Table
from fairfold.errors import InvalidData

FORMAT = 3  # version of prepared data; data of another version is prepared again
AGAIN = "Prepare the data again (fairfold data prepare --refresh)."
MANIFEST = "manifest.json"
HISTORIES = "history"  # rows of users who are held out, to rank from
PART_ROWS = 1 << 24
Manifest = dict[str, Any]


def write_table(folder: Path, table: Table, titles: polars.DataFrame | None) -> dict[str, int]:
    """Write a table as Parquet files into a folder; return its counts."""
    num_users = len(table.user_ids)
    users = table.user_ids.cast(polars.String).alias("id").to_frame()
    counts = {"users": num_users, "items": len(table.item_ids)}
    columns = {"user": table.users, "item": table.items}
    columns |= {} if table.ratings is None else {"rating": table.ratings}
    names = [*SPLITS, HISTORIES] if (table.splits == HISTORY).any() else list(SPLITS)
    for code, name in enumerate(names):
        rows = numpy.flatnonzero(table.splits == code)
        frame = polars.DataFrame({column: values[rows] for column, values in columns.items()})
        for part, start in enumerate(range(0, len(rows), PART_ROWS)):
            file = folder / f"{name}-{part:05d}.parquet"
            frame.slice(start, PART_ROWS).write_parquet(file, compression="zstd", compression_level=1)
        per_user = numpy.bincount(table.users[rows], minlength=num_users)
        users = users.with_columns(polars.Series(name, per_user, polars.UInt32))
        counts[name] = len(rows)
    counts["items_in_train"] = len(numpy.unique(table.items[table.splits == 0]))
    users.write_parquet(folder / "users.parquet")
    items = table.item_ids.cast(polars.String).alias("id").to_frame()
    if titles is not None:
        items = items.join(titles, on="id", how="left", maintain_order="left")
    items.write_parquet(folder / "items.parquet")
    return counts


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest, the last file of a prepared folder; return it."""
    written = [path for path in sorted(folder.iterdir()) if path.suffix in (".parquet", ".npy")]
    full = {
        "format": FORMAT,
        "fairfold": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **manifest,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": file_checksum(path)} for path in written},
    }
    write_atomically(folder / MANIFEST, checksums.with_checksum(full, indent=2))
    return full


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder; an error if it is damaged, of another format, or files have changed."""
    with checksums.read_errors(folder / MANIFEST, InvalidData, "the manifest of prepared data", AGAIN):
        manifest = checksums.parse_with_checksum(checksums.read_limited(folder / MANIFEST))
        if manifest["format"] != FORMAT:
            given = f"{folder} was prepared by fairfold {manifest.get('fairfold', '?')} in format {manifest['format']}"
            raise InvalidData(given, f"format {FORMAT}, that of fairfold {__version__}", AGAIN)
        for name, file in manifest["files"].items():
            checksums.verify_file(folder / name, file["bytes"])
        return manifest


def require_whole(folder: Path, manifest: Manifest) -> None:
    """Refuse a prepared folder unless all files have their checksums."""
    with checksums.read_errors(folder, InvalidData, "the data as it was prepared", AGAIN):
        for name, file in manifest["files"].items():
            checksums.verify_file(folder / name, file["bytes"], file["sha256"])


def _manifest_of(folder: Path, kind: str, otherwise: str) -> Manifest:
    manifest = read_manifest(folder)
    if manifest["kind"] != kind:
        trained = (
            "--model lenet or mlp, and no recipe" if kind == "interactions" else "a recipe, and no model of images"
        )
        remedy = f"Train on it with {trained}; in Python fairfold.data.{otherwise} reads it."
        raise InvalidData(f"{manifest['name']} ({folder}) holds {manifest['kind']}", kind, remedy)
    return manifest


def read_dataset(folder: Path) -> Dataset:
    """Read a prepared folder as a data set in memory."""
    manifest = _manifest_of(folder, "interactions", "load_images")
    users, items = read_parquet(folder / "users.parquet"), read_parquet(folder / "items.parquet")
    train, valid, test = (_read_split(folder, name, users, manifest["counts"]) for name in SPLITS)
    titles = items["title"].fill_null("").to_list() if "title" in items.columns else None
    ids = users["id"].to_list(), items["id"].to_list()
    valid_or_none = valid if len(valid) else None
    repairs = manifest["repairs"]
    whole = Dataset(manifest["name"], train, test, valid_or_none, *ids, titles, manifest["split"], repairs=repairs)
    if HISTORIES not in manifest["counts"]:
        return whole
    histories = _read_split(folder, HISTORIES, users, manifest["counts"])
    held = histories.counts_by_user > 0
    mine, others = ((mask.nonzero().flatten()) for mask in (held, ~held))
    new = replace(whole.of_users(mine), train=histories.of_users(mine), valid=None)
    return replace(whole.of_users(others), held_out_users=new)


def _read_split(folder: Path, name: str, users: polars.DataFrame, counts: dict[str, int]) -> Interactions:
    offsets = offsets_of(torch.from_numpy(users[name].cast(polars.Int64).to_numpy(writable=True)))
    total = int(offsets[-1])
    # Filled part by part, so that no second copy of the whole column is held.
    items = torch.empty(total, dtype=torch.int64)
    ratings: Tensor | None = None
    start = 0
    for part in sorted(folder.glob(f"{name}-*.parquet")):
        frame = read_parquet(part).drop("user")
        stop = start + frame.height
        items[start:stop] = torch.from_numpy(frame["item"].cast(polars.Int64).to_numpy(writable=True))
        if "rating" in frame.columns:
            ratings = torch.empty(total, dtype=torch.float32) if ratings is None else ratings
            ratings[start:stop] = torch.from_numpy(frame["rating"].to_numpy(writable=True))
        start = stop
    if start != total:
        given = f"{folder} has {start:,} {name} interactions"
        raise InvalidData(given, f"{total:,}", "Prepare the data again with --refresh.")
    return Interactions(counts["users"], counts["items"], offsets, items, ratings)


def write_images(folder: Path, dataset: ImageDataset) -> None:
    """Write the arrays of both splits, and the ids of the writers, into a folder."""
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        for part in ("images", "labels", "writers"):
            if (values := getattr(split, part)) is not None:
                numpy.save(folder / f"{name}-{part}.npy", values.numpy())
    if dataset.writer_ids is not None:
        polars.DataFrame({"id": dataset.writer_ids}).write_parquet(folder / "writers.parquet")


def read_image_dataset(folder: Path) -> ImageDataset:
    """Read a prepared folder as images, memory-mapped."""
    manifest = _manifest_of(folder, "images", "load")
    train, test = _read_images(folder, "train"), _read_images(folder, "test")
    writers = folder / "writers.parquet"
    writer_ids = read_parquet(writers)["id"].to_list() if writers.exists() else None
    return ImageDataset(manifest["name"], train, test, manifest["counts"]["classes"], writer_ids)


def _read_images(folder: Path, name: str) -> Images:
    images, labels, writers = (folder / f"{name}-{part}.npy" for part in ("images", "labels", "writers"))
    return Images(_memory_mapped(images), _memory_mapped(labels), _memory_mapped(writers) if writers.exists() else None)


def _memory_mapped(path: Path) -> Tensor:
    # Copy-on-write: a tensor may be written to without changing the file.
    return torch.from_numpy(numpy.load(path, mmap_mode="c"))
