"""Fixed-point encoding of updates: integers modulo 2³² whose sums are exact and can be taken under masks.

*No sum wraps.* With K the most clients of a sum, an encoded number of a client lies in ±⌊(2³¹ − 1)/K⌋, so a sum of K in
±(2³¹ − 1): read as a signed integer, the sum modulo 2³² is the sum.

*Steps.* A number is clipped and rounded to a multiple of a power of two, the smallest step with which the clipping
bound is in range. Where an algorithm declares a step of its own, encoding is exact, and updates may be added before it.

*Header.* Before the tensors come the weight of an update, the sum of the qualities that its users measured, and the
number of these users. Each takes two integers: the whole part and the fraction.

*Segments.* Where the tensors of small sizes are prefixes of those of large ones, every stretch between two ends is
summed over all clients that own it; else every size has a sum of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, floor, log2

import numpy as np
import torch
from numpy.typing import NDArray

from fairfold.errors import InvalidMessage, InvalidSettings
from fairfold.federation.updates import Update

FixedPointVector = NDArray[np.uint32]

MAX_SUM = 2**31 - 1  # the largest encoded number of a sum
FRACTION_STEPS = 2**14  # largest whole part, and number of fractional steps, of a header number
HEADER_NUMBERS = 3  # numbers of the header: see :class:`MeasuredUpdate`
HEADER_LENGTH = 2 * HEADER_NUMBERS  # integers of the header
BLOCK = 1 << 20  # numbers that are encoded at a time


@dataclass(frozen=True)
class Segment:
    """A stretch of encoded vectors, from ``start`` to ``stop`` in those of all sizes that own it."""

    start: int
    stop: int
    owners: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class VectorLayout:
    """Positions of the tensors of an update in its encoded vector."""

    shapes: Mapping[int, Mapping[str, int]]  # name and length of every tensor, by size
    nested_sums: frozenset[str] = frozenset()  # tensors that are, for a small size, the beginning of a large one's

    @cached_property
    def nested(self) -> bool:
        """Whether the encoded vectors of small sizes are prefixes of those of large ones."""
        names = {tuple(shapes) for shapes in self.shapes.values()}
        return any(names == {(name,)} for name in self.nested_sums)

    def ordered(self, size: int) -> list[tuple[str, int]]:
        """Name and length of a size's tensors in the order of the vector, which is alphabetical."""
        return sorted(self.shapes[size].items())

    def places(self, size: int) -> dict[str, tuple[int, int]]:
        """First and last position of a size's tensors in its vector."""
        ends = accumulate((length for _, length in self.ordered(size)), initial=HEADER_LENGTH)
        return dict(zip(sorted(self.shapes[size]), pairwise(ends), strict=True))

    def length(self, size: int) -> int:
        """Length of the encoded vector of a size."""
        return HEADER_LENGTH + sum(self.shapes[size].values())

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments; those of one size, in this order, are its whole vector."""
        if not self.nested:
            return tuple(Segment(0, self.length(size), (size,)) for size in sorted(self.shapes))
        ends = sorted({self.length(size) for size in self.shapes})
        owners = [tuple(size for size in sorted(self.shapes) if self.length(size) >= end) for end in ends]
        return tuple(Segment(*place) for place in zip([0, *ends[:-1]], ends, owners, strict=True))

    def segments_of(self, size: int) -> tuple[Segment, ...]:
        """The segments that clients of a size own."""
        return tuple(segment for segment in self.segments if size in segment.owners)


@dataclass(frozen=True)
class MeasuredUpdate:
    """An update with the quality that users measured: the sum of their values, and their number."""

    update: Update
    quality: float = 0.0
    num_validated: float = 0.0


@dataclass(frozen=True)
class Encoding:
    """Encode updates, and decode sums of encoded updates."""

    layout: VectorLayout
    clip: float  # bound of numbers in tensors without a fixed-point step of their own
    max_clients: int  # K, the most clients of a sum
    fixed_point: Mapping[str, int] = field(default_factory=dict)  # steps per unit of tensors that are multiples of one
    noise_room: int = 0  # steps that are left free for noise
    value_bounds: Mapping[str, float] = field(default_factory=dict)  # of a client's numbers in these; 1 if not given

    def __post_init__(self) -> None:
        largest = [ceil(steps * self.value_bounds.get(name, 1)) for name, steps in self.fixed_point.items()]
        most = (MAX_SUM - self.noise_room) // max([FRACTION_STEPS, *largest])
        if not 1 <= self.max_clients <= most:
            remedy = "Ask fewer devices per round (fleet.clients_per_round)."
            raise InvalidSettings(f"a sum of {self.max_clients:,} devices", f"1 to {most:,}", remedy)

    @property
    def max_value(self) -> int:
        """Largest absolute value of a client's encoded number."""
        return (MAX_SUM - self.noise_room) // self.max_clients

    def steps(self, name: str) -> int | float:
        """Steps per unit of a tensor: declared by the algorithm, or a power of two."""
        return self.fixed_point[name] if name in self.fixed_point else 2.0 ** floor(log2(self.max_value / self.clip))

    def encode(
        self, measured: MeasuredUpdate, size: int, start: int = 0, stop: int | None = None, num_clients: int = 1
    ) -> FixedPointVector:
        """Encode an update, or its positions from ``start`` to ``stop``; of several clients if steps are declared."""
        stop = self.layout.length(size) if stop is None else stop
        encoded = np.empty(max(stop - start, 0), dtype=np.uint32)
        limit = num_clients * self.max_value
        if start < HEADER_LENGTH:
            header = self._header(measured, num_clients)[start:stop]
            encoded[: len(header)] = header
        for name, (first, last) in self.layout.places(size).items():
            vector, steps = measured.update.sums[name], float(self.steps(name))
            if vector.shape != (last - first,):
                raise InvalidMessage(f"{name} of {tuple(vector.shape)} numbers", f"{last - first}", "Check both sides.")
            for at in range(max(start, first), min(stop, last), BLOCK):
                end = min(at + BLOCK, stop, last)
                numbers = vector[at - first : end - first].detach().cpu().double().numpy()
                if not np.isfinite(numbers).all():
                    raise InvalidMessage(f"NaN or infinity in {name}", "finite numbers", "Nothing was sent.")
                if name not in self.fixed_point:
                    numbers = np.clip(numbers, -self.clip, self.clip)
                whole = np.rint(numbers * steps)
                if np.abs(whole).max(initial=0) > limit:
                    number = f"a number of {np.abs(numbers).max():g}"
                    given = f"{name} with {number} in a sum of {self.max_clients:,} devices"
                    remedy = "Nothing was sent: a part of it would not be the sum. Ask fewer devices per round."
                    raise InvalidMessage(given, f"{limit / steps:g} at most", remedy)
                encoded[at - start : end - start] = whole.astype(np.int64).astype(np.uint32)
        return encoded

    def _header(self, measured: MeasuredUpdate, num_clients: int) -> FixedPointVector:
        """Weight, quality and number validated, as whole numbers and fractions."""
        header = []
        for number in (measured.update.weight, measured.quality, measured.num_validated):
            if not 0 <= number < float("inf"):
                raise InvalidMessage(f"a weight or quality of {number}", "0 or more", "Nothing was sent.")
            whole, fraction = divmod(min(number, float(FRACTION_STEPS * num_clients)), 1)
            header += [int(whole), round(fraction * FRACTION_STEPS)]
        return np.array(header, dtype=np.uint32)

    def length_in(self, segment: Segment, name: str) -> int:
        """How many positions of a segment belong to a tensor."""
        first, last = self.place(segment, name)
        return last - first

    def noise(self, segment: Segment, name: str, numbers: NDArray[np.int64]) -> FixedPointVector:
        """Spread noise for the positions of a tensor over a whole segment, zero elsewhere."""
        found = np.zeros(len(segment), dtype=np.uint32)
        found[slice(*self.place(segment, name))] = numbers.astype(np.uint32)
        return found

    def place(self, segment: Segment, name: str) -> tuple[int, int]:
        """First and last position of a tensor in a segment."""
        first, last = self.layout.places(segment.owners[0])[name]
        first, last = max(first, segment.start), min(last, segment.stop)
        return first - segment.start, max(first, last) - segment.start

    def decode(self, sums: Mapping[Segment, FixedPointVector]) -> dict[int, MeasuredUpdate]:
        """Decode sums by size, or that of the largest size received if all are nested; segments may be missing."""
        if not self.layout.nested:
            return {segment.owners[0]: self._decode(segment.owners[0], total) for segment, total in sums.items()}
        known = [segment for segment in self.layout.segments if segment in sums]
        if not known:
            return {}
        total = np.concatenate([sums[segment] for segment in known])
        largest = next(size for size in known[-1].owners if self.layout.length(size) == known[-1].stop)
        return {largest: self._decode(largest, total)}

    def _decode(self, size: int, total: FixedPointVector) -> MeasuredUpdate:
        pairs = total[:HEADER_LENGTH].reshape(HEADER_NUMBERS, 2).astype(np.float64)
        weight, quality, num_validated = (pairs @ np.array([1.0, 1 / FRACTION_STEPS])).tolist()
        signed, sums = total.astype(np.int32), {}
        for name, (first, last) in self.layout.places(size).items():
            sums[name] = torch.from_numpy(signed[first:last].astype(np.float64) / float(self.steps(name)))
        return MeasuredUpdate(Update(sums, weight), quality, num_validated)


def add_modular(total: FixedPointVector | None, encoded: FixedPointVector) -> FixedPointVector:
    """Add an encoded vector to a sum modulo 2³², in place; None is an empty sum."""
    if total is None:
        return encoded.copy()
    total += encoded  # unsigned: it wraps, as it has to
    return total
