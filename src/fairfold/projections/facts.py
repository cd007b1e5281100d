"""Projections as plain values: what is written beside a device's vector, in a file or in a message."""

from typing import Any

from fairfold.projections.base import Projection
from fairfold.projections.blocks import KeptColumns, LeadingBlock
from fairfold.projections.coded import CodedRows, PairList
from fairfold.projections.hashed import Hashed
from fairfold.projections.low_rank import LowRank, WholeTable

_OWN = (Hashed, LowRank, WholeTable, KeptColumns, LeadingBlock, CodedRows, PairList)
KINDS: dict[str, type[Projection]] = {one.kind: one for one in _OWN}
"""By the name in files and messages; :func:`register_projection` adds to it."""

MOST_SIDES, LARGEST_TENSOR = 8, 2**48


def register_projection(kind: type[Projection]) -> type[Projection]:
    """Make a projection of one's own known, so that messages and files can name it; serves as a decorator."""
    KINDS[kind.kind] = kind
    return kind


def facts_of(held: Projection) -> dict[str, Any]:
    """What defines a projection, as plain values."""
    return {"kind": held.kind, "shape": list(held.shape), **held.facts()}


def projection_of(facts: Any) -> Projection:
    """The projection that plain values define; a ValueError, KeyError or TypeError for values that define none.

    Types come before ranges, and both before anything is made of the values.
    """
    if not isinstance(facts, dict) or facts.get("kind") not in KINDS:
        raise ValueError("a projection of no known kind")
    shape = facts.get("shape")
    if not isinstance(shape, list) or not 1 <= len(shape) <= MOST_SIDES:
        raise ValueError("a projection without a shape")
    total = 1
    for side in shape:
        if type(side) is not int or not 0 < side <= LARGEST_TENSOR:
            raise ValueError("a shape that is none")
        total *= side
        if total > LARGEST_TENSOR:
            raise ValueError("a shape beyond reason")
    others = {key: value for key, value in facts.items() if key not in ("kind", "shape")}
    _refuse_strange(others)
    return KINDS[facts["kind"]].of_facts(tuple(shape), others)


def _refuse_strange(value: Any, depth: int = 0) -> None:
    """Nothing but small plain values reaches a projection's own reader."""
    if depth > 3:
        raise ValueError("facts too deep")
    if isinstance(value, dict | list):
        if len(value) > 4_096:
            raise ValueError("facts too long")
        for one in value.values() if isinstance(value, dict) else value:
            _refuse_strange(one, depth + 1)
    elif isinstance(value, str):
        if len(value) > 256:
            raise ValueError("a text too long")
    elif type(value) not in (int, bool, float, type(None)):
        raise TypeError("no plain value")
