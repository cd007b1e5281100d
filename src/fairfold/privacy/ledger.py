"""A device's own account of what its user's history has been let out with, which the server cannot change.

Before noisy words leave a device, what they cost is written down and flushed: a device that is killed in between has
paid for words that nobody heard, and never the other way round. It refuses what would go past its own budget, sums of
fewer devices than its own minimum, and to say the same sum of a run twice.

A sum that is long is said in parts that do not overlap, each with the noise of the whole: a user's part of all of them
together has the norm that was paid for, so the first part pays, and every part is said once.

The file is replaced as a whole and sealed like all that a device keeps: one that is damaged is refused, and never taken
for an empty one.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from fairfold.errors import BudgetSpent, InvalidState
from fairfold.files import locked, make_private, remove_leftovers, write_atomically
from fairfold.privacy.accounting import epsilon_of, together
from fairfold.sealed import Damaged, content_of, reading, sealed_values, values_in

LEDGER, FILE = "ledger", "ledger.json"
"""The folder in a device's own, and the file."""

FORMAT = 2
LONGEST = 1 << 24
"""Bytes of a ledger that are read."""

USUAL_EPSILON, USUAL_DELTA, USUAL_COHORT = 8.0, 1e-5, 100
"""What a device allows in all where its owner says nothing, and devices of a sum: of fewer, what single users have can
be read from exact sums (docs/privacy.md)."""

TOLERANCE = 1e-6
"""Of ε, for what rounding brings."""

RESTORE = "Restore it: without it nobody knows what was let out, so this device lets out nothing more."


@dataclass(frozen=True)
class Entry:
    """A release, or a part of one: of which run and which sum, σ over the norm of a user's part, and among how many."""

    run: str
    release: str
    sigma: float
    devices: int
    part: int = 0


class Ledger:
    """The account of one device.

    Args:
        folder: Where the device keeps it; made if it is not there.
        epsilon: ε that all releases of its lifetime may cost together.
        delta: δ that goes with it.
        smallest_cohort: Devices that a sum has to have at least.
    """

    def __init__(self, folder: Path, epsilon: float, delta: float, smallest_cohort: int) -> None:
        self.folder, self.epsilon, self.delta, self.smallest_cohort = folder, epsilon, delta, smallest_cohort

    def entries(self) -> list[Entry]:
        """All that was let out; refused where the file is damaged."""
        path = self.folder / FILE
        if not path.exists():
            return []
        with reading(path, InvalidState, "what this device has written", RESTORE):
            kept = values_in(content_of(path, LONGEST))
            if kept["format"] != FORMAT:
                raise Damaged(f"format {kept['format']!r}")
            found = [Entry(**one) for one in kept["entries"]]
            if not all(math.isfinite(one.sigma) and one.sigma > 0 for one in found):
                raise Damaged("noise that is none")
        return found

    def spent(self) -> float:
        """ε of all that was let out together."""
        return self._cost(self.entries())

    def told(self) -> dict[str, float]:
        """For its owner: ε spent and allowed, δ, sums that were let out, the fewest devices among which that may be."""
        entries = self.entries()
        return {
            "spent": self._cost(entries), "epsilon": self.epsilon, "delta": self.delta,
            "sums": len({(one.run, one.release) for one in entries}), "smallest cohort": self.smallest_cohort,
        }  # fmt: skip

    def require(self, entry: Entry) -> float:
        """Refuse what must not be let out; else what would have been spent then. Nothing is written."""
        return self._cost([*self._allowed(entry), entry])

    def spend(self, entry: Entry) -> float:
        """Write a release down before it is made; refused where it must not be. Returns ε of all together."""
        if entry.devices < self.smallest_cohort:
            raise BudgetSpent(
                f"a sum of {entry.devices} devices", f"{self.smallest_cohort} at least, by this device's own rule",
                "It answers when more take part.",
            )  # fmt: skip
        make_private(self.folder)
        with locked(self.folder):
            entries = [*self._allowed(entry), entry]
            remove_leftovers(self.folder)
            content = {"format": FORMAT, "entries": [asdict(one) for one in entries]}
            write_atomically(self.folder / FILE, sealed_values(content), private=True)
        return self._cost(entries)

    def _allowed(self, entry: Entry) -> list[Entry]:
        """All that was let out before; refused where this must not be added to it."""
        known = self.entries()
        same = [one for one in known if (one.run, one.release) == (entry.run, entry.release)]
        if any(one.part == entry.part for one in same):
            again = f"the sum {entry.release!r} of run {entry.run} a second time"
            raise BudgetSpent(again, "once in a run", "It was let out already, with noise of its own.")
        if any(one.sigma != entry.sigma for one in same):
            raise BudgetSpent(f"parts of {entry.release!r} with other noise", "the same for all", "Ask for all alike.")
        total = self._cost([*known, entry])
        if total > self.epsilon * (1 + TOLERANCE):
            raise BudgetSpent(
                f"{entry.release!r}, which would bring ε to {total:.3f}",
                f"{self.epsilon:g} at most (δ = {self.delta:g}), of which {self._cost(known):.3f} is spent",
                "This device takes no further part, unless its owner allows more.",
            )
        return known

    def _cost(self, entries: list[Entry]) -> float:
        """ε of some releases; parts of one cost what one of them costs."""
        sigmas = {(one.run, one.release): one.sigma for one in entries}
        return epsilon_of(together(sigmas.values()), self.delta) if sigmas else 0.0
