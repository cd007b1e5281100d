"""How a server takes in the mean of what came back: the paper's rule, or changes through an optimiser."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.projections import Part
from fairfold.projections.hashed import Hashed, sums_of
from fairfold.protocol.algorithm import Algorithm
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import State, Totals
from fairfold.settings.base import Frozen
from fairfold.values import Weights

MOMENTUM, SECOND, EPSILON = 0.9, 0.999, 1e-8
"""Of the server's optimisers: how much of the first and of the second moment stays, as torch.optim has it."""

Weighting = Literal["data", "equal"] | float


def weight_of(weighting: Weighting, samples: float) -> float:
    """What a client with so many samples counts, pᵢ before all are divided by their sum."""
    power = {"data": 1.0, "equal": 0.0}.get(weighting, weighting)  # type: ignore[arg-type]
    return float(samples**power)


class ServerStep(Frozen):
    """The keys of a server that takes steps.

    Attributes:
        weighting: Clients count by their number of samples (``"data"``, the paper), alike (``"equal"``), or by a power
            of that number in between (0.5; 1 is ``"data"`` and 0 ``"equal"``).
        aggregation: ``"paper"``: θ ← Σ pᵢ Sᵢψᵢ′. ``"delta"``: θ ← θ + what the optimiser makes of Σ pᵢ Sᵢ(ψᵢ′ − ψᵢ).
        server_optimiser: With the delta rule: ``"sgd"``, ``"momentum"``, ``"adam"``, ``"yogi"`` or ``"adagrad"``.
        server_step: The step size of the server's optimiser, η.
        step_per: What a step is for: a ``"round"``, so that the clients' mean change is what counts, however many they
            are; or a ``"client"``, η times the clients of a round, so that as many visits go as far in fewer rounds
            (docs/beyond.md).
    """

    NEEDS: ClassVar = dict.fromkeys(("server_optimiser", "server_step", "step_per"), ("aggregation", ("delta",)))

    weighting: Literal["data", "equal"] | float = Field("equal", union_mode="left_to_right")
    aggregation: Literal["paper", "delta"] = "delta"
    server_optimiser: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = "adam"
    server_step: float = Field(0.03, gt=0)
    step_per: Literal["round", "client"] = "round"

    def weight(self, samples: float) -> float:
        """What a client with so many samples counts, pᵢ before all are divided by their sum."""
        return weight_of(self.weighting, samples)


class Stepping(Algorithm, ServerStep):
    """An algorithm whose server averages models, or takes steps along the mean of their changes."""

    @property
    def values(self) -> bool:  # type: ignore[override]
        """Whether an answer is the weighted model itself: under the paper's rule."""
        return self.aggregation == "paper"

    @torch.no_grad()
    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """See the base class; if nobody answered the model stays."""
        next_round = state.round_number + 1
        if not totals.weight:
            return replace(state, round_number=next_round)
        parts: dict[str, list[Part]] = {}
        for sent, answer in totals.parts():
            if answer.weight:
                for name, total in answer.sums.items():
                    parts.setdefault(name, []).append(Part(sent.projections[name], total, answer.weight))
        if self.aggregation == "paper":
            mean = {name: _mean(state.full[name], of, changes=False) for name, of in parts.items()}
            return replace(state, full=state.full | mean, round_number=next_round)
        return self._stepped(plan, state, parts)

    def _stepped(self, plan: Plan, state: State, parts: dict[str, list[Part]]) -> State:
        next_round = state.round_number + 1
        full, moments = dict(state.full), {name: dict(of) for name, of in state.moments.items()}
        clients = plan.settings.fleet.clients_per_round if self.step_per == "client" else None
        step = self.server_step * (clients or 1)
        for name, of in parts.items():
            if self.server_optimiser == "sgd" and all(isinstance(part.projection, Hashed) for part in of):
                add_mean(full[name], of, step)  # into the model itself: no second vector of its size
                continue
            change = _mean(full[name], of, changes=True)
            if self.server_optimiser == "sgd":
                full[name] = change.mul_(step).add_(full[name])
                continue
            before = {moment: kept[name] for moment, kept in moments.items() if name in kept}
            direction, after = direction_of(self.server_optimiser, change, before, next_round)
            full[name] = full[name].add(direction, alpha=step)
            for moment, tensor in after.items():
                moments.setdefault(moment, {})[name] = tensor
        return State(full, next_round, moments)


def _mean(full: Tensor, parts: Sequence[Part], *, changes: bool) -> Tensor:
    found: Tensor = type(parts[0].projection).mean(full, parts, changes=changes)
    return found


BLOCK = 1 << 22
"""Numbers recovered at a time where the model is changed in place."""


def add_mean(full: Tensor, parts: Sequence[Part], step: float) -> None:
    """Add ``step`` times the mean of what came back to the server's vector, a block at a time."""
    first, *others = sums_of(parts)
    if others:
        full.copy_(_mean(full, parts, changes=True).mul_(step).add_(full))
        return
    space, mean = first.mean()
    for start in range(0, len(full), BLOCK):
        stop = min(start + BLOCK, len(full))
        block = mean[start:stop] if space.is_full else space.recover_range(mean, start, stop, trusted=True)
        full[start:stop] = block.mul_(step).add_(full[start:stop])


def direction_of(kind: str, change: Tensor, moments: Weights, next_round: int) -> tuple[Tensor, Weights]:
    """Where an optimiser goes for a mean change (minus the pseudo-gradient), and its moments afterwards."""
    zero = torch.zeros_like(change)
    first = moments.get("first", zero)
    if kind == "momentum":
        first = MOMENTUM * first + change
        return first, {"first": first}
    second, square = moments.get("second", zero), change.square()
    if kind == "adagrad":
        second = second + square
        return change / (second.sqrt() + EPSILON), {"second": second}
    first = torch.lerp(first, change, 1 - MOMENTUM)
    if kind == "yogi":
        second = second + (1 - SECOND) * torch.sign(square - second) * square
    else:
        second = torch.lerp(second, square, 1 - SECOND)
    corrected = (second / (1 - SECOND**next_round)).sqrt_().add_(EPSILON)
    return first / (1 - MOMENTUM**next_round) / corrected, {"first": first, "second": second}
