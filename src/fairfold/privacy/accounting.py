"""What Gaussian noise costs: ε and δ of one release, of several, and the noise that a budget asks for.

A release is a sum over users in which nobody's part has a larger Euclidean norm than 1, with Gaussian noise of standard
deviation σ on every number. Compared with the sum without one user (the unit is a user's whole part), the privacy loss
is itself Gaussian, so that δ for a given ε is a closed form (Balle and Wang, 2018):

    δ(ε) = Φ(1/2σ − εσ) − e^ε · Φ(−1/2σ − εσ).

Several releases, each of which may depend on those before, have privacy losses that add up: together they cost exactly
what one release costs whose 1/σ² is the sum of theirs. No accountant is needed, and nothing is an approximation.

Nothing is claimed for the drawing of cohorts: a server that picks who takes part is not fooled by its own draw.
"""

from collections.abc import Iterable
from math import erfc, exp, sqrt

from fairfold.errors import InvalidSettings

SMALLEST, LARGEST = 1e-3, 1e9
"""σ that are looked for."""


def delta_of(sigma: float, epsilon: float) -> float:
    """δ that goes with ε, of a release whose noise has this standard deviation."""
    if sigma <= 0 or epsilon < 0:
        raise InvalidSettings(f"sigma={sigma}, epsilon={epsilon}", "sigma > 0 and epsilon ≥ 0", "Check both.")
    return max(0.0, _normal(0.5 / sigma - epsilon * sigma) - _times_exp(epsilon, -0.5 / sigma - epsilon * sigma))


def epsilon_of(sigma: float, delta: float) -> float:
    """ε that goes with δ: the least for which the closed form gives no more."""
    if not 0 < delta < 1:
        raise InvalidSettings(f"delta={delta}", "between 0 and 1", "Take 1e-5, for example.")
    if delta_of(sigma, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(sigma, high) > delta:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(sigma, middle) > delta else (low, middle)
    return high


def sigma_for(epsilon: float, delta: float) -> float:
    """The least σ for which a release costs no more than (ε, δ)."""
    if epsilon <= 0 or not 0 < delta < 1:
        raise InvalidSettings(f"epsilon={epsilon}, delta={delta}", "epsilon > 0, 0 < delta < 1", "Check both.")
    low, high = SMALLEST, LARGEST
    for _ in range(200):
        middle = sqrt(low * high)
        low, high = (middle, high) if delta_of(middle, epsilon) > delta else (low, middle)
    return high


def together(sigmas: Iterable[float]) -> float:
    """σ of the one release that costs what all of these cost."""
    total = sum(sigma**-2 for sigma in sigmas)
    return total**-0.5 if total else LARGEST


def part_of(sigma: float, share: float) -> float:
    """σ of a release that costs a share of what one with a given σ costs; shares that add up to 1 cost that."""
    return sigma / sqrt(share)


def _normal(value: float) -> float:
    """Φ."""
    return erfc(-value / sqrt(2)) / 2


def _times_exp(epsilon: float, value: float) -> float:
    """e^ε · Φ(value), for a value so low that this is at most 1."""
    small = _normal(value)
    if small > 0 and epsilon < 700:
        return exp(epsilon) * small
    return 0.0  # below 1e-300 · e^ε: with |value| ≥ εσ it is nothing beside the first term
