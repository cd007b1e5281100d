"""Small federations for tests."""

from typing import Any

import torch

from fairfold.config import Settings
from fairfold.config.settings import algorithms, methods
from fairfold.data import Dataset, Interactions
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round, sequential
from fairfold.federation.updates import State
from fairfold.typing import Weights
from tests.support.settings import make_settings

BASE: dict[str, Any] = {
    "factors": 3,
    "clients_per_round": 4,
    "local_lr": 0.1,
    "algorithm": "gradient",
    "aggregation": "paper",
    "weighting": "data",
    "batch_size": 3,
    "chunk": 1,
}


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
    """Gradient descent on a small matrix factorization by the paper's rule, unless changed; inactive keys left out."""
    chosen = BASE | changes
    algorithm = chosen["algorithm"]
    method = "fedavg" if algorithm == "central" else chosen.get("method", "fair")
    active = set(algorithms()[algorithm].model_fields) | set(methods()[method].model_fields)
    if algorithm == "ratings" or chosen.get("mapping") == "element":
        active -= {"chunk"}
    active |= {"factors", "clients_per_round", "algorithm"}
    return make_settings(**{key: value for key, value in chosen.items() if key in changes or key in active})


def make_federation(data: Dataset, settings: Settings) -> tuple[Federation, State]:
    """A federation with its users' own vectors, and its server's first state."""
    federation = Federation.of(settings, data)
    return federation, federation.initial()


def after_rounds(federation: Federation, state: State, rounds: int = 1, backend: Backend = sequential) -> State:
    """Some rounds later."""
    for _ in range(rounds):
        state = run_round(state, federation.sampler, federation.clients, Rejections(), backend)
    return state


def cloned(weights: Weights) -> Weights:
    """What does not change when a round changes its tensors in place."""
    return {name: tensor.clone() for name, tensor in weights.items()}
