"""What came of a cell, and what makes two cells the same."""

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT = 1
"""Raised whenever a cell of the same settings would be run in another way: what was kept is then run again."""


@dataclass(frozen=True)
class Outcome:
    """One cell for one seed.

    Attributes:
        state: ``done``; ``N/A``, the method cannot serve the capacities; ``no data``, the data is not at hand.
        reason: Why it is not done.
        best: The best value over the evaluations.
        best_round: When.
        last: The value at the end.
        last_round: The end.
        curve: Round (or whatever runs along the x axis) and value of every evaluation.
        seconds: How long it took, all sittings together.
        facts: What else was found, by name.
        data: What identifies the data.
    """

    state: Literal["done", "N/A", "no data"] = "done"
    reason: str = ""
    best: float | None = None
    best_round: float | None = None
    last: float | None = None
    last_round: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_curve(cls, curve: list[tuple[float, float]], *, smaller_is_better: bool, **others: Any) -> "Outcome":
        """From evaluations in order."""
        sign = 1 if smaller_is_better else -1
        best = min(curve, key=lambda point: (math.isnan(point[1]), sign * point[1]))  # what diverged is never best
        return cls(
            best=best[1], best_round=best[0], last=curve[-1][1], last_round=curve[-1][0], curve=tuple(curve), **others
        )


def fingerprint(kind: str, values: dict[str, Any], seed: int, data: dict[str, Any]) -> str:
    """What makes two cells the same: what their settings mean, seed and the data's own checksum."""
    content = {"format": FORMAT, "kind": kind, "values": values, "seed": seed, "data": data}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_name(label: str) -> str:
    """A cell's label as the name of a file."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", label).strip("-")
