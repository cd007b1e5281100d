"""Data sets: readers of files, prepared data, partitions among clients, negative sampling, synthetic data.

Readers of files are imported on first use: clients on devices do not need polars.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fairfold.data.images import ImageDataset, Images
from fairfold.data.interactions import Dataset, Interactions

if TYPE_CHECKING:
    from fairfold.data.preparing import Prepared, load, load_images, prepare

__all__ = ["Dataset", "ImageDataset", "Images", "Interactions", "Prepared", "load", "load_images", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in ("Prepared", "load", "load_images", "prepare"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module("fairfold.data.preparing"), name)  # found without this function from now on
    return globals()[name]
