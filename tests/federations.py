"""Small federations for tests."""

from typing import Any

import torch

from fairfold.data import Dataset, Interactions
from fairfold.federation.aggregate import ServerState
from fairfold.federation.settings import Settings, read_settings
from fairfold.federation.task import Task, Weights
from fairfold.simulate.federation import Federation


def tiny_data(seed: int = 0, users: int = 6, items: int = 11, ratings: bool = False) -> Dataset:
    """Every user has item 0 and some others, never all."""
    source = torch.Generator().manual_seed(seed % 2**32)
    drawn = torch.rand(users, items, generator=source) < 0.4
    drawn[:, 0], drawn[:, -1] = True, False
    pairs = drawn.nonzero()
    given = torch.randint(1, 6, (len(pairs),), generator=source).float() if ratings else None
    train = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], users, items, given)
    return Dataset("tiny", train, train)


def tiny_settings(**changes: Any) -> Settings:
    """Gradient steps on a small matrix factorisation, the paper's rule, unless changed."""
    base: dict[str, Any] = {
        "factors": 3,
        "clients_per_round": 4,
        "local_step": 0.1,
        "solver": "gradient",
        "aggregation": "paper",
        "weighting": "data",
        "batch_size": 3,
        "chunk": 1,
    }
    return read_settings(base | changes)


def tiny_federation(data: Dataset, settings: Settings) -> tuple[Federation, ServerState, Weights]:
    """A federation, its server's first state and the users' own vectors."""
    federation = Federation.of(settings, Task(data, settings))
    full, private = federation.initial()
    return federation, ServerState(full), private
