"""A device's own account of what its user's history has been let out with, which the server cannot change.

Before noisy words leave a device, what they cost is written down and flushed: a device that is killed in between has
paid for words that nobody heard, and never the other way round. It refuses what would go past its own budget, sums of
fewer devices than its own minimum, and to say the same sum of a run twice.

The file is replaced as a whole and has a checksum: one that is damaged is refused, and never taken for an empty one.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairfold.errors import InvalidState
from fairfold.files import locked, make_private, remove_leftovers, write_atomically
from fairfold.privacy.accounting import epsilon_of, together

FILE = "ledger.json"
FORMAT = 1
LONGEST = 1 << 24
"""Bytes of a ledger that are read."""

TOLERANCE = 1e-6
"""Of ε, for what rounding brings."""


@dataclass(frozen=True)
class Entry:
    """A release: of which run and which sum, and σ over the norm of a user's part."""

    run: str
    release: str
    sigma: float
    devices: int


class Ledger:
    """The account of one device.

    Args:
        folder: Where the device keeps what is its own; made if it is not there.
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
        try:
            with path.open("rb") as file:
                text = file.read(LONGEST + 1)
            head, _, body = text.partition(b"\n")
            known: dict[str, Any] = json.loads(head)
            if len(text) > LONGEST or known["sha256"] != hashlib.sha256(body).hexdigest():
                raise ValueError("its checksum does not fit its content")
            if known["format"] != FORMAT:
                raise ValueError(f"format {known['format']!r}")
            found = [Entry(**one) for one in json.loads(body)]
            if not all(math.isfinite(one.sigma) and one.sigma > 0 for one in found):
                raise ValueError("noise that is none")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            remedy = "Restore it: without it nobody knows what was let out, so this device lets out nothing more."
            raise InvalidState(f"{path}: {error}", "what this device has written", remedy) from None
        return found

    def spent(self) -> float:
        """ε of all that was let out together."""
        sigmas = [one.sigma for one in self.entries()]
        return epsilon_of(together(sigmas), self.delta) if sigmas else 0.0

    def spend(self, entry: Entry) -> float:
        """Write a release down before it is made; refused where it must not be. Returns ε of all together."""
        if entry.devices < self.smallest_cohort:
            raise InvalidState(
                f"a sum of {entry.devices} devices", f"{self.smallest_cohort} at least, by this device's own rule",
                "It answers when more take part.",
            )  # fmt: skip
        make_private(self.folder)
        with locked(self.folder):
            known = self.entries()
            if any((one.run, one.release) == (entry.run, entry.release) for one in known):
                again = f"the sum {entry.release!r} of run {entry.run} a second time"
                raise InvalidState(again, "once in a run", "It was let out already, with noise of its own.")
            total = epsilon_of(together(one.sigma for one in [*known, entry]), self.delta)
            if total > self.epsilon * (1 + TOLERANCE):
                raise InvalidState(
                    f"{entry.release!r}, which would bring ε to {total:.3f}",
                    f"{self.epsilon:g} at most (δ = {self.delta:g}), of which {self.spent():.3f} is spent",
                    "This device takes no further part, unless its owner allows more.",
                )
            self._write([*known, entry])
        return total

    def _write(self, entries: list[Entry]) -> None:
        body = json.dumps([asdict(one) for one in entries]).encode()
        head = json.dumps({"format": FORMAT, "sha256": hashlib.sha256(body).hexdigest()}).encode()
        remove_leftovers(self.folder)
        write_atomically(self.folder / FILE, head + b"\n" + body, private=True)
