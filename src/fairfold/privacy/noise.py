"""Noise for sums of whole numbers: discrete Gaussians, drawn exactly, in shares that devices add under their masks.

*Why discrete.* Words are whole numbers, and noise of floating-point numbers has gaps that tell what it was added to. A
discrete Gaussian gives the whole number k with a chance proportional to e^(−k²/2σ²), and costs what a Gaussian of the
same σ costs (Canonne, Kamath and Steinke, 2020). It is drawn here with whole numbers alone: a discrete Laplace number,
kept with a chance that turns it into a Gaussian one. All chances are fractions, or e to the minus a fraction, for which
a game of fractions decides: how far one comes with chances f, f/2, f/3, … is odd or even with the right chance.

*Shares.* Sums of discrete Gaussians are no discrete Gaussians, but with σ ≥ 10 steps per share no chance differs by
more than a factor of 1 + 1e-300 (Kairouz, Liu and Steinke, 2021): their variances add up, and that is all. If every
one of K devices adds noise of variance σ²/⌈(1 − d)K⌉, a sum has at least σ² where no more than a share d drop out. Who
colludes with the server takes its own share off; :data:`STAYING` covers those too.
"""

import os
from collections.abc import Callable
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from fairfold.errors import InvalidSettings
from fairfold.secure.layout import enough as staying_of

Whole = NDArray[np.int64]
Draw = Callable[[int], NDArray[np.uint64]]
"""So many words of 64 random bits."""

STAYING = 70
"""Of a hundred devices so many have to stay, and not to collude, for the noise to be enough."""

LEAST, MOST = 10, 1 << 24
"""Standard deviations, in steps, of the noise of one device."""

WORDS = 1 << 64


def enough(devices: int) -> int:
    """How many of a cohort have to stay."""
    return max(1, staying_of(devices, STAYING))


def share_for(sigma: float, devices: int) -> int:
    """σ of a device's noise, in steps, such that a cohort without those that dropped out has ``sigma`` at least."""
    found = ceil(sigma / sqrt(enough(devices)))
    if not LEAST <= found <= MOST:
        raise InvalidSettings(
            f"noise of {found:,} steps for each of {devices:,} devices", f"{LEAST} to {MOST:,}",
            "Take another number of devices, or another epsilon.",
        )  # fmt: skip
    return found


def discrete_gaussian(sigma: int, many: int, draw: Draw) -> Whole:
    """So many independent whole numbers, each k with a chance proportional to e^(−k²/2σ²)."""
    if not 1 <= sigma <= MOST:
        raise InvalidSettings(f"sigma={sigma} steps", f"a whole number from 1 to {MOST:,}", "Choose other steps.")
    found, filled = np.empty(many, dtype=np.int64), 0
    while filled < many:
        tried = _discrete_laplace(sigma, int((many - filled) * 1.4) + 16, draw)
        # e^(−k²/2σ²) over e^(−|k|/σ) is, up to a constant, e^(−(|k| − σ)²/2σ²).
        kept = tried[_chance_of_exp((np.abs(tried) - sigma) ** 2, 2 * sigma * sigma, draw)]
        some = kept[: many - filled]
        found[filled : filled + len(some)] = some
        filled += len(some)
    return found


def secret(many: int) -> NDArray[np.uint64]:
    """Random bits that nobody can foretell: the system's."""
    return np.frombuffer(os.urandom(8 * many), dtype=np.uint64)


def repeatable(seed: int) -> Draw:
    """Random bits of a simulation, the same for the same seed; no noise of theirs protects anybody."""
    source = np.random.Generator(np.random.PCG64(seed))
    return lambda many: source.integers(0, WORDS - 1, many, dtype=np.uint64, endpoint=True)


def _discrete_laplace(scale: int, many: int, draw: Draw) -> Whole:
    """About so many whole numbers, each k with a chance proportional to e^(−|k|/scale)."""
    low = _below(np.full(many, scale, dtype=np.int64), draw)
    low = low[_chance_of_exp(low, scale, draw)]
    high, going = np.zeros(len(low), dtype=np.int64), np.arange(len(low))
    while len(going):  # how often in a row a chance of e⁻¹ comes true
        going = going[_chance_of_exp(np.ones(len(going), dtype=np.int64), 1, draw)]
        high[going] += 1
    size = low + scale * high
    negative = (draw(len(size)) & np.uint64(1)).astype(bool)
    kept = ~(negative & (size == 0))  # there is one zero, and not two
    found: Whole = np.where(negative, -size, size)[kept]
    return found


def _chance_of_exp(above: Whole, below: int, draw: Draw) -> NDArray[np.bool_]:
    """Each true with a chance of e^(−above/below), for fractions of any size."""
    whole, left = np.divmod(above, below)
    found = _odd_way(left, below, draw)
    while len(going := np.flatnonzero(found & (whole > 0))):  # e⁻¹ for every whole number
        found[going] = _odd_way(np.ones(len(going), dtype=np.int64), 1, draw)
        whole[going] -= 1
    return found


def _odd_way(above: Whole, below: int, draw: Draw) -> NDArray[np.bool_]:
    """Each true with a chance of e^(−f), f = above/below ≤ 1.

    One goes on from step j to j + 1 with a chance of f/j, and so is stopped at step j with f^(j−1)/(j−1)! − f^j/j!: at
    an odd one with 1 − f + f²/2 − f³/6 + … in all.
    """
    step, going, stopped = 1, np.arange(len(above)), np.zeros(len(above), dtype=np.int64)
    while len(going):
        on = _below(np.full(len(going), below * step, dtype=np.int64), draw) < above[going]
        stopped[going[~on]] = step
        going, step = going[on], step + 1
    odd: NDArray[np.bool_] = stopped % 2 == 1
    return odd


def _below(ends: Whole, draw: Draw) -> Whole:
    """A whole number from 0 to below each end, all alike likely: draws beyond the last full round are drawn anew."""
    found, going = np.empty(len(ends), dtype=np.int64), np.arange(len(ends))
    while len(going):
        words, span = draw(len(going)), ends[going].astype(np.uint64)
        rounds = np.uint64(WORDS - 1) // span
        good = words < rounds * span
        found[going[good]] = (words[good] % span[good]).astype(np.int64)
        going = going[~good]
    return found
