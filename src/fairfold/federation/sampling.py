"""Who takes part in a round, and with which hash. Each draw depends on the seed and the round alone."""

import torch
from torch import Tensor

from fairfold.federation.settings import Settings
from fairfold.kernels.hashing import expand_seed


def generator(settings: Settings, purpose: int, round_number: int = 0) -> torch.Generator:
    """A stream of random numbers of its own for every purpose and round, so that a resumed run draws the same."""
    word = expand_seed(expand_seed(settings.seed) ^ (purpose << 48) ^ round_number)
    return torch.Generator().manual_seed(word >> 1)


def sample_cohort(settings: Settings, num_clients: int, round_number: int) -> Tensor:
    """C, the clients of a round."""
    order = torch.randperm(num_clients, generator=generator(settings, 1, round_number))
    return order[: settings.clients_per_round]


def hash_seed(settings: Settings, round_number: int) -> int:
    """The seed of h: new every round, or the run's."""
    return expand_seed(settings.seed ^ (round_number + 1 if settings.rehash else 0))
