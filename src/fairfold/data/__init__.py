"""From files to clients: readers, prepared data sets, client splits, negatives, the synthetic world."""

from fairfold.data.images import ImageDataset, Images
from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.prepare import Prepared, load, load_images, prepare

__all__ = ["Dataset", "ImageDataset", "Images", "Interactions", "Prepared", "load", "load_images", "prepare"]
