"""The paper's mathematics: subspaces, how they nest, and what devices of different sizes add up to."""

from fairfold.subspace.capacity import Capacity, parse_scheme
from fairfold.subspace.chain import assign_groups, fit_sizes, nested_subspaces
from fairfold.subspace.nesting import reduce_all
from fairfold.subspace.subspace import MAPPINGS, Subspace
from fairfold.subspace.sums import Sums

__all__ = [
    "MAPPINGS", "Capacity", "Subspace", "Sums", "assign_groups", "fit_sizes", "nested_subspaces",
    "parse_scheme", "reduce_all",
]  # fmt: skip
