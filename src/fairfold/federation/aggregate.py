"""How the server takes in what came back: sums per size, one recovery, one of two rules."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fairfold.federation.projection import Projection, Totals
from fairfold.federation.settings import Settings
from fairfold.federation.task import Weights


@dataclass(frozen=True)
class ServerState:
    """All that the server carries from round to round.

    Attributes:
        full: θ, one flat vector a tensor of the model.
        round_number: Rounds done.
        moments: What the server's optimiser keeps, by the name of the moment and of the tensor.
    """

    full: Weights
    round_number: int = 0
    moments: dict[str, Weights] = field(default_factory=dict)


class RoundTotals:
    """What the devices of a round have sent so far: one weighted sum a tensor, and their weight."""

    def __init__(self, full: Weights) -> None:
        self._full = full
        self._totals: dict[str, Totals] = {}
        self.weight = 0.0

    def add(self, projections: dict[str, Projection], compacts: Weights, weight: float) -> None:
        """Add one device's vectors with its weight p_i (not yet normalised)."""
        for name, projection in projections.items():
            self._of(name, projection).add(projection, compacts[name], weight)
        self.weight += weight

    def add_sums(self, projections: dict[str, Projection], sums: Weights, weight: float) -> None:
        """Add the weighted sums of several devices of one size; the vectors are taken over."""
        for name, projection in projections.items():
            self._of(name, projection).add_sum(projection, sums[name], weight)
        self.weight += weight

    def _of(self, name: str, projection: Projection) -> Totals:
        if name not in self._totals:
            self._totals[name] = projection.totals(self._full[name])
        return self._totals[name]

    def mean(self, *, changes: bool = False) -> Weights:
        """Σ p_i S_i ψ_i with Σ p_i = 1, a tensor at a time; ``changes`` as in :meth:`Totals.mean`."""
        return {name: totals.mean(changes=changes) for name, totals in self._totals.items()}


@torch.no_grad()
def aggregate(state: ServerState, totals: RoundTotals, settings: Settings) -> ServerState:
    """The server's state after a round.

    ``totals`` holds ψᵢ′ under the paper's rule and ψᵢ′ − ψᵢ under the delta rule; if nobody answered the model stays.
    """
    changes = settings.aggregation == "delta"
    return update(state, totals.mean(changes=changes) if totals.weight else None, settings)


@torch.no_grad()
def update(state: ServerState, mean: Weights | None, settings: Settings) -> ServerState:
    """Apply a round's mean by the rule of the settings."""
    next_round = state.round_number + 1
    if mean is None:
        return replace(state, round_number=next_round)
    if settings.aggregation == "paper":
        return replace(state, full=state.full | mean, round_number=next_round)
    full, moments = dict(state.full), {name: dict(of) for name, of in state.moments.items()}
    clients = settings.clients_per_round if settings.step_per == "client" else None
    step = settings.server_step * (clients or 1)
    for name, change in mean.items():
        if settings.server_optimiser == "sgd":  # in the memory of the mean: no third vector of the full size
            full[name] = change.mul_(step).add_(full[name])
            continue
        before = {moment: of[name] for moment, of in moments.items() if name in of}
        direction, after = _direction(change, before, settings, next_round)
        full[name] = full[name].add(direction, alpha=step)
        for moment, tensor in after.items():
            moments.setdefault(moment, {})[name] = tensor
    return ServerState(full, next_round, moments)


def _direction(change: Tensor, moments: Weights, settings: Settings, next_round: int) -> tuple[Tensor, Weights]:
    """Where the optimiser goes for a mean change (minus the pseudo-gradient), and its moments afterwards."""
    kind = settings.server_optimiser
    zero = torch.zeros_like(change)
    first = moments.get("first", zero)
    if kind == "momentum":
        first = 0.9 * first + change
        return first, {"first": first}
    second, square = moments.get("second", zero), change.square()
    if kind == "adagrad":
        second = second + square
        return change / (second.sqrt() + 1e-8), {"second": second}
    first = torch.lerp(first, change, 0.1)
    if kind == "yogi":
        second = second + 0.001 * torch.sign(square - second) * square
    else:
        second = torch.lerp(second, square, 0.001)
    corrected = (second / (1 - 0.999**next_round)).sqrt_().add_(1e-8)
    return first / (1 - 0.9**next_round) / corrected, {"first": first, "second": second}
