"""Outcomes combined over seeds, splits and users: paired differences between models with bootstrap intervals.

Users differ far more than models do, so an error of each model's own mean says little about which of two is better. A
cell keeps what every user got, two bytes each; a comparison of cells resamples users, with replacement, and takes
the differences of both cells for the same users (the paired bootstrap).
"""

import base64
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from experiments.records import Outcome

PerUser = NDArray[numpy.float64]
STEPS = 2**16 - 1
"""Steps in which values from 0 to 1 (or to the largest, if that is more) are stored."""

DRAWS = 2_000
AT_ONCE = 1 << 22
SHARE = 95.0
ROUNDING = 1e-12  # what is smaller is rounding, whose sign depends on the machine


class Difference(NamedTuple):
    """Mean difference between two models over users, with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        mean, low, high = (0.0 if abs(value) < ROUNDING else value for value in self)
        return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]".replace("-", "−")


def pack_per_user(each: Sequence[float] | PerUser) -> str:
    """Pack non-negative values, one per user, as text; preceded by the largest if it is above 1."""
    values = numpy.asarray(each, dtype=numpy.float64)
    most = max(1.0, float(values.max(initial=0.0)))
    steps = numpy.rint(values / most * STEPS).astype("<u2")
    text = base64.b85encode(zlib.compress(steps.tobytes(), 9)).decode("ascii")
    return text if most == 1 else f"{most!r} {text}"


def unpack_per_user(text: str) -> PerUser:
    """Unpack values by user."""
    most, _, steps = text.rpartition(" ")
    whole = numpy.frombuffer(zlib.decompress(base64.b85decode(steps)), dtype="<u2").astype(numpy.float64) / STEPS
    return whole * float(most or 1)


def mean_over_seeds(texts: Iterable[str]) -> PerUser:
    """Mean over runs for each user."""
    mean: PerUser = numpy.mean([unpack_per_user(text) for text in texts], axis=0)
    return mean


def standard_error(each: PerUser) -> float:
    """Standard error of a mean over users."""
    return float(each.std(ddof=1)) / float(len(each) ** 0.5)


def differences(mine: PerUser, others: Sequence[PerUser], seed: int = 0) -> list[Difference]:
    """Differences of a model to others over the same users; all with the same resamples."""
    for other in others:
        if mine.shape != other.shape:
            raise ValueError(f"{len(mine)} and {len(other)} users: only the same users can be compared")
    return intervals(mine - numpy.stack(others), seed)


def intervals(apart: PerUser, seed: int = 0) -> list[Difference]:
    """Bootstrap intervals of differences [differences, users], all with the same resamples."""
    random = numpy.random.default_rng(seed)
    users = apart.shape[1]
    found = []
    for start in range(0, DRAWS, step := max(1, AT_ONCE // users)):
        many = min(step, DRAWS - start)
        drawn = random.integers(0, users, (many, users)) + users * numpy.arange(many)[:, None]
        times = numpy.bincount(drawn.ravel(), minlength=many * users).reshape(many, users)
        found.append(times @ apart.T / users)
    low, high = numpy.percentile(numpy.concatenate(found), [(100 - SHARE) / 2, (100 + SHARE) / 2], axis=0)
    return [Difference(*map(float, each)) for each in zip(apart.mean(1), low, high, strict=True)]


# -- splits and sizes --------------------------------------------------------------------------------------------------

SEED = "seed"
"""Key of an outcome's seed in its facts."""


def with_seed(outcome: Outcome, seed: int) -> Outcome:
    """The outcome with its seed among the facts."""
    return replace(outcome, facts=outcome.facts | {SEED: seed})


def combine_splits(found: list[Outcome], splits: bool) -> tuple[dict[str, float | str], dict[str, dict[int, str]]]:
    """Baselines of a table, and their values by user; means over splits, named with the settings chosen for each."""
    values: dict[str, list[float | str]] = {}
    names, each = dict[str, dict[str, None]](), dict[str, dict[int, str]]()
    for outcome in found:
        known_values: dict[str, float | str] = outcome.facts.get("baselines", {})
        for name in dict.fromkeys([*known_values, *outcome.by_user]):
            plain, _, chosen = name.partition(" (") if splits else (name, "", "")
            if not splits:  # of several data sets the last one's
                values.pop(plain, None), each.pop(plain, None)
            names.setdefault(plain, {})[chosen.removesuffix(")")] = None
            values.setdefault(plain, []).extend([known_values[name]] if name in known_values else [])
            if name in outcome.by_user:
                each.setdefault(plain, {})[outcome.facts[SEED]] = outcome.by_user[name]
    shown = {plain: plain + (f" ({' / '.join(filter(None, of))})" if any(of) else "") for plain, of in names.items()}
    means: dict[str, float | str] = {}
    for plain, known in values.items():
        numbers = [value for value in known if isinstance(value, float)]
        if known:
            missing = next((value for value in known if isinstance(value, str)), "")
            means[shown[plain]] = missing or mean(numbers)
    return means, {shown[plain]: texts for plain, texts in each.items()}


def split_by_size(row: str, column: str, known: list[Outcome]) -> list[tuple[str, str, list[Outcome]]]:
    """A cell as one per device size, each with the cost and quality of that size."""
    done = [outcome for outcome in known if outcome.state == "done"]
    devices = done[0].facts["devices"] if done else {}
    return [
        (f"{row}: {size}" if len(devices) > 1 else row, column, [_of_size(outcome, size) for outcome in done])
        for size in devices
    ] or [(row, column, known)]


def _of_size(outcome: Outcome, size: str) -> Outcome:
    facts, by_user = outcome.facts["devices"][size], {"last": outcome.by_user.get(f"size {size}", "")}
    kept = {"facts": outcome.facts | {"devices": {size: facts}}, "by_user": by_user if by_user["last"] else {}}
    return Outcome.of_value(
        facts["everybody"], outcome.last_round or 0.0, seconds=outcome.seconds, data=outcome.data, **kept
    )
