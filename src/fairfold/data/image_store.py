"""Prepared images on disk: one array a file, mapped into memory rather than read."""

from pathlib import Path

import numpy
import polars
import torch

from fairfold.data.images import ImageDataset, Images
from fairfold.data.parquet import read_whole
from fairfold.data.store import read_manifest
from fairfold.errors import InvalidData


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
    manifest = read_manifest(folder)
    if manifest["kind"] != "images":
        raise InvalidData(f"{folder} holds {manifest['kind']}", "images", "Read it with fairfold.data.load.")
    writers = folder / "writers.parquet"
    return ImageDataset(
        manifest["name"],
        _read_split(folder, "train"),
        _read_split(folder, "test"),
        manifest["counts"]["classes"],
        read_whole(writers)["id"].to_list() if writers.exists() else None,
    )


def _read_split(folder: Path, name: str) -> Images:
    # Copy-on-write: a tensor may be written to without changing the file.
    parts = {
        part: torch.from_numpy(numpy.load(folder / f"{name}-{part}.npy", mmap_mode="c"))
        for part in ("images", "labels", "writers")
        if (folder / f"{name}-{part}.npy").exists()
    }
    return Images(parts["images"], parts["labels"], parts.get("writers"))
