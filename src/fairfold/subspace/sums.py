"""What devices of different sizes send, as one value that can be added."""

from itertools import pairwise

import torch
from torch import Tensor

from fairfold.errors import InvalidVector
from fairfold.subspace.checks import SUM_DTYPE, check_vector
from fairfold.subspace.nesting import require_nested
from fairfold.subspace.subspace import Subspace


class Sums:
    """The weighted sum of compact vectors, one running total per size.

    One law carries the design: recovery is linear, and S_small·ψ = S_big·unfold(ψ). Totals are kept per size, unfolded
    upwards size by size, and recovered to the full space once, whatever the number of devices. ``a + b`` is the value
    that the devices of both would have given together.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.totals: dict[Subspace, Tensor] = {}

    @torch.no_grad()
    def add(self, subspace: Subspace, compact: Tensor, weight: float = 1.0) -> None:
        """Add one device's vector with its weight (p_i in the paper, not yet normalised)."""
        check_vector("compact", compact, subspace.size)
        if not 0 <= weight < float("inf"):
            raise InvalidVector(f"weight={weight}", "a finite weight >= 0", "Use the number of samples, or 1.")
        total = self.totals.get(subspace)
        if total is None:
            total = torch.zeros(subspace.size, dtype=SUM_DTYPE[compact.dtype], device=compact.device)
            self.totals[subspace] = total
        total.add_(compact.to(total.dtype), alpha=weight)
        self.weight += weight

    @torch.no_grad()
    def add_sum(self, subspace: Subspace, total: Tensor, weight: float) -> None:
        """Add the weighted sum of several devices' vectors and their joint weight; the vector is only read.

        The vectors themselves are checked by whoever adds them up; their sum is not looked at again.
        """
        check_vector("total", total, subspace.size, trusted=True)
        mine = self.totals.get(subspace)
        self.totals[subspace] = total.to(SUM_DTYPE[total.dtype]) if mine is None else mine + total
        self.weight += weight

    def __add__(self, other: "Sums") -> "Sums":
        result = Sums()
        result.weight = self.weight + other.weight
        for part in (self, other):
            for subspace, total in part.totals.items():
                mine = result.totals.get(subspace)
                result.totals[subspace] = total.clone() if mine is None else mine.add_(total)
        return result

    @torch.no_grad()
    def mean(self) -> tuple[Subspace, Tensor]:
        """The weighted mean, in the largest subspace present: recover it to have it in the full space."""
        if not self.totals or self.weight == 0:
            raise InvalidVector("no updates of positive weight", "at least one", "Keep the model as it is.")
        chain = require_nested(self.totals)
        carried = self.totals[chain[0]]
        if len(chain) == 1:
            return chain[0], carried / self.weight
        for below, subspace in pairwise(chain):
            carried = below.unfold(carried, subspace, trusted=True).add_(self.totals[subspace])
        return chain[-1], carried.div_(self.weight)

    def recover(self) -> Tensor:
        """The weighted mean in the full space: Σ pᵢ Sᵢψᵢ with Σ pᵢ = 1."""
        largest, mean = self.mean()
        return mean if largest.is_full and not largest.orthonormal else largest.recover(mean, trusted=True)
