"""Random streams of a run: each draw depends on the seed, the purpose, the round and the client alone."""

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.config.fleet import DifferentialPrivacy, FaultSettings
from fairfold.federation.algorithm import SettingsRules
from fairfold.federation.updates import Update
from fairfold.kernels.hashing import expand_seed

if TYPE_CHECKING:
    from fairfold.config import Settings


class Purpose(IntEnum):
    """Purposes of random numbers; each has a stream of its own."""

    COHORT = 1
    MODEL = 2
    TRAINING = 3
    FAULTS = 4
    COUNTING = 5
    SHARED = 6  # what an algorithm's server draws for all
    NOISE = 7
    SPEED = 8
    GROUPS = 9


def generator(settings: "Settings | int", purpose: Purpose, round_number: int = 0, client: int = 0) -> torch.Generator:
    """A random stream of its own, so that any round can be repeated alone, and clients in any order."""
    state = expand_seed(settings if isinstance(settings, int) else settings.run.seed)
    for part in (int(purpose), round_number, client):
        state = expand_seed(state ^ part)
    return torch.Generator().manual_seed(state >> 1)


def uses_seed(settings: "Settings") -> bool:
    """Whether a run draws anything by ``run.seed``: data, clients, faults, noise, or what its algorithm draws."""
    fleet = settings.fleet
    everybody = fleet.clients_per_round is None and not any(share for _, share in fleet.faults)
    drawn = (
        not everybody
        or fleet.secure_groups > 1
        or fleet.latency.median_seconds is not None
        or settings.data.kind in ("synthetic", "images")
    )
    return drawn or isinstance(settings.privacy, DifferentialPrivacy) or SettingsRules.of(settings.algorithm).draws


def sample_cohort(settings: "Settings", num_clients: int, round_number: int, wanted: int | None = None) -> Tensor:
    """Draw C, the clients of a round: ``wanted`` of them, or ``fleet.clients_per_round``."""
    if wanted is None:
        wanted = settings.fleet.clients_per_round or num_clients
    source = generator(settings, Purpose.COHORT, round_number)
    if settings.fleet.replacement:
        return torch.randint(num_clients, (wanted,), generator=source)
    if wanted * 16 > num_clients:
        return torch.randperm(num_clients, generator=source)[:wanted]
    # Few of many: draw until there are enough distinct ones, at a cost that depends on what is drawn.
    chosen = torch.empty(0, dtype=torch.long)
    while len(chosen) < wanted:
        both = torch.cat([chosen, torch.randint(num_clients, (wanted,), generator=source)])
        order, new = torch.argsort(both, stable=True), torch.ones_like(both, dtype=torch.bool)
        new[1:] = both[order[1:]] != both[order[:-1]]
        chosen = both[order[new].sort().values][:wanted]  # in the order in which they were drawn
    return chosen


def secure_groups(settings: "Settings", num_clients: int) -> Tensor:
    """The group of each client, which has a secure sum of its own: near-equal ones, with as many of each capacity."""
    number = settings.fleet.secure_groups
    if number == 1:
        return torch.zeros(num_clients, dtype=torch.int64)
    capacity = settings.fleet.groups(num_clients)
    drawn = torch.randperm(num_clients, generator=generator(settings, Purpose.GROUPS))
    group = torch.empty_like(capacity)
    group[drawn[capacity[drawn].argsort(stable=True)]] = torch.arange(num_clients) % number
    return group


def panel(clients: Tensor, share: float) -> Tensor:
    """Places of a share of some clients, ascending: the same in every round, and spread evenly over their numbers."""
    order = (clients * 2_654_435_761 % 2**32).argsort(stable=True)
    return order[: math.ceil(share * len(clients))].sort().values


def hash_seed(settings: "Settings", round_number: int) -> int:
    """Seed of the hash h: the run's, or a new one every round."""
    # Seed and round are mixed: with seed ^ round, runs of seeds 0, 1, 2 would have nearly all hashes in common.
    number = round_number + 1 if settings.subspace.rehashes else 0
    seed = expand_seed(settings.run.seed)
    return expand_seed(seed ^ number) if number else seed


log = logging.getLogger("fairfold.federation")


@dataclass
class Rejections:
    """Counts of refused updates, by reason."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, round_number: int, client: int, reason: str) -> None:
        """Count and log a refused update."""
        self.counts[reason] += 1
        log.warning("round %d: client %d left out: %s", round_number, client, reason)


def draw_fault(faults: FaultSettings, source: torch.Generator) -> str | None:
    """Draw how a client fails in a round; None if it does not."""
    drawn = float(torch.rand((), generator=source))
    for kind, share in faults:
        drawn -= share
        if drawn < 0:
            return kind
    return None


def apply_fault(update: Update, kind: str | None) -> Update | None:
    """The update that arrives of a client that fails in a given way; None if none does."""
    if kind is None:
        return update
    if kind in ("drop", "late"):
        return None
    name = next(iter(update.sums))
    spoiled = update.sums[name].to_dense().clone()
    if kind == "wrong_size":
        spoiled = spoiled[:-1]
    else:
        spoiled[len(spoiled) // 2] = {"nan": torch.nan, "infinite": torch.inf, "out_of_range": 1e30}[kind]
    return Update(update.sums | {name: spoiled}, update.weight)
