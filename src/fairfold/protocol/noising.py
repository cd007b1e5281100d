"""Noise of the sums that a private run lets out: how much, and where it comes from.

Noise is sized for each segment by those who own it, so that the sum of every segment has enough, whoever is small.
"""

from collections.abc import Iterable, Mapping
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from fairfold.errors import InvalidState, Refused
from fairfold.privacy.accounting import together
from fairfold.privacy.budget import deviations, spent
from fairfold.privacy.encoding import Encoding, Segment, Words, added
from fairfold.privacy.noise import Draw, discrete_gaussian, enough, repeatable, share_for
from fairfold.protocol.sampling import Purpose, generator
from fairfold.settings.privacy import PrivatePrivacy, SecurePrivacy

if TYPE_CHECKING:
    from fairfold.settings import Settings

AT_ONCE = 1 << 16
"""Words to which a device adds noise at a time."""


def needed_in(settings: "Settings", name: str) -> float:
    """The standard deviation that a sum needs."""
    chosen = settings.privacy
    assert isinstance(chosen, PrivatePrivacy)
    return deviations(chosen.epsilon, chosen.delta, settings.algorithm.releases)[name]


def noise_in(settings: "Settings", name: str, devices: int) -> float:
    """The standard deviation that a sum has where all of so many devices answer."""
    chosen = settings.privacy
    assert isinstance(chosen, PrivatePrivacy)
    return needed_in(settings, name) * (sqrt(devices / enough(devices)) if chosen.noise == "devices" else 1.0)


def spare_for(settings: "Settings", grids: Mapping[str, int], devices: int) -> int:
    """Steps of a word that noise may need, twenty deviations of it: more never come."""
    if not isinstance(settings.privacy, PrivatePrivacy):
        return 0
    known = [name for name in settings.algorithm.releases if name in grids]
    return max(ceil(20 * noise_in(settings, name, devices) * grids[name]) for name in known)


def sigma_of(settings: "Settings", names: Iterable[str]) -> float:
    """Noise of a sum that says some things, over the norm of a user's part; refused where any of them has none."""
    algorithm, found = settings.algorithm, list[float]()
    for name in names:
        if name in algorithm.releases:
            found.append(needed_in(settings, name) / algorithm.releases[name].norm)
        elif name not in algorithm.public:
            raise Refused(f"{name!r} in a sum with noise", "what the algorithm lets out", "It is not said.")
    return together(found)


def add_noise(
    settings: "Settings", encoding: Encoding, size: int, places: Iterable[tuple[slice, int]], users: float,
    words: Words, draw: Draw,
) -> None:  # fmt: skip
    """Add a device's share of the noise to its words, in place, a block at a time.

    Args:
        settings: Of the run.
        encoding: Of the words.
        size: Of the device.
        places: Of every segment of its words where it lies, and how many devices own it: so many add noise to its sum.
        users: Whose parts these words are the sum of.
        words: All that the device says.
        draw: Where random bits come from.
    """
    places = list(places)
    for name, of in settings.algorithm.releases.items():
        if name not in encoding.layout.shapes[size]:
            continue
        steps = float(encoding.steps(name))
        first, last = encoding.place(Segment(0, len(words), (size,)), name)
        norm = float(np.linalg.norm(words[first:last].view(np.int32).astype(np.float64))) / steps
        if norm > users * of.norm * (1 + 1e-9):
            given = f"{name!r} with a norm of {norm:.6g} of {users:g} users"
            raise InvalidState(given, f"{of.norm:.6g} per user: noise is sized for it", "Nothing was sent.")
        for where, owners in places:
            share = share_for(needed_in(settings, name) * steps, owners)
            start, stop = max(first, where.start), min(last, where.stop)
            for at in range(start, stop, AT_ONCE):
                end = min(at + AT_ONCE, stop)
                words[at:end] += discrete_gaussian(share, end - at, draw).astype(np.uint32)


def noised(
    settings: "Settings", encoding: Encoding, name: str, segment: Segment, asked: int, heard: int, words: Words,
    draw: Draw,
) -> Words:  # fmt: skip
    """An opened sum with the noise that the devices that were heard have added to it, or with the server's."""
    chosen = settings.privacy
    assert isinstance(chosen, PrivatePrivacy)
    sigma = needed_in(settings, name) * float(encoding.steps(name))
    if chosen.noise == "devices":
        sigma = share_for(sigma, asked) * sqrt(heard)  # shares of many steps add up as their variances do
    drawn = discrete_gaussian(ceil(sigma), encoding.words_in(segment, name), draw)
    return added(words, encoding.noise(segment, name, drawn))


def simulated(settings: "Settings", round_number: int) -> Draw:
    """The random numbers of a simulation's noise: one stream for the survey, round −1, and one for every round."""
    return repeatable(generator(settings, Purpose.NOISE, round_number + 1).initial_seed())


def privacy_facts(settings: "Settings") -> dict[str, Any]:
    """What is told of a run's privacy, in files: its level, and what it guarantees under which assumptions."""
    chosen, facts = settings.privacy, dict[str, Any](level=settings.privacy.level)
    if isinstance(chosen, SecurePrivacy):
        facts |= {"smallest cohort": chosen.smallest_cohort}
    if isinstance(chosen, PrivatePrivacy):
        facts |= spent(chosen.epsilon, chosen.delta, settings.algorithm.releases) | {"noise from": chosen.noise}
    return facts | {"warnings": [*chosen.warnings(), *_showing(settings)]}


def _showing(settings: "Settings") -> list[str]:
    """What is left out of exact sums, and why."""
    chosen = settings.privacy
    if not isinstance(chosen, SecurePrivacy) or isinstance(chosen, PrivatePrivacy):
        return []
    found = settings.algorithm.shows(settings)
    return [] if found is None else [f"{found} (docs/privacy.md)."]


def privacy_words(facts: Mapping[str, Any]) -> list[str]:
    """The same for a reader."""
    if facts["level"] == "plain":
        return ["Privacy: plain. The server sees what every device says, and can read a user's history from it."]
    if facts["level"] == "secure":
        sums = f"sums over {facts['smallest cohort']} devices or more"
        return [f"Privacy: secure. The server sees {sums}, and nothing of one device.", *facts["warnings"]]
    known = f"ε = {facts['epsilon']:.3g}, δ = {facts['delta']:g} for {facts['unit']}"
    by = (
        "each device adds its share"
        if facts["noise from"] == "devices"
        else "the server adds it, and sees sums without"
    )
    return [f"Privacy: private. {known}; noise: {by}.", *facts["warnings"]]
