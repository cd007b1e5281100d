"""From the server to the devices: every tensor reduced once for each size, whatever the number of devices."""

from collections.abc import Sequence

from torch import Tensor

from fairfold.federation.projection import Assignment, Hashed, LowRank, Projection
from fairfold.federation.task import Weights
from fairfold.subspace import reduce_all


def send(full: Weights, assignments: Sequence[Assignment]) -> list[Weights | None]:
    """What the devices of each group receive; None for a group that does not take part."""
    sent: list[Weights | None] = [None if held.projections is None else {} for held in assignments]
    for name, vector in full.items():
        projections = [None if held.projections is None else held.projections[name] for held in assignments]
        reduced = _reduce_each(vector, [projection for projection in projections if projection is not None])
        for received, projection in zip(sent, projections, strict=True):
            if received is not None and projection is not None:
                received[name] = reduced[projection]
    return sent


def _reduce_each(full: Tensor, projections: list[Projection]) -> dict[Projection, Tensor]:
    """Every distinct projection of a tensor; a nested chain of subspaces takes one pass over it, all ranks one SVD."""
    hashed = [projection for projection in projections if isinstance(projection, Hashed)]
    compacts = reduce_all(full, [held.subspace for held in hashed if not held.subspace.is_full])
    # The full space is sent as it is, not as a copy: what is sent is only ever read.
    found: dict[Projection, Tensor] = {held: compacts.get(held.subspace, full) for held in hashed}
    factored = [projection for projection in projections if isinstance(projection, LowRank)]
    if factored:
        largest = max(factored, key=lambda projection: projection.rank)
        whole = largest.reduce(full)
        found |= {projection: largest.cut(whole, projection.rank) for projection in factored}
    for projection in projections:
        if projection not in found:
            found[projection] = projection.reduce(full)
    return found
