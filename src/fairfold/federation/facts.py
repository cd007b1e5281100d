"""Projections as plain values: what is written beside a device's vector, in a file or in a message."""

from typing import Any

from fairfold.federation.blocks import LeadingBlock
from fairfold.federation.projection import Hashed, KeptColumns, LowRank, Projection
from fairfold.subspace import Subspace


def facts_of(held: Projection) -> dict[str, Any]:
    """What defines a projection, as plain values."""
    if isinstance(held, Hashed):
        space = held.subspace
        facts = {"full_size": space.full_size, "size": space.size, "seed": space.seed, "mapping": space.mapping}
        facts |= {"chunk": space.chunk, "head": 0 if space.is_full else space.head, "sign": space.sign}
        return {"kind": "hashed", "shape": list(held.shape), "subspace": facts}
    if isinstance(held, LowRank):
        return {"kind": "low rank", "shape": list(held.shape), "rank": held.rank}
    if isinstance(held, LeadingBlock):
        return {"kind": "leading block", "shape": list(held.shape), "kept": list(held.kept)}
    assert isinstance(held, KeptColumns)
    return {"kind": "columns", "shape": list(held.shape), "runs": [list(run) for run in held.runs]}


def projection_of(facts: dict[str, Any]) -> Projection:
    """The projection that plain values define."""
    shape = tuple(facts["shape"])
    if facts["kind"] == "hashed":
        return Hashed(shape, Subspace(**facts["subspace"]))
    if facts["kind"] == "low rank":
        return LowRank(shape, facts["rank"])
    if facts["kind"] == "leading block":
        return LeadingBlock(shape, tuple(facts["kept"]))
    return KeptColumns(shape, tuple((start, stop) for start, stop in facts["runs"]))
