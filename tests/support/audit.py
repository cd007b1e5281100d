"""Small federations that are attacked."""

from typing import Any

import torch

from fairfold.config import Settings, read_settings
from fairfold.data import Dataset, Interactions
from fairfold.federation.federation import Federation
from fairfold.privacy.audit.replay import ReplayedClients

USERS, ITEMS, EACH = 60, 90, 12


def clients(ratings: bool = False, users: int = USERS) -> Dataset:
    """Users with histories by a falling popularity, so that some items are rare."""
    source = torch.Generator().manual_seed(5)
    weights = 1 / torch.arange(3, ITEMS + 3).double()
    items = torch.stack([torch.multinomial(weights, EACH, generator=source) for _ in range(users)])
    given = torch.randint(1, 6, (users * EACH,), generator=source).float() if ratings else None
    owner = torch.arange(users).repeat_interleave(EACH)
    train = Interactions.from_pairs(owner, items.view(-1), users, ITEMS, given)
    return Dataset("people", train, train)


def audited_settings(kind: str, level: str = "plain", **changes: Any) -> Settings:
    """An algorithm at a level; sums of as many as a round asks, unless changed."""
    tables: dict[str, Any] = {
        "algorithm": {"kind": kind},
        "model": {"factors": 6},
        "fleet": {"capacities": "1x", "clients_per_round": 10},
        "run": {"rounds": 6},
        "privacy": {"level": level},
    }
    if level != "plain":
        tables["privacy"]["min_cohort"] = 5
    if level == "private":
        tables["fleet"] = {"capacities": "1x"}
        del tables["run"]
    elif kind == "co_occurrence":
        tables["algorithm"] |= {"tune": False, "support": 1}
    return read_settings(tables).with_changes(changes)


def devices_of(settings: Settings, data: Dataset | None = None) -> tuple[ReplayedClients, Dataset]:
    """Their first words, and the truth."""
    data = clients(ratings=settings.predicts_ratings) if data is None else data
    return ReplayedClients.of_run(Federation.of(settings, data)), data
