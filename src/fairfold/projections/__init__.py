"""How devices of different sizes see one tensor: subspaces, low ranks, columns, blocks."""

from fairfold.projections.base import Assignment, Coordinatewise, Part, Projection
from fairfold.projections.blocks import LeadingBlock
from fairfold.projections.columns import KeptColumns
from fairfold.projections.facts import facts_of, projection_of, register_projection
from fairfold.projections.hashed import Hashed, whole
from fairfold.projections.low_rank import LowRank, WholeTable
from fairfold.projections.rounded import PairList, RoundedBlock

__all__ = [
    "Assignment", "Coordinatewise", "Hashed", "KeptColumns", "LeadingBlock", "LowRank", "PairList", "Part",
    "Projection", "RoundedBlock", "WholeTable", "facts_of", "projection_of", "register_projection", "whole",
]  # fmt: skip
