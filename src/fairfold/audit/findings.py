"""What an audit found: rows of figures, in words that need no explanation, and the file in a run's folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairfold import files
from fairfold.audit.matched import Figure
from fairfold.runs.read import AUDIT, sealed_json
from fairfold.settings import Settings
from fairfold.settings.parts import PlainPrivacy
from fairfold.version import __version__

FORMAT = 1

VECTOR, DIRECTION = "user's vector: relative error (median)", "user's vector: direction, sine of the angle (median)"
RANKED, FIRST = "history: AUC among equally popular items", "history: share among as many first items"
DECODED, NAMED = "pairs (user, item) read from the sum", "users named over several rounds"
ONE_ITEM = "one item, all others known: told from an equal one"
ONE_PERSON, DIFFERENCE = "is a person in the sum? by their history", "is a person in the sum? all others known: advantage"

LEVELS = {
    "plain": "plain: the server sees each device's answer, and who sent it. Whoever runs it can read histories.",
    "secure": "secure: the server sees sums over many devices, exact ones, and no single answer. What a sum gives away "
    "is below; against a server that knows much of a person already, sums alone protect nobody.",
    "private": "private: the server sees sums over many devices with noise (ε = {epsilon:g}, δ = {delta:g} per user for "
    "the whole run). Whatever it knows, no advantage is above {bound:.3f}.",
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

    def cells(self) -> list[str]:
        """As tables show it."""
        digits = "{:.1e}" if self.attack == VECTOR else "{:.3f}"
        interval = f"{digits.format(self.low)} – {digits.format(self.high)}" if self.users else ""
        value = digits.format(self.value) if self.users else "–"
        chance = "–" if self.chance is None else f"{self.chance:g}"
        return [self.seen, self.attack, self.group, value, interval, chance, str(self.users), self.note]


HEADINGS = ["what is seen", "attack", "devices", "found", "95 % of means", "by chance", "users", ""]


@dataclass(frozen=True)
class Audit:
    """All figures of an audit."""

    level: str
    words: list[str]
    findings: list[Finding]
    seed: int

    def plain(self) -> dict[str, Any]:
        """As a file has it; figures that could not be measured are null."""
        rows: list[Mapping[str, Any]] = [
            {key: None if value != value else value for key, value in asdict(one).items()} for one in self.findings
        ]
        return {
            "format": FORMAT, "level": self.level, "words": self.words, "seed": self.seed, "headings": HEADINGS,
            "rows": [one.cells() for one in self.findings], "findings": rows, "fairfold": __version__,
        }  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Into the folder of the run, with a checksum as all files there."""
        files.write_atomically(folder / AUDIT, sealed_json(self.plain()))
        return folder / AUDIT


def level_words(privacy: PlainPrivacy, bound: float) -> str:
    """The level of a run, told plainly."""
    facts = {"epsilon": getattr(privacy, "epsilon", 0.0), "delta": getattr(privacy, "delta", 0.0), "bound": bound}
    return LEVELS[privacy.level].format(**facts)


def uploads_vectors(settings: Settings) -> bool:
    """Whether users' vectors are sent as they are."""
    return getattr(settings.algorithm, "user_vectors", "private") == "uploaded"
