"""Prepared data on disk: Parquet columns (of images arrays) and a manifest, written whole, and read back."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import polars
import torch
from torch import Tensor

from fairfold.data.images import ImageDataset, Images
from fairfold.data.interactions import Dataset, Interactions, offsets_of
from fairfold.data.parquet import read_whole
from fairfold.data.sources import SPLITS
from fairfold.data.tables import Table
from fairfold.errors import InvalidData
from fairfold.files import checksum, write_atomically
from fairfold.sealed import CHECKSUM, content_of, reading, require_same, sealed_values, table_in, values_in
from fairfold.version import __version__

# Raised whenever what is on disk changes its meaning; data prepared in another format is prepared again.
FORMAT = 3
AGAIN = "Prepare the data again (fairfold data prepare --refresh)."
MANIFEST = "manifest.json"
PART_ROWS = 1 << 24

Manifest = dict[str, Any]


def write_table(folder: Path, table: Table, titles: polars.DataFrame | None) -> dict[str, int]:
    """Write a table's columns into a folder and return its counts."""
    num_users = len(table.user_ids)
    users = table.user_ids.cast(polars.String).alias("id").to_frame()
    counts = {"users": num_users, "items": len(table.item_ids)}
    for code, name in enumerate(SPLITS):
        rows = numpy.flatnonzero(table.splits == code)
        frame = polars.DataFrame({"user": table.users[rows], "item": table.items[rows]})
        if table.ratings is not None:
            frame = frame.with_columns(rating=table.ratings[rows])
        for part, start in enumerate(range(0, len(rows), PART_ROWS)):
            # Sorted by user, then item, each part after the one before.
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
    """Write the manifest, the last file of a prepared folder."""
    written = [path for path in sorted(folder.iterdir()) if path.suffix in (".parquet", ".npy")]
    full = {
        "format": FORMAT,
        "fairfold": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **manifest,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in written},
    }
    write_atomically(folder / MANIFEST, sealed_values(full, indent=2))
    return full


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder; an error where it, or a file's size, is another, or of another format."""
    with reading(folder / MANIFEST, InvalidData, "the manifest of prepared data", AGAIN):
        content = content_of(folder / MANIFEST)
        manifest = table_in(content)
        if CHECKSUM in manifest or manifest["format"] == FORMAT:  # the first two formats had none
            manifest = values_in(content)
        if manifest["format"] != FORMAT:
            raise InvalidData(
                f"{folder} was prepared by fairfold {manifest.get('fairfold', '?')} in format {manifest['format']}",
                f"format {FORMAT}, that of fairfold {__version__}",
                AGAIN,
            )
        for name, file in manifest["files"].items():
            require_same(folder / name, file["bytes"])
        return manifest


def require_whole(folder: Path, manifest: Manifest) -> None:
    """Refuse a prepared folder in which a bit of any file is not as it was written."""
    with reading(folder, InvalidData, "the data as it was prepared", AGAIN):
        for name, file in manifest["files"].items():
            require_same(folder / name, file["bytes"], file["sha256"])


def _manifest_of(folder: Path, kind: str, otherwise: str) -> Manifest:
    manifest = read_manifest(folder)
    if manifest["kind"] != kind:
        raise InvalidData(f"{folder} holds {manifest['kind']}", kind, f"Read it with fairfold.data.{otherwise}.")
    return manifest


def read_dataset(folder: Path) -> Dataset:
    """A prepared folder as a data set in memory."""
    manifest = _manifest_of(folder, "interactions", "load_images")
    counts = manifest["counts"]
    users = read_whole(folder / "users.parquet")
    items = read_whole(folder / "items.parquet")
    splits = {name: _read_split(folder, name, users, counts) for name in SPLITS}
    return Dataset(
        name=manifest["name"],
        train=splits["train"],
        test=splits["test"],
        valid=splits["valid"] if len(splits["valid"]) else None,
        user_ids=users["id"].to_list(),
        item_ids=items["id"].to_list(),
        titles=items["title"].fill_null("").to_list() if "title" in items.columns else None,
    )


def _read_split(folder: Path, name: str, users: polars.DataFrame, counts: dict[str, int]) -> Interactions:
    offsets = offsets_of(torch.from_numpy(users[name].cast(polars.Int64).to_numpy(writable=True)))
    total = int(offsets[-1])
    # Filled part by part, so that no second copy of the whole column is ever held.
    items = torch.empty(total, dtype=torch.int64)
    ratings: Tensor | None = None
    start = 0
    for part in sorted(folder.glob(f"{name}-*.parquet")):
        frame = read_whole(part).drop("user")
        stop = start + frame.height
        items[start:stop] = torch.from_numpy(frame["item"].cast(polars.Int64).to_numpy(writable=True))
        if "rating" in frame.columns:
            ratings = torch.empty(total, dtype=torch.float32) if ratings is None else ratings
            ratings[start:stop] = torch.from_numpy(frame["rating"].to_numpy(writable=True))
        start = stop
    if start != total:
        raise InvalidData(
            f"{folder} has {start:,} {name} interactions", f"{total:,}", "Prepare the data again with --refresh."
        )
    return Interactions(counts["users"], counts["items"], offsets, items, ratings)


def write_images(folder: Path, dataset: ImageDataset) -> None:
    """Write the arrays of both splits, and the writers' ids, into a folder."""
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        for part in ("images", "labels", "writers"):
            values = getattr(split, part)
            if values is not None:
                numpy.save(folder / f"{name}-{part}.npy", values.numpy())
    if dataset.writer_ids is not None:
        polars.DataFrame({"id": dataset.writer_ids}).write_parquet(folder / "writers.parquet")


def read_image_dataset(folder: Path) -> ImageDataset:
    """A prepared folder as images; pages are read from the disk when they are touched."""
    manifest = _manifest_of(folder, "images", "load")
    writers = folder / "writers.parquet"
    return ImageDataset(
        manifest["name"],
        _read_images(folder, "train"),
        _read_images(folder, "test"),
        manifest["counts"]["classes"],
        read_whole(writers)["id"].to_list() if writers.exists() else None,
    )


def _read_images(folder: Path, name: str) -> Images:
    # Copy-on-write: a tensor may be written to without changing the file.
    parts = {
        part: torch.from_numpy(numpy.load(folder / f"{name}-{part}.npy", mmap_mode="c"))
        for part in ("images", "labels", "writers")
        if (folder / f"{name}-{part}.npy").exists()
    }
    return Images(parts["images"], parts["labels"], parts.get("writers"))
