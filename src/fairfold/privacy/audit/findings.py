"""Findings of an audit: figures with intervals, as a table and as the file in a run's folder."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairfold import __version__
from fairfold.atomic_io import write_atomically
from fairfold.checksums import with_checksum
from fairfold.config.fleet import DifferentialPrivacy, PlainPrivacy
from fairfold.privacy.audit.history import Figure
from fairfold.runs.folder import AUDIT

FORMAT = 2
VECTOR, DIRECTION = "user's vector, relative error", "direction of the user's vector, sine"
RANKED, FIRST = "history, AUC", "history, precision"
DECODED, NAMED = "pairs (user, item) read", "users named"
ONE_ITEM = "one item"
# From sums in which others take the place of the same users: what everybody's data reveal of anybody; and one half plus
# what the user's own presence adds to that.
OTHERS, BEYOND = "history, AUC, had they not been there", "history, AUC, their own part"
ITEM_OTHERS = "one item, had they not been there"
ONE_PERSON, DIFFERENCE = "person, by history", "person, by difference"
ORDER = (
    VECTOR, DIRECTION, RANKED, OTHERS, BEYOND, FIRST, ONE_ITEM, ITEM_OTHERS, ONE_PERSON, DIFFERENCE, DECODED, NAMED,
)  # fmt: skip

LEVELS = {
    "plain": "plain: the server sees each device's update, and who sent it. Its operator can read histories.",
    "secure": "secure: the server sees sums over many devices, exact ones, and no single update. What a sum gives away "
    "is below; against a server that knows much of a person already, sums alone protect nobody.",
    "private": "private: the server sees sums over many devices with noise (ε = {epsilon:g}, δ = {delta:g} per user "
    "for the whole run). Whatever it knows, no advantage is above {bound:.3f}.",
}


@dataclass(frozen=True)
class Finding:
    """One figure of an audit: the view, the attack, the group of users (by size), and the outcome with its interval."""

    seen: str
    attack: str
    group: str
    value: float
    low: float
    high: float
    users: int
    chance: float | None
    note: str = ""
    own: bool = True

    @classmethod
    def of(
        cls,
        seen: str,
        attack: str,
        figure: Figure,
        chance: float | None,
        *,
        group: str = "all",
        note: str = "",
        own: bool = True,
    ) -> "Finding":
        """Build a finding from a figure over users."""
        return cls(seen, attack, group, figure.value, figure.low, figure.high, figure.num_targets, chance, note, own)

    def text(self) -> str:
        """The figure with its interval, or the range of a median, as tables show it."""
        if not self.users:
            return "–"
        precise = self.attack in (RANKED, OTHERS, BEYOND, DIRECTION)
        digits = "{:.0e}" if self.attack == VECTOR else "{:.3f}" if precise else "{:.2f}"
        ends = f" ({digits.format(self.low)}–{digits.format(self.high)})" if self.low < self.high else ""
        return digits.format(self.value) + ends


@dataclass(frozen=True)
class Audit:
    """All findings of an audit, with notes for the reader."""

    level: str
    notes: list[str]
    findings: list[Finding]
    seed: int

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows: a row per attack and size, a column per view."""
        views = {one.seen: one.own for one in self.findings}
        rows: dict[tuple[str, str], dict[str, Finding]] = {}
        for one in self.findings:
            rows.setdefault((one.attack, one.group), {})[one.seen] = one
        headings = ["attack", "devices", "by chance", *(f"{name}{'' if own else ' *'}" for name, own in views.items())]
        lines = []
        for (attack, group), by_view in sorted(rows.items(), key=lambda pair: ORDER.index(pair[0][0])):
            chance = next(iter(by_view.values())).chance
            cells = [by_view[name].text() if name in by_view else "" for name in views]
            lines.append([attack, group, "" if chance is None else f"{chance:g}", *cells])
        return headings, lines

    def plain(self) -> dict[str, Any]:
        """The content of the file; figures that could not be measured are null."""
        stored = (asdict(one).items() for one in self.findings)
        figures = [{key: None if value != value else value for key, value in one} for one in stored]
        headings, rows = self.table()
        return {
            "format": FORMAT, "level": self.level, "notes": self.notes, "seed": self.seed, "headings": headings,
            "rows": rows, "findings": figures, "fairfold": __version__,
        }  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Write the file, with a checksum, into the folder of the run."""
        write_atomically(folder / AUDIT, with_checksum(self.plain(), indent=2))
        return folder / AUDIT


def describe_level(privacy: PlainPrivacy, bound: float) -> str:
    """What the privacy level of a run means, in a sentence."""
    budget = (privacy.epsilon, privacy.delta) if isinstance(privacy, DifferentialPrivacy) else (0.0, 0.0)
    return LEVELS[privacy.level].format(epsilon=budget[0], delta=budget[1], bound=bound)
