"""Who is masked with whom, and who keeps whose shares.

Devices stand in a ring, in an order that follows from the hash of all that they advertised, each with a number drawn
for this; every one is a neighbour of the ``degree / 2`` before and behind it. In a small cohort all are neighbours.

The degree is the smallest (40 at least) at which, with 30 % of devices leaving and 10 % colluding with the server, some
device has as many colluding neighbours as the threshold with a chance below 1e-6, and some device has fewer neighbours
left than that with a chance below 1e-3: 40 and a threshold of 16 at 200 devices, 56 and 23 at 1,000. These are chances
over the order. Somebody who advertises last can try out numbers and so choose among orders (docs/privacy-protocol.md).
"""

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from math import comb

LEAVING, COLLUDING = 0.3, 0.1  # parts of a cohort
UNSAFE, UNFINISHED = 1e-6, 1e-3  # chances that are accepted
SMALLEST_DEGREE = 40


@dataclass(frozen=True)
class Degrees:
    """How many neighbours a device has, how many of these tell its secret, and how many must stay on either side."""

    degree: int
    threshold: int
    staying: int


def quorum(devices: int) -> int:
    """How many have to sign a set of survivors: so many that no two sets can be signed, if colluders sign both."""
    return (devices + int(COLLUDING * devices)) // 2 + 1


@lru_cache(maxsize=64)
def degrees(devices: int) -> Degrees:
    """The degrees of a cohort of so many devices."""
    others = devices - 1
    if others <= SMALLEST_DEGREE:
        return Degrees(others, others // 2 + 1, 0)  # two disjoint sets of neighbours cannot both tell a secret
    colluding, left = int(COLLUDING * devices), others - int(LEAVING * devices)
    for degree in range(SMALLEST_DEGREE, others, 2):
        unfinished = _at_most(others, left, degree)
        fit = [few for few in range(2, degree) if devices * unfinished[few - 1] <= UNFINISHED]
        threshold = max(fit, default=0)
        if threshold and devices * (1 - _at_most(others, colluding, degree)[threshold - 1]) <= UNSAFE:
            side = _at_most(others, left, degree // 2)
            staying = max((few for few in range(1, degree // 2) if devices * side[few - 1] <= UNFINISHED), default=1)
            return Degrees(degree, threshold, staying)
    return Degrees(others, others // 2 + 1, 0)


def _at_most(others: int, marked: int, drawn: int) -> list[float]:
    """The chance that at most 0, 1, … of those drawn are marked (hypergeometric)."""
    ways, sums = 0, []
    for found in range(drawn + 1):
        ways += comb(marked, found) * comb(others - marked, drawn - found)
        sums.append(ways)
    return [so_far / sums[-1] for so_far in sums]


class Ring:
    """Some members of a cohort in their order."""

    def __init__(self, digest: bytes, members: Sequence[int]) -> None:
        names = b"".join(member.to_bytes(4, "big") for member in members)
        seed = hashlib.sha256(b"fairfold ring" + digest + names).digest()
        self.order = sorted(members, key=lambda member: hashlib.sha256(seed + member.to_bytes(4, "big")).digest())
        self.degrees = degrees(len(members))
        self._place = {member: place for place, member in enumerate(self.order)}

    @property
    def _complete(self) -> bool:
        return self.degrees.degree >= len(self.order) - 1

    def neighbours(self, member: int) -> list[int]:
        """Of one member, in the order of their numbers."""
        if self._complete:
            return sorted(other for other in self.order if other != member)
        place, half = self._place[member], self.degrees.degree // 2
        steps = [step for step in range(-half, half + 1) if step]
        return sorted(self.order[(place + step) % len(self.order)] for step in steps)

    def alone(self, survivors: Set[int]) -> int | None:
        """A survivor who would be left with too few others, before or behind it in the ring; None if there is none.

        Where each has enough on both sides, survivors form one chain around the ring, and no part of it can be told
        from the rest.
        """
        if self._complete:
            return None
        half, many = self.degrees.degree // 2, len(self.order)
        stays = [member in survivors for member in self.order]
        for place, member in enumerate(self.order):
            behind = sum(stays[(place + step) % many] for step in range(1, half + 1))
            before = sum(stays[(place - step) % many] for step in range(1, half + 1))
            if stays[place] and min(behind, before) < self.degrees.staying:
                return member
        return None
