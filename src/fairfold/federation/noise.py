"""Noise in the sums that a differentially private run releases, sized for each segment by the clients that own it."""

from collections.abc import Iterable, Mapping
from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np

from fairfold.config.fleet import DifferentialPrivacy
from fairfold.errors import InvalidState, RequestRefused
from fairfold.federation.algorithm import PrivateReleases
from fairfold.federation.randomness import Purpose, generator
from fairfold.privacy.accounting import composed_sigma, noise_deviations
from fairfold.privacy.fixed_point import Encoding, FixedPointVector, Segment, add_modular
from fairfold.privacy.noise import Draw, client_noise_sigma, discrete_gaussian, min_survivors, seeded_random

if TYPE_CHECKING:
    from fairfold.config import Settings

BLOCK = 1 << 16  # numbers to which a client adds noise at a time


def required_noise_std(settings: "Settings", name: str) -> float:
    """Standard deviation of the noise that a sum needs."""
    privacy = settings.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    return noise_deviations(privacy.epsilon, privacy.delta, PrivateReleases.of(settings.algorithm).releases)[name]


def actual_noise_std(settings: "Settings", name: str, num_clients: int) -> float:
    """Standard deviation of the noise in a sum to which all of ``num_clients`` contribute."""
    privacy = settings.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    surplus = sqrt(num_clients / min_survivors(num_clients)) if privacy.noise == "devices" else 1.0
    return required_noise_std(settings, name) * surplus


def noise_headroom(settings: "Settings", fixed_point: Mapping[str, int], num_clients: int) -> int:
    """Fixed-point steps to reserve for noise: twenty standard deviations, which it never exceeds."""
    if not isinstance(settings.privacy, DifferentialPrivacy):
        return 0
    names = [name for name in PrivateReleases.of(settings.algorithm).releases if name in fixed_point]
    return max(ceil(20 * actual_noise_std(settings, name, num_clients) * fixed_point[name]) for name in names)


def noise_multiplier(settings: "Settings", names: Iterable[str]) -> float:
    """Noise of a sum over the norm of a user's part; refused if a name in it may not be released."""
    private = PrivateReleases.of(settings.algorithm)
    multipliers = list[float]()
    for name in names:
        if name in private.releases:
            multipliers.append(required_noise_std(settings, name) / private.releases[name].norm)
        elif name not in private.public_sums:
            raise RequestRefused(f"{name!r} in a sum with noise", "what the algorithm releases", "It is not sent.")
    return composed_sigma(multipliers)


def add_noise(
    settings: "Settings",
    encoding: Encoding,
    size: int,
    segments: Iterable[tuple[slice, int]],
    num_users: float,
    encoded: FixedPointVector,
    draw: Draw,
) -> None:
    """Add a client's share of the noise to its encoded update, in place; ``segments``: where, and how many own them."""
    segments = list(segments)
    for name, release in PrivateReleases.of(settings.algorithm).releases.items():
        if name not in encoding.layout.shapes[size]:
            continue
        steps = float(encoding.steps(name))
        first, last = encoding.place(Segment(0, len(encoded), (size,)), name)
        norm = float(np.linalg.norm(encoded[first:last].view(np.int32).astype(np.float64))) / steps
        if norm > num_users * release.norm * (1 + 1e-9):
            given = f"{name!r} with a norm of {norm:.6g} of {num_users:g} users"
            raise InvalidState(given, f"{release.norm:.6g} per user: noise is sized for it", "Nothing was sent.")
        for where, owners in segments:
            share = client_noise_sigma(required_noise_std(settings, name) * steps, owners)
            stop = min(last, where.stop)
            for start in range(max(first, where.start), stop, BLOCK):
                end = min(start + BLOCK, stop)
                encoded[start:end] += discrete_gaussian(share, end - start, draw).astype(np.uint32)


def add_aggregate_noise(
    settings: "Settings",
    encoding: Encoding,
    name: str,
    segment: Segment,
    cohort: int,
    contributors: int,
    total: FixedPointVector,
    draw: Draw,
) -> FixedPointVector:
    """A decoded sum with the noise that its contributors of a cohort added together, or with the server's."""
    privacy = settings.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    sigma = required_noise_std(settings, name) * float(encoding.steps(name))
    if privacy.noise == "devices":
        sigma = client_noise_sigma(sigma, cohort) * sqrt(contributors)  # variances of the shares add up
    noise = discrete_gaussian(ceil(sigma), encoding.length_in(segment, name), draw)
    return add_modular(total, encoding.noise(segment, name, noise))


def simulation_noise(settings: "Settings", round_number: int) -> Draw:
    """Random bits of a simulation's noise: a stream per round, and one for the statistics (round −1)."""
    return seeded_random(generator(settings, Purpose.NOISE, round_number + 1).initial_seed())
