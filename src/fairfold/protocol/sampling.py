"""Who takes part in a round, and with which hash. Each draw depends on the seed, the purpose and the round alone."""

from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.kernels.hashing import expand_seed

if TYPE_CHECKING:
    from fairfold.settings import Settings


class Purpose(IntEnum):
    """What random numbers are for; each has a stream of its own."""

    COHORT = 1
    MODEL = 2
    TRAINING = 3
    FAULTS = 4
    COUNTING = 5
    SHARED = 6  # what an algorithm's server draws for all
    NOISE = 7
    SPEED = 8


def generator(settings: "Settings | int", purpose: Purpose, round_number: int = 0, client: int = 0) -> torch.Generator:
    """A stream of random numbers of its own, so that any round can be repeated alone, and clients in any order."""
    word = expand_seed(settings if isinstance(settings, int) else settings.run.seed)
    for part in (int(purpose), round_number, client):
        word = expand_seed(word ^ part)
    return torch.Generator().manual_seed(word >> 1)


def sample_cohort(settings: "Settings", num_clients: int, round_number: int, wanted: int | None = None) -> Tensor:
    """C, the clients of a round: as many as ``wanted``, or as the settings say."""
    wanted = settings.fleet.clients_per_round if wanted is None else wanted
    wanted = num_clients if wanted is None else wanted
    source = generator(settings, Purpose.COHORT, round_number)
    if settings.fleet.replacement:
        return torch.randint(num_clients, (wanted,), generator=source)
    if wanted * 16 > num_clients:
        return torch.randperm(num_clients, generator=source)[:wanted]
    # Few of very many: draw until there are enough different ones, at a cost by what is drawn.
    chosen = torch.empty(0, dtype=torch.long)
    while len(chosen) < wanted:
        more = torch.randint(num_clients, (wanted,), generator=source)
        both = torch.cat([chosen, more])
        order = torch.argsort(both, stable=True)
        new = torch.ones_like(both, dtype=torch.bool)
        new[1:] = both[order[1:]] != both[order[:-1]]
        chosen = both[order[new].sort().values][:wanted]  # in the order in which they were drawn
    return chosen


def hash_seed(settings: "Settings", round_number: int) -> int:
    """The seed of h: the run's, or a new one every round.

    The round goes into other bits than the seed: with ``seed ^ round`` runs of seeds 0, 1, 2 would have nearly all
    their hashes in common.
    """
    number = round_number + 1 if getattr(settings.subspace, "rehash", False) else 0
    seed = expand_seed(settings.run.seed)
    return expand_seed(seed ^ number) if number else seed
