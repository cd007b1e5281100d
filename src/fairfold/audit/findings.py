"""What an audit found: rows of figures, in words that need no explanation, and the file in a run's folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairfold import files
from fairfold.audit.matched import Figure
from fairfold.runs.read import AUDIT
from fairfold.sealed import sealed_values
from fairfold.settings.privacy import PlainPrivacy
from fairfold.version import __version__

FORMAT = 1

VECTOR, DIRECTION = "user's vector, relative error", "direction of the user's vector, sine"
RANKED, FIRST = "history, AUC", "history, precision"
DECODED, NAMED = "pairs (user, item) read", "users named"
ONE_ITEM = "one item"
OTHERS, BEYOND = "history, AUC, had they not been there", "history, AUC, their own part"
ITEM_OTHERS = "one item, had they not been there"
"""Of the same people where others are in their place, which is what everybody's data say of anybody; and a half, and
what their being there adds to that."""

ONE_PERSON, DIFFERENCE = "person, by history", "person, by difference"

LEVELS = {
    "plain": "plain: the server sees each device's answer, and who sent it. Whoever runs it can read histories.",
    "secure": "secure: the server sees sums over many devices, exact ones, and no single answer. What a sum gives away "
    "is below; against a server that knows much of a person already, sums alone protect nobody.",
    "private": "private: the server sees sums over many devices with noise (ε = {epsilon:g}, δ = {delta:g} per user "
    "for the whole run). Whatever it knows, no advantage is above {bound:.3f}.",
}


@dataclass(frozen=True)
class Finding:
    """One figure: what was seen, what was tried, by whom (a size of device), and what came out."""

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
    def of(cls, seen: str, attack: str, figure: Figure, chance: float | None, **more: Any) -> "Finding":
        """From a figure over users."""
        group, note, own = more.get("group", "all"), more.get("note", ""), more.get("own", True)
        return cls(seen, attack, group, figure.value, figure.low, figure.high, figure.many, chance, note, own)

    def words(self) -> str:
        """The figure and its interval, as tables show it; of a median the least and the most."""
        if not self.users:
            return "–"
        precise = self.attack in (RANKED, OTHERS, BEYOND, DIRECTION)
        digits = "{:.0e}" if self.attack == VECTOR else "{:.3f}" if precise else "{:.2f}"
        ends = f" ({digits.format(self.low)}–{digits.format(self.high)})" if self.low < self.high else ""
        return digits.format(self.value) + ends


@dataclass(frozen=True)
class Audit:
    """All figures of an audit."""

    level: str
    words: list[str]
    findings: list[Finding]
    seed: int

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows: a row for each attack and size of device, a column for everything that could be seen."""
        views = {one.seen: one.own for one in self.findings}
        found: dict[tuple[str, str], dict[str, Finding]] = {}
        for one in self.findings:
            found.setdefault((one.attack, one.group), {})[one.seen] = one
        headings = ["attack", "devices", "by chance", *(f"{name}{'' if own else ' *'}" for name, own in views.items())]
        order = [VECTOR, DIRECTION, RANKED, OTHERS, BEYOND, FIRST, ONE_ITEM, ITEM_OTHERS, ONE_PERSON, DIFFERENCE,
                 DECODED, NAMED]  # fmt: skip
        rows = []
        for (attack, group), of in sorted(found.items(), key=lambda pair: order.index(pair[0][0])):
            chance = next(iter(of.values())).chance
            cells = [of[name].words() if name in of else "" for name in views]
            rows.append([attack, group, "" if chance is None else f"{chance:g}", *cells])
        return headings, rows

    def plain(self) -> dict[str, Any]:
        """As a file has it; figures that could not be measured are null."""
        figures: list[Mapping[str, Any]] = [
            {key: None if value != value else value for key, value in asdict(one).items()} for one in self.findings
        ]
        headings, rows = self.table()
        return {
            "format": FORMAT, "level": self.level, "words": self.words, "seed": self.seed, "headings": headings,
            "rows": rows, "findings": figures, "fairfold": __version__,
        }  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Into the folder of the run, with a checksum as all files there."""
        files.write_atomically(folder / AUDIT, sealed_values(self.plain(), indent=2))
        return folder / AUDIT


def level_words(privacy: PlainPrivacy, bound: float) -> str:
    """The level of a run, told plainly."""
    facts = {"epsilon": getattr(privacy, "epsilon", 0.0), "delta": getattr(privacy, "delta", 0.0), "bound": bound}
    return LEVELS[privacy.level].format(**facts)
