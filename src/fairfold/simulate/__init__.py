"""Federations on one machine: ``loop`` reads like the paper's algorithms, ``batched`` gives the same numbers fast."""

from fairfold.simulate.run import simulate

__all__ = ["simulate"]
