"""Small federations for tests."""

from typing import Any

import torch

from fairfold.data import Dataset, Interactions
from fairfold.protocol.faults import Rejections
from fairfold.protocol.round import Backend, in_turn, run_round
from fairfold.protocol.words import State
from fairfold.settings import Settings
from fairfold.settings.settings import algorithms, methods
from fairfold.simulate.world import World
from fairfold.values import Weights
from tests.flat import flat

BASE: dict[str, Any] = {
    "factors": 3,
    "clients_per_round": 4,
    "local_step": 0.1,
    "solver": "gradient",
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
    """Gradient steps on a small matrix factorisation, the paper's rule, unless changed; what has no effect is left."""
    chosen = BASE | changes
    solver = "central" if chosen.get("method") == "central" else chosen["solver"]
    known = set(algorithms()[solver].model_fields) | set(methods()[_method(chosen)].model_fields)
    if solver == "ratings" or chosen.get("mapping") == "element":
        known -= {"chunk"}
    known |= {"factors", "clients_per_round", "solver"}
    return flat(**{key: value for key, value in chosen.items() if key in changes or key in known})


def _method(chosen: dict[str, Any]) -> str:
    central = "central" in (chosen.get("method"), chosen["solver"])
    name: str = "fedavg" if central else chosen.get("method", "fair")
    return name


def tiny_world(data: Dataset, settings: Settings) -> tuple[World, State]:
    """A federation with its users' own vectors, and its server's first state."""
    world = World.of(settings, data)
    return world, world.initial()


def after_rounds(world: World, state: State, rounds: int = 1, backend: Backend = in_turn) -> State:
    """Some rounds later."""
    for _ in range(rounds):
        state = run_round(state, world.fleet, world.people, Rejections(), backend)
    return state


def copied(weights: Weights) -> Weights:
    """What does not change when a round changes its tensors in place."""
    return {name: tensor.clone() for name, tensor in weights.items()}
