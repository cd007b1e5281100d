"""Federations of nodes in one process, beside the simulator's on the same data."""

from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.app.user_config import UserConfig

from fairfold.data import Dataset
from fairfold.federation.aggregate import ServerState
from fairfold.federation.replies import Rejections
from fairfold.federation.settings import Settings
from fairfold.federation.task import Weights
from fairfold.flower.client import make_client_app
from fairfold.flower.inprocess import InProcessGrid, Inspect
from fairfold.flower.local import LocalData
from fairfold.flower.store import DeviceState, DeviceStore
from fairfold.flower.strategy import FairStrategy
from fairfold.simulate import loop
from fairfold.simulate.federation import Federation
from tests.federations import tiny_federation


def nothing(_message: Message) -> None:
    """Look away."""


def partition(data: Dataset, nodes: int) -> list[list[int]]:
    """Neighbouring users on one node."""
    return [part.tolist() for part in torch.arange(data.num_users).chunk(nodes)]


def node_configs(data: Dataset, settings: Settings, nodes: int, federation: Federation) -> list[UserConfig]:
    """A node has the capacity of its first user; partitions must not straddle groups."""
    configs: list[UserConfig] = []
    for number, users in enumerate(partition(data, nodes)):
        groups = {int(federation.group[user]) for user in users}
        assert len(groups) == 1
        configs.append({"partition-id": number, "capacity": str(federation.capacities[groups.pop()])})
    return configs


def in_process(
    data: Dataset, settings: Settings, nodes: int, state: Path, *, inspect: Inspect = nothing, **options: Any
) -> tuple[FairStrategy, InProcessGrid, Federation, Weights]:
    """A strategy and a grid whose nodes start where the simulator does."""
    federation, _, private = tiny_federation(data, settings)
    parts = partition(data, nodes)

    def local(context: Context, num_items: int) -> LocalData:
        assert num_items == data.num_items
        return LocalData(data.train, data.test, clients=parts[int(context.node_config["partition-id"])])

    for number, users in enumerate(parts):
        rows = {name: tensor[users].clone() for name, tensor in private.items()}
        DeviceStore(state / f"node-{number}").save(DeviceState(rows, [str(user) for user in users]))
    app = make_client_app(local, model=settings.model if settings.own_model else None, state=state, repeatable=True)
    grid = InProcessGrid(app, node_configs(data, settings, nodes, federation), inspect=inspect)
    strategy = FairStrategy(settings, data.num_items, **options)
    full, _ = federation.initial()
    strategy.progress.state = ServerState(full)
    return strategy, grid, federation, private


def simulated(data: Dataset, settings: Settings) -> tuple[Weights, Weights]:
    """The oracle: the server's tensors and the users' own, after all rounds."""
    federation, state, private = tiny_federation(data, settings)
    for _ in range(settings.rounds):
        state = loop.run_round(state, private, federation, Rejections())
    return state.full, private
