"""How the server takes in what came back: sums per size, one recovery, one of two rules."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairfold.federation.settings import Settings
from fairfold.subspace import Sums


@dataclass(frozen=True)
class ServerState:
    """All that the server carries from round to round.

    Attributes:
        full: θ.
        round_number: Rounds done.
        moments: First and second moments of the server's optimiser, where it has any.
    """

    full: Tensor
    round_number: int = 0
    moments: tuple[Tensor, ...] = ()


@torch.no_grad()
def aggregate(state: ServerState, sums: Sums, settings: Settings) -> ServerState:
    """The server's state after a round.

    ``sums`` holds ψᵢ′ under the paper's rule and ψᵢ′ − ψᵢ under the delta rule; if nobody answered the model stays.
    """
    next_round = state.round_number + 1
    if not sums.weight:
        return replace(state, round_number=next_round)
    mean = sums.recover()
    if settings.aggregation == "paper":
        return replace(state, full=mean, round_number=next_round)
    if settings.server_optimiser == "sgd":
        return replace(state, full=state.full + settings.server_step * mean, round_number=next_round)
    return _adam(state, mean, settings.server_step, next_round)


def _adam(state: ServerState, mean: Tensor, step: float, next_round: int) -> ServerState:
    """Adam on the pseudo-gradient −mean, with its usual constants."""
    first, second = state.moments or (torch.zeros_like(mean), torch.zeros_like(mean))
    first = 0.9 * first + 0.1 * mean
    second = 0.999 * second + 0.001 * mean.square()
    direction = first / (1 - 0.9**next_round) / ((second / (1 - 0.999**next_round)).sqrt() + 1e-8)
    return ServerState(state.full + step * direction, next_round, (first, second))
