"""Updates as a device masks them: fixed-point numbers, and its share of a noisy sum's noise, in plain Python.

``privacy.fixed_point``, ``privacy.noise`` and ``federation.noise`` without torch and numpy; docs/protocol.md has the
numbers, ``tests/vectors/secure.json`` the cases.
"""

import math
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

from fairfold.errors import InvalidMessage, InvalidState
from fairfold.privacy.accounting import Release, composed_sigma, noise_deviations
from fairfold.privacy.participation import Participation, SumRules
from fairfold.privacy.secure.segments import MIN_STAYING_PERCENT, required_owners

if TYPE_CHECKING:
    from fairfold.privacy.secure.client import SecureClient

MAX_SUM = 2**31 - 1  # the largest encoded number of a sum
FRACTION_STEPS = 2**14  # largest whole part, and number of fractional steps, of a header number
HEADER_LENGTH = 6
RELEASES = {"counts": Release(0.1, 1.0), "sum": Release(0.9, sqrt(0.5))}  # of the default algorithm
MIN_SIGMA, MAX_SIGMA = 10, 1 << 24  # range of the standard deviation, in steps, of one device's noise
MASK = 2**32 - 1
DRAWN_AT_ONCE = 1 << 12  # random numbers


@dataclass(frozen=True)
class Measured:
    """An update, with the sum of the qualities that users measured, and their number."""

    sums: Mapping[str, Sequence[float]]
    weight: float
    quality: float = 0.0
    evaluated: float = 0.0


@dataclass(frozen=True)
class DeviceEncoding:
    """How the tensors of an update become integers, for a sum over some devices."""

    steps: Mapping[str, int]  # per unit, by tensor
    clients: int  # the most of a sum
    deviations: Mapping[str, float] = field(default_factory=dict)  # of the noise that each sum needs
    clip: float = 1.0  # bound of numbers in tensors without steps of their own

    @property
    def max_value(self) -> int:
        """Largest absolute value of a device's number; twenty standard deviations of noise have room."""
        surplus = sqrt(self.clients / _min_survivors(self.clients))
        noise = [20 * of * surplus * self.steps[name] for name, of in self.deviations.items()]
        return (MAX_SUM - max(map(ceil, noise), default=0)) // self.clients

    def steps_of(self, name: str) -> float:
        """Steps per unit of a tensor: declared by the algorithm, or a power of two."""
        return self.steps[name] if name in self.steps else 2.0 ** math.floor(math.log2(self.max_value / self.clip))

    def _clipped(self, name: str, numbers: Sequence[float]) -> Sequence[float]:
        if name in self.steps:
            return numbers
        return [max(-self.clip, min(self.clip, number)) for number in numbers]

    def encode(self, measured: Measured) -> Any:
        """An update as integers: the header, then the tensors in the order of their names."""
        encoded = array("I")
        for number in (measured.weight, measured.quality, measured.evaluated):
            if not 0 <= number < math.inf:
                raise InvalidMessage(f"a weight or quality of {number}", "0 or more", "Nothing was sent.")
            whole, fraction = divmod(min(number, float(FRACTION_STEPS)), 1)
            encoded.extend([int(whole), round(fraction * FRACTION_STEPS)])
        for name in sorted(measured.sums):
            numbers = [round(number * self.steps_of(name)) for number in self._clipped(name, measured.sums[name])]
            if max(map(abs, numbers), default=0) > self.max_value:
                given = f"{name} with too large a number in a sum of {self.clients:,} devices"
                raise InvalidMessage(given, f"{self.max_value / self.steps_of(name):g} at most", "Nothing was sent.")
            encoded.extend(number & MASK for number in numbers)
        return encoded


def masked(
    mine: Participation,
    client: "SecureClient",
    rules: SumRules,
    measured: Measured,
    steps: Mapping[str, int],
    privacy: Mapping[str, Any],
    window: int,
) -> bytes:
    """The masked vector of an update; noise is entered in the device's ledger before."""
    mine.remember(rules)
    deviations = dict[str, float]()
    if rules.noisy:
        needed = noise_deviations(float(privacy["epsilon"]), float(privacy["delta"]), RELEASES)
        deviations = {name: needed[name] for name in measured.sums if name in RELEASES}
    encoding = DeviceEncoding(steps, len(client.cohort.members), deviations, float(privacy.get("clip", 1.0)))
    vector = encoding.encode(measured)
    if rules.noisy:
        if not deviations:
            raise InvalidMessage("a sum that may not be released with noise", "counts or pairs", "It is not sent.")
        sigma = composed_sigma(needed / RELEASES[name].norm for name, needed in deviations.items())
        add_noise(encoding, measured, vector, mine.enter(client, sigma, window))
    return client.mask(vector)


# -- noise -------------------------------------------------------------------------------------------------------------


def add_noise(encoding: DeviceEncoding, measured: Measured, vector: Any, slices: Iterable[tuple[slice, int]]) -> None:
    """Add this device's share of the noise to its vector, in place; slices: where, and how many own them."""
    slices = list(slices)
    start = HEADER_LENGTH
    draws = Draws()
    for name in sorted(measured.sums):
        first, start = start, start + len(measured.sums[name])
        if name not in encoding.deviations:
            continue
        steps = encoding.steps[name]
        norm = math.hypot(*(_signed(number) for number in vector[first:start])) / steps
        if norm > measured.weight * RELEASES[name].norm * (1 + 1e-9):
            given = f"{name!r} with a norm of {norm:.6g} of {measured.weight:g} users"
            raise InvalidState(given, f"{RELEASES[name].norm:.6g} per user: noise is sized for it", "Nothing was sent.")
        for where, owners in slices:
            share = ceil(encoding.deviations[name] * steps / sqrt(_min_survivors(owners)))
            if not MIN_SIGMA <= share <= MAX_SIGMA:
                given = f"noise of {share:,} steps for each of {owners:,} devices"
                raise InvalidState(given, f"{MIN_SIGMA} to {MAX_SIGMA:,}", "Nothing was sent.")
            for place in range(max(first, where.start), min(start, where.stop)):
                vector[place] = (vector[place] + draws.gaussian(share)) & MASK


def _signed(number: int) -> int:
    return number - (number >> 31 << 32)


def _min_survivors(cohort_size: int) -> int:
    return max(1, required_owners(cohort_size, MIN_STAYING_PERCENT))


class Draws:
    """Exact draws from the system's random numbers: nothing here is rounded (``privacy.noise`` says why and how)."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def below(self, end: int) -> int:
        """A uniform integer below ``end``."""
        whole = 2**64 // end * end
        while True:
            if not self._numbers:
                self._numbers = array("Q", os.urandom(8 * DRAWN_AT_ONCE)).tolist()
            if (number := self._numbers.pop()) < whole:
                return number % end

    def gaussian(self, sigma: int) -> int:
        """An integer k with a probability proportional to e^(−k²/2σ²)."""
        while True:
            proposed = self._laplace(sigma)
            if self._happens((abs(proposed) - sigma) ** 2, 2 * sigma * sigma):
                return proposed

    def _laplace(self, scale: int) -> int:
        while True:
            low = self.below(scale)
            if not self._happens(low, scale):
                continue
            high = 0
            while self._happens(1, 1):
                high += 1
            size, negative = low + scale * high, self.below(2)
            if size or not negative:  # there is one zero, and not two
                return -size if negative else size

    def _happens(self, above: int, below: int) -> bool:
        """True with probability e^(−above/below)."""
        while above > below:
            if not self._happens(1, 1):
                return False
            above -= below
        step = 1
        while self.below(below * step) < above:
            step += 1
        return step % 2 == 1
