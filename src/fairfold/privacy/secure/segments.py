"""Segments of the vectors that clients of several sizes send; each is summed over all clients that own it.

Where small vectors are the beginnings of larger ones, a segment is what a size has beyond the next smaller one. Clients
are masked in a segment only with its other owners, so few owners hide each of them among few: then they step down.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from fairfold.errors import RequestRefused

MIN_STAYING_PERCENT = 70  # percentage of clients that must stay, and not collude, for noise to suffice
MAX_SEGMENTS, MAX_SIZES, MAX_LENGTH = 4_096, 256, 1 << 34


def refuse(given: str, needed: str) -> RequestRefused:
    """The error with which a client refuses a request."""
    return RequestRefused(given, needed, "This device takes no part; ask the operator of the server.")


def required_owners(owners: int, staying: int) -> int:
    """How many of a segment's owners must stay, where ``staying`` percent must."""
    return -(-owners * staying // 100)


@dataclass(frozen=True)
class SegmentLayout:
    """The segments of a sum, and those that clients of each size own."""

    lengths: tuple[int, ...]  # of every segment
    sizes: tuple[tuple[int, ...], ...]  # the segments of every size, smallest first, as they lie in its vector

    @classmethod
    def nested(cls, lengths: tuple[int, ...]) -> "SegmentLayout":
        """The layout of sizes of which each begins with the one before it, by the lengths of their vectors."""
        steps = tuple(length - before for length, before in zip(lengths, (0, *lengths), strict=False))
        return cls(steps, tuple(tuple(range(size + 1)) for size in range(len(lengths))))

    def error(self) -> str | None:
        """Why this is not a valid layout; None if it is."""
        if not 0 < len(self.lengths) <= MAX_SEGMENTS or not 0 < len(self.sizes) <= MAX_SIZES:
            return f"{len(self.lengths)} segments and {len(self.sizes)} sizes"
        if not 0 < sum(self.lengths) <= MAX_LENGTH or min(self.lengths) < 0:
            return "segments of no length, or of too great a length"
        known = range(len(self.lengths))
        for segments in self.sizes:
            if not segments or len(set(segments)) < len(segments) or not all(one in known for one in segments):
                return "a size of unknown or repeated segments"
        return None

    def length(self, size: int) -> int:
        """Length of the vector of a size."""
        return sum(self.lengths[segment] for segment in self.sizes[size])

    def slices(self, size: int) -> Iterator[tuple[int, slice]]:
        """The segments of a size, and where each lies in its vector."""
        start = 0
        for segment in self.sizes[size]:
            yield segment, slice(start, start + self.lengths[segment])
            start += self.lengths[segment]

    def owners(self, sizes: Mapping[int, int]) -> dict[int, list[int]]:
        """The members that own each segment, by their sizes; segments without owners are left out."""
        found: dict[int, list[int]] = {}
        for member in sorted(sizes):
            for segment in self.sizes[sizes[member]]:
                found.setdefault(segment, []).append(member)
        return found

    def thin_segment(self, sizes: Mapping[int, int], min_cohort: int) -> tuple[int, int] | None:
        """A segment that has owners, but fewer than ``min_cohort``, and their number; None if there is none."""
        thin = ((segment, len(owners)) for segment, owners in self.owners(sizes).items() if len(owners) < min_cohort)
        return next(thin, None)

    def depleted_segment(
        self, sizes: Mapping[int, int], members: Set[int], staying: int
    ) -> tuple[int, int, int] | None:
        """A segment too few of whose owners are among ``members``: its number, how many are, and how many must be."""
        for segment, owners in self.owners(sizes).items():
            present, needed = len(members & set(owners)), required_owners(len(owners), staying)
            if present < needed:
                return segment, present, needed
        return None

    def step_down(self, wanted: Mapping[int, int], min_cohort: int) -> dict[int, int]:
        """Sizes for a cohort: from the largest on, clients of too thin a size step down; the smallest may stay thin."""
        sizes = dict(wanted)
        for size in range(len(self.sizes) - 1, 0, -1):
            owners = Counter(segment for chosen in sizes.values() for segment in self.sizes[chosen])
            if any(owners[segment] < min_cohort for segment in self.sizes[size]):
                sizes = {member: size - 1 if chosen == size else chosen for member, chosen in sizes.items()}
        return sizes

    def without_thin_sizes(self, sizes: Mapping[int, int], min_cohort: int) -> dict[int, int]:
        """The members all of whose segments have owners enough, where every client keeps its size."""
        found = dict(sizes)
        while (thin := self.thin_segment(found, min_cohort)) is not None:
            found = {member: size for member, size in found.items() if thin[0] not in self.sizes[size]}
        return found
