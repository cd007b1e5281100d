"""Federations on one machine: ``loop`` reads like the paper's algorithms."""

from fairfold.simulate.loop import simulate

__all__ = ["simulate"]
