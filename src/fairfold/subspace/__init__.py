"""The paper's mathematics: subspaces, how they nest, capacities, projections, and sums over different sizes."""

from fairfold.subspace import packed  # noqa: F401  (registers its projections, and those of blocks)
from fairfold.subspace.capacity import Capacity, assign_groups, fit_sizes, nested_subspaces, parse_scheme
from fairfold.subspace.nesting import Sums, reduce_all
from fairfold.subspace.subspace import MAPPINGS, Subspace

__all__ = [
    "MAPPINGS", "Capacity", "Subspace", "Sums", "assign_groups", "fit_sizes", "nested_subspaces",
    "parse_scheme", "reduce_all",
]  # fmt: skip
