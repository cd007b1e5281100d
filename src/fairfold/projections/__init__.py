"""How devices of different sizes see one tensor: subspaces, low ranks, columns, blocks."""

from fairfold.projections.base import Assignment, Coordinatewise, Part, Projection
from fairfold.projections.blocks import KeptColumns, LeadingBlock
from fairfold.projections.coded import CodedRows, PairList
from fairfold.projections.facts import facts_of, projection_of, register_projection
from fairfold.projections.hashed import Hashed, whole
from fairfold.projections.low_rank import LowRank, WholeTable

__all__ = [
    "Assignment", "CodedRows", "Coordinatewise", "Hashed", "KeptColumns", "LeadingBlock", "LowRank", "PairList", "Part",
    "Projection", "WholeTable", "facts_of", "projection_of", "register_projection", "whole",
]  # fmt: skip
