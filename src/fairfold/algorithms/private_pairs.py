"""A model of pairs under noise: what a user says, how many items, which ridge, and what is left of a noisy sum.

*A user.* With x their history over the H leading items, n how many these are, and q each item's share of all that users
have (a public vector, from the noisy counts of the survey), r = x − n·q is what is not usual in it. They say v vᵀ, the
upper triangle, with v = r shrunk so that the norm of the triangle is √½ at most, in multiples of 2⁻⁸. What is
usual would take most of the norm, and all that the server learned of it is known already.

*The server* gets Σ v vᵀ with noise of standard deviation s on every number, from K users. Public facts decide all:

* *H = 7 √(K/s) items* are correlated. More items share the noise of more pairs, fewer leave more of the catalogue out.
* *The spectrum.* Noise alone has no eigenvalue above e = 2 s √H (the edge of Wigner's semicircle). Directions of the
  sum below it are dropped, and an eigenvalue w above it, which noise has pushed up, is brought back to √(w² − e²).
* *What is usual* comes back as K·m²·q qᵀ, where m is the mean of √n, which the counts of the survey add up to.
* *λ = 2 e*, twice that edge, and *β = 0.3*.

The constants were found on MovieLens 1M, 2,000 of its users, MovieLens 100K and Gowalla at ε of 2, 4 and 8
(docs/privacy-evidence.md): there H of a third more or less and λ of half or twice as much cost little.
"""

from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.algorithms.pair_architecture import ROWS
from fairfold.algorithms.pairs import UNIT, matrix_of
from fairfold.errors import InvalidMessage
from fairfold.privacy.budget import Release
from fairfold.protocol.algorithm import COUNTS
from fairfold.protocol.words import Sent
from fairfold.settings.privacy import PrivatePrivacy

if TYPE_CHECKING:
    from fairfold.data import Interactions
    from fairfold.settings import Settings

ITEMS, EDGES, BETA = 7.0, 2.0, 0.3
"""Constants of the rule: see above."""

USUAL = "usual"
"""Name of q among what is sent."""

STEPS, ROUNDED, AT_ONCE = 256, 0.998, 1_024
"""Steps of v that are 1; what leaves room for rounding to them; and users whose v are made at a time."""

CHOSEN = tuple(f"algorithm.{key}" for key in ("crowd", "beta", "ridge", "support", "near", "prior", "choose"))
"""Keys that the rule takes the place of."""

TELLING = 5
"""Directions under which a model says hardly more than popularity."""

FEWEST = 16
"""Items that are correlated at least, where the catalogue has them."""


def asked_for(settings: "Settings") -> bool:
    """Whether what is let out has noise."""
    return isinstance(settings.privacy, PrivatePrivacy)


def idle(settings: "Settings") -> list[str]:
    """Keys without effect: no number of a user is above 1, and all lies on a grid; under noise a rule chooses."""
    return ["privacy.bound", *(CHOSEN if asked_for(settings) else ())]


def head_for(users: int, noise: float, most: int) -> int:
    """H: how many items are correlated."""
    return min(most, max(FEWEST, round(ITEMS * sqrt(users / noise))))


def edge_of(items: int, noise: float) -> float:
    """e: what no eigenvalue of noise alone exceeds."""
    return 2 * noise * sqrt(items)


def ridge_for(items: int, noise: float) -> float:
    """λ."""
    return EDGES * edge_of(items, noise)


def denoised(gram: Tensor, noise: float) -> Tensor:
    """What is left of a noisy sum of pairs, as a matrix."""
    edge = edge_of(len(gram), noise)
    values, vectors = torch.linalg.eigh(gram.double())
    above = values > edge
    kept: Tensor = vectors[:, above] * (values[above].square() - edge**2).sqrt().sqrt()
    found: Tensor = kept @ kept.T
    return found


