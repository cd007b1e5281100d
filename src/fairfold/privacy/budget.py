"""How an ε is divided among what a run lets out, and what is told of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairfold.privacy.accounting import epsilon_of, part_of, sigma_for, together

UNIT = "one user's whole history"
"""What may be there or not without the outcome telling."""

ASSUMPTIONS = (
    "neighbours are federations with and without one user, whose part is then zero; how many take part is public",
    "a user is on one device, and speaks once in a run",
    "nothing is claimed for the drawing of cohorts",
    "where devices add the noise, no more than three in ten of them leave a sum or collude with the server",
    "random numbers of devices and server are secret",
)


@dataclass(frozen=True)
class Release:
    """A sum that is let out: its share of the budget, and what the Euclidean norm of no user's part exceeds."""

    share: float
    norm: float


def deviations(epsilon: float, delta: float, releases: Mapping[str, Release]) -> dict[str, float]:
    """The standard deviation of the noise of every sum, such that all of them cost (ε, δ) together."""
    sigma = sigma_for(epsilon, delta)
    return {name: one.norm * part_of(sigma, one.share) for name, one in releases.items()}


def spent(epsilon: float, delta: float, releases: Mapping[str, Release]) -> dict[str, Any]:
    """What is told of a run that has let out all of these sums: ε worked out again from the noise that was added."""
    noise = deviations(epsilon, delta, releases)
    sigmas = {name: noise[name] / one.norm for name, one in releases.items()}
    return {
        "epsilon": epsilon_of(together(sigmas.values()), delta),
        "delta": delta,
        "unit": UNIT,
        "releases": {name: {"sigma": sigma, "noise": noise[name]} for name, sigma in sigmas.items()},
        "assumptions": list(ASSUMPTIONS),
    }
