"""Privacy accounting of Gaussian noise: ε and δ of one release, of several, and the noise that a budget needs.

A release is a sum over users, none of whose parts has a Euclidean norm above 1, with Gaussian noise of standard
deviation σ on every number. Compared with the sum without one user's whole part, the privacy loss is itself Gaussian,
so that δ for a given ε is a closed form (Balle and Wang, 2018):

    δ(ε) = Φ(1/2σ − εσ) − e^ε · Φ(−1/2σ − εσ).

Several releases, each of which may depend on those before, cost together exactly what one release costs whose 1/σ² is
the sum of theirs: no accountant is needed, and nothing is an approximation. Nothing is claimed for the drawing of
cohorts: a server that picks who takes part is not fooled by its own draw.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import erfc, exp, sqrt
from typing import Any

from fairfold.errors import InvalidSettings

MIN_SIGMA, MAX_SIGMA = 1e-3, 1e9  # range of σ that is searched


def delta_of(sigma: float, epsilon: float) -> float:
    """δ for a given ε of a release with noise of standard deviation σ."""
    if sigma <= 0 or epsilon < 0:
        raise InvalidSettings(f"sigma={sigma}, epsilon={epsilon}", "sigma > 0 and epsilon ≥ 0", "Check both.")
    # Where e^ε would overflow, e^ε · Φ(−1/2σ − εσ) is nothing beside the first term.
    unlikely = exp(epsilon) * _normal(-0.5 / sigma - epsilon * sigma) if epsilon < 700 else 0.0
    return max(0.0, _normal(0.5 / sigma - epsilon * sigma) - unlikely)


def epsilon_of(sigma: float, delta: float) -> float:
    """ε for a given δ: the least for which the closed form gives no more than δ."""
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
    """The least σ at which a release costs no more than (ε, δ)."""
    if epsilon <= 0 or not 0 < delta < 1:
        raise InvalidSettings(f"epsilon={epsilon}, delta={delta}", "epsilon > 0, 0 < delta < 1", "Check both.")
    low, high = MIN_SIGMA, MAX_SIGMA
    for _ in range(200):
        middle = sqrt(low * high)
        low, high = (middle, high) if delta_of(middle, epsilon) > delta else (low, middle)
    return high


def composed_sigma(sigmas: Iterable[float]) -> float:
    """σ of the single release that costs what several releases cost together (composition)."""
    total = sum(sigma**-2 for sigma in sigmas)
    return total**-0.5 if total else MAX_SIGMA


def sigma_for_share(sigma: float, share: float) -> float:
    """σ of a release that costs a share of a budget given by σ; shares that add up to 1 cost the whole."""
    return sigma / sqrt(share)


def _normal(value: float) -> float:
    """Φ, the standard normal distribution function."""
    return erfc(-value / sqrt(2)) / 2


UNIT = "one user's whole history"  # unit of privacy: what may be present or absent without the outcome revealing it
ASSUMPTIONS = (
    "neighbors are federations with and without one user, whose part is then zero; how many take part is public",
    "a user is on one device, and contributes once in a run",
    "nothing is claimed for the drawing of cohorts",
    "where devices add the noise, no more than three in ten of them leave a sum or collude with the server",
    "random numbers of devices and server are secret",
)


@dataclass(frozen=True)
class Release:
    """A released sum: its share of the budget, and a bound of the Euclidean norm of a user's contribution."""

    share: float
    norm: float


def noise_deviations(epsilon: float, delta: float, releases: Mapping[str, Release]) -> dict[str, float]:
    """Standard deviation of the noise of every sum, such that all of them cost (ε, δ) together."""
    sigma = sigma_for(epsilon, delta)
    return {name: one.norm * sigma_for_share(sigma, one.share) for name, one in releases.items()}


def privacy_cost(epsilon: float, delta: float, releases: Mapping[str, Release]) -> dict[str, Any]:
    """Report of a run that has released all of these sums, with ε recomputed from the noise that was added."""
    noise = noise_deviations(epsilon, delta, releases)
    sigmas = {name: noise[name] / one.norm for name, one in releases.items()}
    return {
        "epsilon": epsilon_of(composed_sigma(sigmas.values()), delta),
        "delta": delta,
        "unit": UNIT,
        "releases": {name: {"sigma": sigma, "noise": noise[name]} for name, sigma in sigmas.items()},
        "assumptions": list(ASSUMPTIONS),
    }
