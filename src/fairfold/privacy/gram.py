"""Gram matrices of histories under differential privacy: what a client sends, and what noise leaves of the sum.

*A client.* With x a history over the H leading items, n its length there, and q each item's share of all interactions
(public, from noisy counts), r = x − n·q is what is unusual in it; the rest would use up most of the norm, and the
server knows it. A client sends the upper triangle of v vᵀ, with v = r scaled so that the norm of the triangle is √½ at
most, in multiples of 2⁻⁸.

*The server* gets Σ v vᵀ of K users with noise of standard deviation s on every number. Public facts decide the rest:

* *H = 7 √(K/s) items.* More items share the noise of more pairs, fewer leave out more of the catalogue.
* *The spectrum.* Noise alone has no eigenvalue above e = 2 s √H (the edge of Wigner's semicircle). Directions below it
  are dropped, and an eigenvalue w above it, which noise has pushed up, is brought back to √(w² − e²).
* *The usual part* comes back as K·m²·q qᵀ, where m is the mean of √n, which the counts add up to.

The constants were found on MovieLens 1M, 2,000 of its users, MovieLens 100K and Gowalla at ε of 2, 4 and 8
(docs/privacy-evidence.md): there H of a third more or less costs little.
"""

from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fairfold.data import Interactions

NUM_ITEMS = 7.0  # H √(s/K)
MIN_ITEMS = 16  # H at least, where the catalogue has so many items
COUNT_STEPS = 1 << 16  # fixed-point steps per 1 of a user's weight in item counts
RESIDUAL_STEPS = 256  # fixed-point steps per 1 of v
ROUNDING_ROOM = 0.998  # factor by which v is shortened so that rounding does not exceed its norm
USERS_AT_ONCE = 1_024  # users whose v are in memory at a time


def count_weights(histories: "Interactions") -> Tensor:
    """Weight of each user in private item counts: 1/√n, so that the norm of their part is 1 at most."""
    return (COUNT_STEPS / histories.counts_by_user.clamp(min=1).double().sqrt()).floor() / COUNT_STEPS


def item_shares(counts: Tensor, head: int) -> Tensor:
    """q: each leading item's share of all interactions."""
    leading = counts[:head].double().clamp(min=1)
    return leading / leading.sum()


def private_sum(items: Tensor, lengths: Tensor, shares: Tensor, leading: int) -> Tensor:
    """The packed sum Σ v vᵀ of scaled residuals v of users, over the leading items; histories are concatenated."""
    total = torch.zeros(leading, leading, dtype=torch.float64)
    blocks = torch.split(lengths, USERS_AT_ONCE)
    for part, block in zip(torch.split(items, [int(block.sum()) for block in blocks]), blocks, strict=True):
        residuals = clipped_residuals(part, block, shares)[:, :leading]
        total.addmm_(residuals.T, residuals)  # multiples of 2⁻⁸: exact in any order
    return total[tuple(torch.tril_indices(leading, leading))]


def clipped_residuals(items: Tensor, lengths: Tensor, shares: Tensor) -> Tensor:
    """Scaled residuals v of users, a row each: multiples of 2⁻⁸ whose triangle has a norm of √½ at most."""
    user = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    known = items < len(shares)
    history = torch.zeros(len(lengths), len(shares), dtype=torch.float64)
    history[user[known], items[known]] = 1
    residuals = history - (history.sum(1, keepdim=True) * shares.double()).clamp(max=1)
    residuals[history.sum(1) == 0] = 0
    fourth_of_norm = residuals.square().sum(1, keepdim=True).square().clamp(min=1e-24)
    scale = residuals.norm(dim=1, keepdim=True) * (1 + _sum_of_fourths(residuals) / fourth_of_norm).pow(0.25)
    shrink = torch.full((len(residuals), 1), ROUNDING_ROOM, dtype=torch.float64)
    while True:
        scaled = residuals / scale.clamp(min=1e-12) * shrink
        clipped: Tensor = (scaled * RESIDUAL_STEPS).round() / RESIDUAL_STEPS
        fourth_of_norm = clipped.square().sum(1, keepdim=True).square()
        too_long = (fourth_of_norm + _sum_of_fourths(clipped)) > 1  # twice the square of the triangle's norm
        if not bool(too_long.any()):
            return clipped
        shrink[too_long] *= ROUNDING_ROOM


def _sum_of_fourths(rows: Tensor) -> Tensor:
    return rows.pow(4).sum(1, keepdim=True)


def num_items_under_noise(users: int, noise: float, most: int) -> int:
    """H: how many items are modeled under noise."""
    return min(most, max(MIN_ITEMS, round(NUM_ITEMS * sqrt(users / noise))))


def noise_edge(items: int, noise: float) -> float:
    """e: the largest eigenvalue of noise alone."""
    return 2 * noise * sqrt(items)


def denoise(gram: Tensor, noise: float) -> Tensor:
    """A noisy co-occurrence matrix without the directions that noise explains."""
    edge = noise_edge(len(gram), noise)
    values, vectors = torch.linalg.eigh(gram.double())
    above = values > edge
    kept: Tensor = vectors[:, above] * (values[above].square() - edge**2).sqrt().sqrt()
    return kept @ kept.T


def recover_gram(gram: Tensor, counts: Tensor, users: int, noise: float) -> Tensor:
    """The co-occurrence matrix without noise, and with the usual part added back."""
    shares = item_shares(counts, len(gram))
    mean = float(counts.clamp(min=0).sum()) / max(users, 1)
    return (denoise(gram, noise) + users * mean**2 * torch.outer(shares, shares)).to(gram.dtype)
