"""A client's own ledger of privacy spent, which the server cannot change.

The cost of a noisy vector is written and flushed before it leaves: a device that is killed in between has paid for a
vector that was never received, and never the other way round. The client refuses what would exceed its own budget, sums
over fewer clients than its own minimum, and a second release of the same sum of a run. A damaged file is refused, and
never taken for an empty one.

A long sum is released in parts that do not overlap, each with the noise of the whole: a user's contribution to all
parts together has the norm that was paid for, so the first part pays, and every part is released once.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from fairfold.atomic_io import locked, make_private_folder, remove_temporary_files, write_atomically
from fairfold.checksums import (
    Damaged,
    line_with_checksum,
    parse_lines,
    parse_with_checksum,
    read_errors,
    read_limited,
    with_checksum,
)
from fairfold.errors import InvalidState, PrivacyBudgetSpent
from fairfold.privacy.accounting import composed_sigma, epsilon_of

STATISTICS_PURPOSE = "statistics"  # of a secure sum, of which windows are parts; others are "train" and "evaluate"
LEVELS = ("plain", "secure", "private")
SERVED = "privacy"  # the file, within the client's own folder, of the highest level that it has taken part in
LEDGER, FILE = "ledger", "ledger.json"  # folder within the client's own, and file
FORMAT, MAX_BYTES = 2, 1 << 24
# If the owner sets none. From exact sums of fewer clients, histories of users can be reconstructed (docs/privacy.md).
DEFAULT_EPSILON, DEFAULT_DELTA, DEFAULT_MIN_COHORT = 8.0, 1e-5, 100
TOLERANCE = 1e-6  # relative tolerance of ε, for rounding
RESTORE = "Restore it: without it the privacy spent is unknown, so this device releases nothing more."


@dataclass(frozen=True)
class LedgerEntry:
    """A released sum, or a part of one: run, name, σ over the norm of a user's contribution, and number of clients."""

    run: str
    release: str
    sigma: float
    devices: int
    part: int = 0


class Ledger:
    """The ledger of one client: all releases of its lifetime together may cost (``epsilon``, ``delta``)."""

    def __init__(self, folder: Path, epsilon: float, delta: float, min_cohort: int) -> None:
        self.folder = folder
        self.epsilon, self.delta = epsilon, delta
        self.min_cohort = min_cohort

    def entries(self) -> list[LedgerEntry]:
        """All releases so far; an error if the file is damaged."""
        path = self.folder / FILE
        if not path.exists():
            return []
        with read_errors(path, InvalidState, "what this device has written", RESTORE):
            stored = parse_with_checksum(read_limited(path, MAX_BYTES))
            if stored["format"] != FORMAT:
                raise Damaged(f"format {stored['format']!r}")
            found = [LedgerEntry(**one) for one in stored["entries"]]
            if not all(math.isfinite(one.sigma) and one.sigma > 0 for one in found):
                raise Damaged("noise that is none")
        return found

    def spent(self) -> float:
        """ε of all releases together."""
        return self._cost(self.entries())

    def summary(self) -> dict[str, float]:
        """For the owner: ε spent and allowed, δ, number of released sums, and the minimum cohort."""
        entries = self.entries()
        return {
            "spent": self._cost(entries), "epsilon": self.epsilon, "delta": self.delta,
            "sums": len({(one.run, one.release) for one in entries}), "min cohort": self.min_cohort,
        }  # fmt: skip

    def require(self, entry: LedgerEntry) -> float:
        """Check a release without writing it; returns ε as it would be afterwards."""
        return self._cost([*self._allowed(entry), entry])

    def spend(self, entry: LedgerEntry) -> float:
        """Record a release before it is made, or refuse it; returns ε of all releases."""
        if entry.devices < self.min_cohort:
            needed = f"{self.min_cohort} at least, by this device's own rule"
            raise PrivacyBudgetSpent(f"a sum of {entry.devices} devices", needed, "It takes part in larger sums.")
        make_private_folder(self.folder)
        with locked(self.folder):
            entries = [*self._allowed(entry), entry]
            remove_temporary_files(self.folder)
            content = {"format": FORMAT, "entries": [asdict(one) for one in entries]}
            write_atomically(self.folder / FILE, with_checksum(content), private=True)
        return self._cost(entries)

    def _allowed(self, entry: LedgerEntry) -> list[LedgerEntry]:
        """All earlier releases; refuses one that must not be added to them."""
        known = self.entries()
        same = [one for one in known if (one.run, one.release) == (entry.run, entry.release)]
        if any(one.part == entry.part for one in same):
            again = f"the sum {entry.release!r} of run {entry.run} a second time"
            raise PrivacyBudgetSpent(again, "once in a run", "It was released already, with noise of its own.")
        if any(one.sigma != entry.sigma for one in same):
            other = f"parts of {entry.release!r} with other noise"
            raise PrivacyBudgetSpent(other, "the same for all", "Ask for all alike.")
        total = self._cost([*known, entry])
        if total > self.epsilon * (1 + TOLERANCE):
            needed = f"{self.epsilon:g} at most (δ = {self.delta:g}), of which {self._cost(known):.3f} is spent"
            remedy = "This device takes no further part, unless its owner allows more."
            raise PrivacyBudgetSpent(f"{entry.release!r}, which would bring ε to {total:.3f}", needed, remedy)
        return known

    def _cost(self, entries: list[LedgerEntry]) -> float:
        """ε of some releases; all parts of a sum cost what one of them costs."""
        sigmas = {(one.run, one.release): one.sigma for one in entries}
        return epsilon_of(composed_sigma(sigmas.values()), self.delta) if sigmas else 0.0


def served_privacy(folder: Path) -> str:
    """The highest level of privacy that the client whose state is in a folder has taken part in."""
    path = folder / SERVED
    if not path.exists():
        return LEVELS[0]
    with read_errors(path, InvalidState, "the highest level served", "Remove the file: it then accepts less again."):
        words = parse_lines(read_limited(path, largest=64))
        if len(words) != 1 or words[0] not in LEVELS:
            raise Damaged("no level")
        return words[0]


def remember_privacy(folder: Path, level: str) -> None:
    """Write down that a client takes part in a sum of a level; called before its vector is sent."""
    if LEVELS.index(level) > LEVELS.index(served_privacy(folder)):
        write_atomically(folder / SERVED, line_with_checksum(level).encode(), private=True)
