"""Answers as words of 32 bits: integers whose sums are exact, and can be taken under masks that cancel.

A pair of postprocessors around an answer, so that no algorithm knows of them: :meth:`Encoding.encode` on a device, and
:meth:`Encoding.decode` of a sum of words on the server. Both know the same public facts: the lengths of what is said,
a bound, and K, the most devices of a sum.

*No sum wraps.* A word of a device lies in ±⌊(2³¹ − 1)/K⌋, so a sum of K in ±(2³¹ − 1): read as a signed number, the sum
modulo 2³² is the sum.

*Fixed point.* A number is clipped to the bound and rounded to the nearest multiple of a power of two, the smallest step
with which the bound is no larger word than that. Where an algorithm says that its numbers lie on a grid of its own,
that is the step: encoding is exact then, and devices may be added up before it.

*Ahead* of its vectors go what an answer counts, the sum of the qualities that its users found, and how many these are.
Each is two words: a whole number, and what is left of it.

*Segments.* What devices of all sizes say of a tensor may be prefixes of one vector. Then every stretch between two ends
is summed over all devices that own it, whatever their size; else every size has a sum of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, floor, log2

import numpy as np
import torch
from numpy.typing import NDArray

from fairfold.errors import InvalidMessage, InvalidSettings
from fairfold.protocol.words import Answer

Words = NDArray[np.uint32]

MOST = 2**31 - 1
"""The largest number that a word of a sum can be."""

PART = 2**14
"""A number that goes ahead is a whole one up to this, and as many parts of one."""

FACTS = 3
"""Numbers that go ahead of the vectors: see :class:`Heard`."""

AHEAD = 2 * FACTS
"""Words of these."""

BLOCK = 1 << 20
"""Numbers that become words at a time."""


@dataclass(frozen=True)
class Segment:
    """A stretch of words, from ``start`` to ``stop`` in the vectors of all sizes that own it."""

    start: int
    stop: int
    owners: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Where what is said stands among the words.

    Attributes:
        shapes: Name and length of what devices of every size say.
        prefixes: Names of tensors of which what small devices say is the beginning of what large ones say.
    """

    shapes: Mapping[int, Mapping[str, int]]
    prefixes: frozenset[str] = frozenset()

    @cached_property
    def nested(self) -> bool:
        """Whether the words of small devices are prefixes of those of large ones."""
        names = {tuple(shapes) for shapes in self.shapes.values()}
        return len(names) == 1 and len(next(iter(names))) == 1 and next(iter(names))[0] in self.prefixes

    def ordered(self, size: int) -> list[tuple[str, int]]:
        """What a size says in the order of its words, that of the alphabet."""
        return sorted(self.shapes[size].items())

    def length(self, size: int) -> int:
        """Words of a device of a size."""
        return AHEAD + sum(self.shapes[size].values())

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All of them; those of a device, in their order, are its whole vector."""
        if not self.nested:
            return tuple(Segment(0, self.length(size), (size,)) for size in sorted(self.shapes))
        ends = sorted({self.length(size) for size in self.shapes})
        owners = [tuple(size for size in sorted(self.shapes) if self.length(size) >= end) for end in ends]
        return tuple(Segment(*place) for place in zip([0, *ends[:-1]], ends, owners, strict=True))

    def of_size(self, size: int) -> tuple[Segment, ...]:
        """The segments of a device of a size."""
        return tuple(segment for segment in self.segments if size in segment.owners)


@dataclass(frozen=True)
class Heard:
    """What a sum of words says: an answer, and the sum of the qualities of some users, with their number."""

    answer: Answer
    quality: float = 0.0
    judges: float = 0.0


@dataclass(frozen=True)
class Encoding:
    """Answers to words, and sums of words to answers.

    Attributes:
        layout: Where what is said stands.
        bound: Numbers that lie on no grid are clipped to it.
        devices: K, the most devices of a sum.
        grids: By name, how many steps of its grid are 1, for numbers that lie on one.
        spare: Steps that are kept free for noise.
        bounds: By name, what no number of a device that lies on a grid exceeds; 1 if not given.
    """

    layout: Layout
    bound: float
    devices: int
    grids: Mapping[str, int] = field(default_factory=dict)
    spare: int = 0
    bounds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        largest = [ceil(steps * self.bounds.get(name, 1)) for name, steps in self.grids.items()]
        most = (MOST - self.spare) // max([PART, *largest])
        if not 1 <= self.devices <= most:
            raise InvalidSettings(
                f"a sum of {self.devices:,} devices", f"1 to {most:,}",
                "Ask fewer devices per round (fleet.clients_per_round).",
            )  # fmt: skip

    @property
    def most(self) -> int:
        """What no word of a device exceeds."""
        return (MOST - self.spare) // self.devices

    def steps(self, name: str) -> int | float:
        """How many steps are 1: a power of two, or what the algorithm says."""
        return self.grids[name] if name in self.grids else 2.0 ** floor(log2(self.most / self.bound))

    def encode(self, said: Heard, size: int, start: int = 0, stop: int | None = None, together: int = 1) -> Words:
        """The words of a device, or some of them.

        Args:
            said: By the device; of ``together`` devices where all their numbers lie on grids.
            size: Of the device.
            start: The first word that is wanted.
            stop: Where these end; all the others if not given.
            together: How many devices have said it.
        """
        stop = self.layout.length(size) if stop is None else stop
        found, most = np.empty(max(stop - start, 0), dtype=np.uint32), together * self.most
        if start < AHEAD:
            ahead = self._ahead(said, together)[start:stop]
            found[: len(ahead)] = ahead
        first = AHEAD
        for name, length in self.layout.ordered(size):
            low, high = max(start, first), min(stop, first + length)
            vector, steps = said.answer.sums[name], float(self.steps(name))
            if vector.shape != (length,):
                raise InvalidMessage(f"{name} of {tuple(vector.shape)} numbers", f"{length}", "Check both sides.")
            for at in range(low, high, BLOCK):
                end = min(at + BLOCK, high)
                numbers = vector[at - first : end - first].detach().cpu().double().numpy()
                if not np.isfinite(numbers).all():
                    raise InvalidMessage(f"NaN or infinity in {name}", "finite numbers", "Nothing was sent.")
                if name not in self.grids:
                    numbers = np.clip(numbers, -self.bound, self.bound)
                whole = np.rint(numbers * steps)
                if np.abs(whole).max(initial=0) > most:
                    given = f"{name} with a number of {np.abs(numbers).max():g} in a sum of {self.devices:,} devices"
                    remedy = "Nothing was sent: a part of it would not be the sum. Ask fewer devices per round."
                    raise InvalidMessage(given, f"{most / steps:g} at most", remedy)
                found[at - start : end - start] = whole.astype(np.int64).astype(np.uint32)
            first += length
        return found

    def _ahead(self, said: Heard, together: int) -> Words:
        words = []
        for number in (said.answer.weight, said.quality, said.judges):
            if not 0 <= number < float("inf"):
                raise InvalidMessage(f"a weight or quality of {number}", "0 or more", "Nothing was sent.")
            whole, left = divmod(min(number, float(PART * together)), 1)
            words += [int(whole), round(left * PART)]
        return np.array(words, dtype=np.uint32)

    def words_in(self, segment: Segment, name: str) -> int:
        """How many words of a segment say something of a tensor."""
        first, last = self.place(segment, name)
        return last - first

    def noise(self, segment: Segment, name: str, numbers: NDArray[np.int64]) -> Words:
        """Whole numbers, one for each of these words, as words of the whole segment."""
        first, last = self.place(segment, name)
        found = np.zeros(len(segment), dtype=np.uint32)
        found[first:last] = numbers.astype(np.uint32)
        return found

    def place(self, segment: Segment, name: str) -> tuple[int, int]:
        """Where the words of a tensor stand in a segment."""
        size, at = segment.owners[0], AHEAD
        for other, length in self.layout.ordered(size):
            if other == name:
                first, last = max(at, segment.start), min(at + length, segment.stop)
                return first - segment.start, max(first, last) - segment.start
            at += length
        raise KeyError(name)

    def decode(self, sums: Mapping[Segment, Words]) -> dict[int, Heard]:
        """What sums of words say, by size; segments that nobody owns may be missing.

        Where words of all sizes are prefixes of each other, all of it stands under the largest size that was heard.
        """
        if not self.layout.nested:
            return {segment.owners[0]: self._heard(segment.owners[0], words) for segment, words in sums.items()}
        known = [segment for segment in self.layout.segments if segment in sums]
        if not known:
            return {}
        words = np.concatenate([sums[segment] for segment in known])
        largest = next(size for size in known[-1].owners if self.layout.length(size) == known[-1].stop)
        return {largest: self._heard(largest, words)}

    def _heard(self, size: int, words: Words) -> Heard:
        facts = words[:AHEAD].reshape(FACTS, 2).astype(np.float64) @ np.array([1.0, 1 / PART])
        signed, first, found = words.astype(np.int32), AHEAD, {}
        for name, length in self.layout.ordered(size):
            numbers = signed[first : first + length].astype(np.float64) / float(self.steps(name))
            found[name] = torch.from_numpy(numbers)
            first += length
        weight, quality, judges = facts.tolist()
        return Heard(Answer(found, weight), quality, judges)


def added(total: Words | None, words: Words) -> Words:
    """A sum and one summand more, modulo 2³²; the sum is changed where there is one."""
    if total is None:
        return words.copy()
    total += words  # of unsigned numbers: it wraps, as it has to
    return total
