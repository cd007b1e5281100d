"""The model that a sum of pairs gives, and what it is made with: λ, β, support, what neighbours and counts weigh."""

from typing import NamedTuple

import torch
from torch import Tensor

from fairfold.algorithms.pair_architecture import LISTED, NEAR, POPULAR, ROWS, PairArchitecture
from fairfold.algorithms.pairs import matrix_of, size_of
from fairfold.algorithms.spectrum import Precision, neighbours, strongest
from fairfold.methods.leading import CURVE
from fairfold.projections.coded import FACTORS
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.plan import Plan
from fairfold.values import Weights


class Making(NamedTuple):
    """Multiples of what the settings say of λ, β, the weight of neighbours, support and popularity."""

    ridge: float = 1.0
    beta: float = 1.0
    near: float = 1.0
    support: float = 1.0
    prior: float = 1.0

    def of(self, usual: "Made", counts: Tensor, support: int) -> "Made":
        """What is made with these multiples of what is usual, of items with such counts."""
        beta, near, prior = self.beta * usual.beta, self.near * usual.near, self.prior * usual.prior
        items = supported(counts, self.support * support) if self.support > 1 else usual.items
        return Made(self.ridge * usual.ridge, usual.columns, beta, near, items, prior)


MAKINGS = (
    Making(), Making(2.0), Making(0.5), Making(0.5, beta=0.0), Making(2.0, beta=2.0), Making(near=3.0),
    Making(support=3.0), Making(prior=8.0),
)  # fmt: skip
"""What is tried; the settings as they are come first. The more rare items weigh (β), the more λ holds them down."""


class Made(NamedTuple):
    """What a model is made with: λ, columns, β, what a neighbour's likeness counts, how many items, and popularity."""

    ridge: float
    columns: float
    beta: float
    near: float
    items: float
    prior: float = 0.0

    def words(self) -> str:
        """The same for a reader."""
        near = f"neighbours × {self.near:.2g}" if self.near else "no neighbours"
        popular = f"popularity × {self.prior:.2g}" if self.prior else "no popularity"
        return f"λ = {self.ridge:.3g}, β = {self.beta:.2g}, {int(self.items):,} items, {near}, {popular}"


def counts_in(plan: Plan, head: int) -> Tensor:
    """How many users have each item of the head, as far as they were asked."""
    return plan.public.survey.get(COUNTS, torch.ones(head))[:head]


def supported(counts: Tensor, support: float) -> int:
    """Items up to the last one that so many users have, and one at least."""
    enough = (counts >= support).nonzero()
    return int(enough[-1]) + 1 if len(enough) else 1


def curve_of(counts: Tensor, users: int, made: Made) -> Tensor:
    """How much popularity adds to a score, at the items 0, 1, 3, 7, … of all that are known.

    What a history says of item j is a share of the users who would have it, times D_j; so is this.
    """
    known = counts.double().clamp(min=1)
    shares = made.prior * (known / known.mean()) ** -made.beta * known / max(users, 1)
    return shares[(2 ** torch.arange(CURVE) - 1).clamp(max=len(shares) - 1)]


def leading_block(sums: Tensor, made: Made) -> Tensor:
    """The matrix of the items that a model is made of: the leading part of the sum."""
    return matrix_of(sums[: size_of(int(made.items))].float())


def model_of(gram: Tensor, counts: Tensor, made: Made, architecture: PairArchitecture) -> Weights:
    """The tensors that follow from a sum, which is used up: leading rows of the table, pairs, neighbours, popularity.

    Items of the head beyond those of the sum have no row, no pair and no neighbour.
    """
    (head, width), lists = architecture.tables[ROWS], architecture.dense
    counts, found = counts[: len(gram)], Weights()
    if NEAR in lists:
        near = torch.arange(head).double()[:, None].repeat(lists[NEAR][0] // head, 1, 3)
        near[..., 2] = 0
        if made.near:
            near[:, : len(gram)] = neighbours(gram, counts, len(near)).view(len(near), len(gram), 3)
            near[..., 2] *= made.near
        found[NEAR] = near.view(-1, 3)
    precision = Precision.of(gram, counts, made.beta, made.ridge)
    values, vectors = precision.spectrum(min(int(made.columns), len(gram)))
    rows, into, out = vectors * values.clamp(min=0).sqrt(), precision.scales * precision.roots, 1 / precision.roots
    listed = strongest(precision.correlations(), counts, lists[LISTED][0])
    rarer, other = listed[:, :2].long().T
    listed[:, 2] *= out[rarer] * into[other]
    table = torch.zeros(head, width, dtype=rows.dtype)
    table[: len(rows), : FACTORS + rows.shape[1]] = torch.cat([into[:, None], out[:, None], rows], dim=1)
    found[POPULAR] = curve_of(counts, architecture.known_users, made)
    return found | {ROWS: table, LISTED: listed}
