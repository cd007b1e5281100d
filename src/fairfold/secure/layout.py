"""Which words devices of a size say: the vector in segments, each summed over all devices that have it.

Where a small vector is the beginning of a larger one, the segment between two sizes is what the larger has more.
Devices are masked in a segment only with others that have it, so a segment with few owners hides each of them among
few. A size whose segments have too few owners steps down to the next smaller one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

MOST_SEGMENTS, MOST_SIZES, MOST_WORDS = 4_096, 256, 1 << 34


def enough(many: int, staying: int) -> int:
    """How many of so many devices have to stay, where of a hundred ``staying`` have to."""
    return -(-many * staying // 100)


@dataclass(frozen=True)
class Layout:
    """Segments, and those that devices of each size have.

    Attributes:
        lengths: Of the segments, in words.
        sizes: Of every size, its segments in the order in which they lie in its vector; smallest size first.
    """

    lengths: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def nested(cls, lengths: tuple[int, ...]) -> "Layout":
        """The layout of sizes of which each begins with the one before it, by the lengths of their vectors."""
        steps = tuple(length - before for length, before in zip(lengths, (0, *lengths), strict=False))
        return cls(steps, tuple(tuple(range(size + 1)) for size in range(len(lengths))))

    def problem(self) -> str | None:
        """Why this is no layout, or None."""
        if not 0 < len(self.lengths) <= MOST_SEGMENTS or not 0 < len(self.sizes) <= MOST_SIZES:
            return f"{len(self.lengths)} segments and {len(self.sizes)} sizes"
        if not 0 < sum(self.lengths) <= MOST_WORDS or min(self.lengths) < 0:
            return "segments of no length, or of too many words"
        known = range(len(self.lengths))
        if any(not of or len(set(of)) < len(of) or not all(one in known for one in of) for of in self.sizes):
            return "a size of unknown or repeated segments"
        return None

    def words(self, size: int) -> int:
        """Length of the vector of a size."""
        return sum(self.lengths[segment] for segment in self.sizes[size])

    def places(self, size: int) -> Iterator[tuple[int, slice]]:
        """The segments of a size, and where each lies in its vector."""
        start = 0
        for segment in self.sizes[size]:
            yield segment, slice(start, start + self.lengths[segment])
            start += self.lengths[segment]

    def owners(self, sizes: Mapping[int, int]) -> dict[int, list[int]]:
        """Who has each segment, by everybody's size; segments that nobody has are left out."""
        found: dict[int, list[int]] = {}
        for member in sorted(sizes):
            for segment in self.sizes[sizes[member]]:
                found.setdefault(segment, []).append(member)
        return found

    def thin(self, sizes: Mapping[int, int], smallest: int) -> tuple[int, int] | None:
        """A segment that has owners, but fewer than ``smallest``, and how many; None if there is none."""
        for segment, owners in self.owners(sizes).items():
            if len(owners) < smallest:
                return segment, len(owners)
        return None

    def left(self, sizes: Mapping[int, int], members: Set[int], staying: int) -> tuple[int, int, int] | None:
        """A segment of which too few owners are among some members: which, how many, and how many are needed."""
        for segment, owners in self.owners(sizes).items():
            stay, needed = len(members & set(owners)), enough(len(owners), staying)
            if stay < needed:
                return segment, stay, needed
        return None

    def stepped_down(self, wanted: Mapping[int, int], smallest: int) -> dict[int, int]:
        """Sizes for a cohort, by those that devices could have: from the largest on, whatever is too thin steps down.

        The smallest size has nowhere to go, so the result may still be thin there: nobody can be served then.
        """
        sizes = dict(wanted)
        for size in range(len(self.sizes) - 1, 0, -1):
            many = Counter(segment for of in sizes.values() for segment in self.sizes[of])
            if any(many[segment] < smallest for segment in self.sizes[size]):
                sizes = {member: size - 1 if of == size else of for member, of in sizes.items()}
        return sizes

    def hidden(self, sizes: Mapping[int, int], smallest: int) -> dict[int, int]:
        """Those of a cohort whose segments all have owners enough, where everybody keeps its size."""
        found = dict(sizes)
        while (thin := self.thin(found, smallest)) is not None:
            found = {member: size for member, size in found.items() if thin[0] not in self.sizes[size]}
        return found
