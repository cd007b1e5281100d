"""What the server accepts: every reply is checked before it can touch the model, and what is refused is counted.

``spoil`` makes clients fail on purpose, as the settings ask, so that the checks are used in simulations as well.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairfold.federation.projection import Projection
from fairfold.federation.settings import Settings
from fairfold.federation.task import Weights

log = logging.getLogger("fairfold.federation")


@dataclass
class Rejections:
    """How many replies were left out, by reason."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, round_number: int, client: int, reason: str) -> None:
        """Count a reply that was left out, and log who and why."""
        self.counts[reason] += 1
        log.warning("round %d: client %d left out: %s", round_number, client, reason)


def change_of(vector: Tensor, sent: Tensor, settings: Settings) -> Tensor:
    """What a reply changes: ψ′ − ψ of a trained ψ′; sums that remember are sent as changes, and taken as they are.

    Their summands are thousands of times smaller than the model: added to what was sent and taken out again, they would
    lose as many digits.
    """
    return vector if settings.solver == "least_squares" else vector - sent


def problem_with(
    reply: Weights | None, sent: Weights, projections: dict[str, Projection], settings: Settings
) -> str | None:
    """Why a reply cannot be used, or None if it can."""
    if reply is None:
        return "no answer in time"
    if reply.keys() != sent.keys():
        return "other tensors than were sent"
    for name, vector in reply.items():
        if vector.shape != (projections[name].size,) or vector.dtype != sent[name].dtype:
            return "wrong size"
        if not bool(torch.isfinite(vector).all()):
            return "NaN or infinity"
        if float(change_of(vector, sent[name], settings).abs().max()) > settings.largest_change:
            return "values out of range"
    return None


KINDS = ("drop", "late", "nan", "infinite", "wrong_size", "out_of_range")


def fault_of(settings: Settings, source: torch.Generator) -> str | None:
    """Which way a client fails this round, if it does."""
    drawn = float(torch.rand((), generator=source))
    for kind in KINDS:
        drawn -= getattr(settings.faults, kind)
        if drawn < 0:
            return kind
    return None


def spoil(reply: Weights, kind: str | None) -> Weights | None:
    """What arrives of a reply when its client fails in a given way."""
    if kind is None:
        return reply
    if kind in ("drop", "late"):
        return None
    name = next(iter(reply))
    spoiled = reply[name].clone()
    if kind == "wrong_size":
        spoiled = spoiled[:-1]
    else:
        spoiled[len(spoiled) // 2] = {"nan": torch.nan, "infinite": torch.inf, "out_of_range": 1e30}[kind]
    return reply | {name: spoiled}
