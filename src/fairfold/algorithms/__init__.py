"""FAIR and its rivals: each states what a device of some capacity holds; none repeats the round."""

from fairfold.algorithms.methods import METHODS, assign

__all__ = ["METHODS", "assign"]
