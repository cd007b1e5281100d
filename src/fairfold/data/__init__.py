"""From files to clients: readers, prepared data sets, client splits, negatives, the synthetic world."""

from fairfold.data.interactions import Dataset, Interactions
from fairfold.data.prepare import Prepared, load, prepare

__all__ = ["Dataset", "Interactions", "Prepared", "load", "prepare"]
