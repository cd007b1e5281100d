"""Clients that fail on purpose, as the settings ask, and a count of whatever answers were left out."""

import logging
from collections import Counter
from dataclasses import dataclass, field

import torch

from fairfold.protocol.words import Answer
from fairfold.settings.parts import FaultSettings

log = logging.getLogger("fairfold.federation")


@dataclass
class Rejections:
    """How many answers were left out, by reason."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, round_number: int, client: int, reason: str) -> None:
        """Count an answer that was left out, and log who and why."""
        self.counts[reason] += 1
        log.warning("round %d: client %d left out: %s", round_number, client, reason)


def fault_of(faults: FaultSettings, source: torch.Generator) -> str | None:
    """Which way a client fails this round, if it does."""
    drawn = float(torch.rand((), generator=source))
    for kind, share in faults:
        drawn -= share
        if drawn < 0:
            return kind
    return None


def spoil(answer: Answer, kind: str | None) -> Answer | None:
    """What arrives of an answer when its client fails in a given way."""
    if kind is None:
        return answer
    if kind in ("drop", "late"):
        return None
    name = next(iter(answer.sums))
    spoiled = answer.sums[name].to_dense().clone()
    if kind == "wrong_size":
        spoiled = spoiled[:-1]
    else:
        spoiled[len(spoiled) // 2] = {"nan": torch.nan, "infinite": torch.inf, "out_of_range": 1e30}[kind]
    return Answer(answer.sums | {name: spoiled}, answer.weight)
