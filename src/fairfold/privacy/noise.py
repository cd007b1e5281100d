"""Noise for sums of whole numbers: discrete Gaussians, drawn exactly, in shares that clients add under their masks.

*Why discrete.* Encoded vectors are integers, and floating-point noise has gaps that reveal what it was added to. A
discrete Gaussian is the integer k with a probability proportional to e^(−k²/2σ²), and costs what a Gaussian of the same
σ costs (Canonne, Kamath and Steinke, 2020). It is drawn with integers alone: a discrete Laplace number, accepted with a
probability that turns it into a Gaussian one. All probabilities are fractions f, or e^(−f), drawn by fractions as well.

*Shares.* Sums of discrete Gaussians are no discrete Gaussians, but with σ ≥ 10 steps per share no probability differs
by more than a factor of 1 + 1e-300 (Kairouz, Liu and Steinke, 2021): their variances add up, and that is all. If every
one of K clients adds noise of variance σ²/⌈(1 − d)K⌉, a sum has at least σ² where no more than a share d drop out. A
client that colludes with the server subtracts its own share; :data:`~.segments.MIN_STAYING_PERCENT` covers those too.
"""

import os
from collections.abc import Callable
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from fairfold.errors import InvalidSettings
from fairfold.privacy.secure.segments import MIN_STAYING_PERCENT, required_owners

Whole = NDArray[np.int64]
Draw = Callable[[int], NDArray[np.uint64]]  # source of random 64-bit integers: returns as many as asked
MIN_SIGMA, MAX_SIGMA = 10, 1 << 24  # range of the standard deviation, in steps, of one client's noise
RANDOM_RANGE = 1 << 64


def min_survivors(cohort_size: int) -> int:
    """How many clients of a cohort must stay for the noise to suffice."""
    return max(1, required_owners(cohort_size, MIN_STAYING_PERCENT))


def client_noise_sigma(sigma: float, cohort_size: int) -> int:
    """σ of one client's noise, in steps, such that the survivors of a cohort add ``sigma`` at least."""
    share = ceil(sigma / sqrt(min_survivors(cohort_size)))
    if not MIN_SIGMA <= share <= MAX_SIGMA:
        given, needed = f"noise of {share:,} steps for each of {cohort_size:,} devices", f"{MIN_SIGMA} to {MAX_SIGMA:,}"
        raise InvalidSettings(given, needed, "Take another number of devices, or another epsilon.")
    return share


def discrete_gaussian(sigma: int, count: int, draw: Draw) -> Whole:
    """Draw independent integers, each k with a probability proportional to e^(−k²/2σ²)."""
    if not 1 <= sigma <= MAX_SIGMA:
        raise InvalidSettings(f"sigma={sigma} steps", f"a whole number from 1 to {MAX_SIGMA:,}", "Choose other steps.")
    found, filled = np.empty(count, dtype=np.int64), 0
    while filled < count:
        proposed = _discrete_laplace(sigma, int((count - filled) * 1.4) + 16, draw)
        # e^(−k²/2σ²) over e^(−|k|/σ) is, up to a constant, e^(−(|k| − σ)²/2σ²).
        accepted = proposed[_bernoulli_exp((np.abs(proposed) - sigma) ** 2, 2 * sigma * sigma, draw)][: count - filled]
        found[filled : filled + len(accepted)] = accepted
        filled += len(accepted)
    return found


def system_random(count: int) -> NDArray[np.uint64]:
    """Cryptographically secure random integers of the operating system."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


def seeded_random(seed: int) -> Draw:
    """Reproducible random integers of a simulation; noise from them protects no one."""
    source = np.random.Generator(np.random.PCG64(seed))
    return lambda count: source.integers(0, RANDOM_RANGE - 1, count, dtype=np.uint64, endpoint=True)


def _discrete_laplace(scale: int, count: int, draw: Draw) -> Whole:
    """Draw about ``count`` integers, each k with a probability proportional to e^(−|k|/scale)."""
    low = _uniform_below(np.full(count, scale, dtype=np.int64), draw)
    low = low[_bernoulli_exp(low, scale, draw)]
    high, going = np.zeros(len(low), dtype=np.int64), np.arange(len(low))
    while len(going):  # how often in a row an event of probability e⁻¹ occurs
        going = going[_bernoulli_exp(np.ones(len(going), dtype=np.int64), 1, draw)]
        high[going] += 1
    size = low + scale * high
    negative = (draw(len(size)) & np.uint64(1)).astype(bool)
    found: Whole = np.where(negative, -size, size)[~(negative & (size == 0))]  # there is one zero, and not two
    return found


def _bernoulli_exp(above: Whole, below: int, draw: Draw) -> NDArray[np.bool_]:
    """Each True with probability e^(−above/below), for fractions of any size."""
    whole, left = np.divmod(above, below)
    found = _bernoulli_exp_fraction(left, below, draw)
    while len(going := np.flatnonzero(found & (whole > 0))):  # e⁻¹ for every whole number
        found[going] = _bernoulli_exp_fraction(np.ones(len(going), dtype=np.int64), 1, draw)
        whole[going] -= 1
    return found


def _bernoulli_exp_fraction(above: Whole, below: int, draw: Draw) -> NDArray[np.bool_]:
    """Each True with probability e^(−f), f = above/below ≤ 1."""
    # One goes on from step j to j + 1 with probability f/j, and so is stopped at step j with f^(j−1)/(j−1)! − f^j/j!:
    # at an odd one with 1 − f + f²/2 − f³/6 + … in all.
    step = 1
    going = np.arange(len(above))
    stopped = np.zeros(len(above), dtype=np.int64)
    while len(going):
        goes_on = _uniform_below(np.full(len(going), below * step, dtype=np.int64), draw) < above[going]
        stopped[going[~goes_on]] = step
        going, step = going[goes_on], step + 1
    odd: NDArray[np.bool_] = stopped % 2 == 1
    return odd


def _uniform_below(ends: Whole, draw: Draw) -> Whole:
    """Uniform integers from 0 to below each end; draws beyond the last full multiple of the end are repeated."""
    found, going = np.empty(len(ends), dtype=np.int64), np.arange(len(ends))
    while len(going):
        bits, span = draw(len(going)), ends[going].astype(np.uint64)
        good = bits < np.uint64(RANDOM_RANGE - 1) // span * span
        found[going[good]] = (bits[good] % span[good]).astype(np.int64)
        going = going[~good]
    return found
