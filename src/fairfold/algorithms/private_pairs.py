"""A model of pairs under noise: how many items, which ridge, and what is left of a noisy sum.

With K users and noise of standard deviation s on every number of the packed sum, all follows from public facts:

* *H = 7 √(K/s) items* are correlated. More items share the noise of more pairs, fewer leave more of the catalogue out.
* *The spectrum.* Noise alone has no eigenvalue above e = 2 s √H (the edge of Wigner's semicircle). Directions of the
  sum below it are dropped, and an eigenvalue v above it, which noise has pushed up, is brought back to √(v² − e²).
* *λ = 2 e*, twice that edge, and *β = 0.2*.

The constants were found on MovieLens 1M, 2,000 of its users, MovieLens 100K and Gowalla at ε of 2, 4 and 8
(docs/privacy.md): there H of a third more or less and λ of half or twice as much cost little.
"""

from math import sqrt

import torch
from torch import Tensor

from fairfold.privacy.budget import Release
from fairfold.protocol.algorithm import COUNTS

ITEMS, EDGES, BETA = 7.0, 2.0, 0.2
"""Constants of the rule: see above."""

FEWEST = 16
"""Items that are correlated at least, where the catalogue has them."""


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


def releases(pairs: str) -> dict[str, Release]:
    """What is let out: a tenth of the budget for counts, which number the items, and the rest for pairs.

    A user with n items adds 1/√n to the count of each, and 1/√(n(n + 1)) to each of their n(n + 1)/2 pairs.
    """
    return {COUNTS: Release(0.1, 1.0), pairs: Release(0.9, sqrt(0.5))}
