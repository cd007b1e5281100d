"""What each user gets of two models, compared user by user: the mean difference, with an interval over the users.

Users differ far more than models do, so an error of each model's own mean says little about which of two is better. A
cell keeps what every user got, two bytes each; whoever compares cells draws users again, with replacement, and takes
the differences of both cells for the same users (the paired bootstrap).
"""

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

Each = NDArray[numpy.float64]
STEPS = 2**16 - 1
"""Values from 0 to 1, or to the largest where that is more, are kept in so many steps."""

DRAWS = 2_000
AT_ONCE = 1 << 22
SHARE = 95.0


class Difference(NamedTuple):
    """The mean over users of what one model gives more than another, and the interval that holds 95 % of the draws."""

    mean: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]".replace("-", "−")


def packed(each: Sequence[float] | Each) -> str:
    """Values of 0 and more, one per user, as text; the largest before them where it is above 1."""
    values = numpy.asarray(each, dtype=numpy.float64)
    most = max(1.0, float(values.max(initial=0.0)))
    steps = numpy.rint(values / most * STEPS).astype("<u2")
    text = base64.b85encode(zlib.compress(steps.tobytes(), 9)).decode("ascii")
    return text if most == 1 else f"{most!r} {text}"


def unpacked(text: str) -> Each:
    """What was packed."""
    most, _, steps = text.rpartition(" ")
    whole = numpy.frombuffer(zlib.decompress(base64.b85decode(steps)), dtype="<u2").astype(numpy.float64) / STEPS
    return whole * float(most or 1)


def over_seeds(texts: Iterable[str]) -> Each:
    """What each user gets in the mean over runs."""
    mean: Each = numpy.mean([unpacked(text) for text in texts], axis=0)
    return mean


def error_of(each: Each) -> float:
    """The standard error of a mean over users."""
    return float(each.std(ddof=1)) / float(len(each) ** 0.5)


def differences(mine: Each, others: Sequence[Each], seed: int = 0) -> list[Difference]:
    """Of a model to others, over the same users in the same order; all of them by the same draws."""
    for other in others:
        if mine.shape != other.shape:
            raise ValueError(f"{len(mine)} and {len(other)} users: only the same users can be compared")
    return intervals(mine - numpy.stack(others), seed)


def intervals(apart: Each, seed: int = 0) -> list[Difference]:
    """Of some differences, each over the same users, [differences, users]: the same draws serve all of them."""
    random, users, found = numpy.random.default_rng(seed), apart.shape[1], []
    for start in range(0, DRAWS, step := max(1, AT_ONCE // users)):
        many = min(step, DRAWS - start)
        drawn = random.integers(0, users, (many, users)) + users * numpy.arange(many)[:, None]
        times = numpy.bincount(drawn.ravel(), minlength=many * users).reshape(many, users)
        found.append(times @ apart.T / users)
    low, high = numpy.percentile(numpy.concatenate(found), [(100 - SHARE) / 2, (100 + SHARE) / 2], axis=0)
    return [Difference(*map(float, each)) for each in zip(apart.mean(1), low, high, strict=True)]
