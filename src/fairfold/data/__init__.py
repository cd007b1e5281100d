"""From files to clients: readers, prepared data sets, client splits, negatives, the synthetic world."""

from fairfold.data.interactions import Dataset, Interactions

__all__ = ["Dataset", "Interactions"]