def recovered(gram: Tensor, counts: Tensor, users: int, noise: float) -> Tensor:
    """The sum of pairs as it would be without noise, what is usual in it included."""
    usual, mean = usual_of(counts, len(gram)), float(counts.clamp(min=0).sum()) / max(users, 1)
    found: Tensor = denoised(gram, noise) + users * mean**2 * torch.outer(usual, usual)
    return found.to(gram.dtype)


def usual_of(counts: Tensor, head: int) -> Tensor:
    """Q."""
    leading = counts[:head].double().clamp(min=1)
    return leading / leading.sum()


def usual_in(sent: Sent) -> Tensor:
    """The same as it was sent."""
    found = sent.vectors.get(USUAL)
    if found is None or found.shape != (sent.projections[ROWS].shape[0],):
        raise InvalidMessage("an order without what is usual", "a share for each item", "Check both sides.")
    return found


def shared_among(histories: "Interactions") -> Tensor:
    """What every user counts in each of their items: 1/√n, so that the norm of it all is 1 at most."""
    return (UNIT / histories.counts_by_user.clamp(min=1).double().sqrt()).floor() / UNIT


def private_sum(items: Tensor, lengths: Tensor, usual: Tensor, speaks: int) -> Tensor:
    """The packed sum of v vᵀ over the items that a device speaks of; histories come one after another."""
    found = torch.zeros(speaks, speaks, dtype=torch.float64)
    for some, many in zip(torch.split(items, _sizes(lengths)), torch.split(lengths, AT_ONCE), strict=True):
        vectors = unusual(some, many, usual)[:, :speaks]
        found.addmm_(vectors.T, vectors)  # of multiples of 2⁻⁸: exact in any order
    return found[tuple(torch.tril_indices(speaks, speaks))]


def unusual(items: Tensor, lengths: Tensor, usual: Tensor) -> Tensor:
    """What some users say, v, a row each: multiples of 2⁻⁸, and norms of their triangles of √½ at most."""
    user = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    mine = items < len(usual)
    history = torch.zeros(len(lengths), len(usual), dtype=torch.float64)
    history[user[mine], items[mine]] = 1
    left = history - (history.sum(1, keepdim=True) * usual.double()).clamp(max=1)
    left[history.sum(1) == 0] = 0
    shrunk = torch.full((len(left), 1), ROUNDED, dtype=torch.float64)
    while True:
        scale = left.norm(dim=1, keepdim=True) * (1 + _fourth(left) / _fourth_of_norm(left)).pow(0.25)
        found: Tensor = (left / scale.clamp(min=1e-12) * shrunk * STEPS).round() / STEPS
        squares = found.square().sum(1, keepdim=True)
        over = (squares.square() + _fourth(found)) > 1  # twice the square of the norm of the triangle
        if not bool(over.any()):
            return found
        shrunk[over] *= ROUNDED  # rounding has made some too long


def _fourth(rows: Tensor) -> Tensor:
    return rows.pow(4).sum(1, keepdim=True)


def _fourth_of_norm(rows: Tensor) -> Tensor:
    return rows.square().sum(1, keepdim=True).square().clamp(min=1e-24)


def _sizes(lengths: Tensor) -> list[int]:
    return [int(some.sum()) for some in torch.split(lengths, AT_ONCE)]


def words(packed: Tensor | None, noise: float, items: int) -> list[str]:
    """What is left of a noisy sum, for a reader: all of it follows from the sum, and costs nothing more."""
    if packed is None:
        return []
    gram = matrix_of(packed)
    above = int((torch.linalg.eigvalsh(gram.double()) > edge_of(len(gram), noise)).sum())
    told = f"{len(gram):,} of {items:,} items are correlated, and {above} directions stand out of the noise."
    few = "These users are too few for this ε: what noise leaves is no better than popularity, and may be far worse."
    return [told if above >= TELLING else f"{told} {few}"]


def releases(pairs: str) -> dict[str, Release]:
    """What is let out: a tenth of the budget for counts, which number the items, and the rest for pairs.

    A user with n items adds 1/√n to the count of each, and to pairs what has a norm of √½.
    """
    return {COUNTS: Release(0.1, 1.0), pairs: Release(0.9, sqrt(0.5))}
