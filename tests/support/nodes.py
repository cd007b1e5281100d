"""Federations of nodes in one process, beside the simulator's on the same data; nodes with scripted failures."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fairfold.backends.batched import batched
from fairfold.config import Settings
from fairfold.config.fleet import FaultSettings, SecurePrivacy
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.data.partition import Partition
from fairfold.federation.algorithm import RemembersUpdates
from fairfold.federation.clients import Clients, ImageClients
from fairfold.federation.federation import Federation, number_items
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round, sequential
from fairfold.federation.updates import ClientUpdate, ScheduledTask, State
from fairfold.flower.client import make_client_app
from fairfold.flower.client_store import ClientState, ClientStore, RememberedUpdate
from fairfold.flower.grid import InProcessGrid, Inspect
from fairfold.flower.local_data import LocalData, LocalImages
from fairfold.flower.protocol import ARRAYS
from fairfold.flower.strategy import FairStrategy
from fairfold.flower.vectors import INDICES
from fairfold.kernels import ops
from fairfold.typing import Weights
from tests.support.federations import cloned

Fault = Callable[[int, int], str | None]
"""From a round, counted from 0, and a node's number to the way in which it fails."""


def nothing(_message: Message) -> None:
    """Look away."""


class FaultyGrid(InProcessGrid):
    """Nodes whose replies are lost, late (they come in the next round), repeated or spoiled."""

    fault: Fault = staticmethod(lambda _round, _node: None)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._late: list[tuple[int, Message]] = []
        self._again: list[Message] = []
        self._round = 0

    def _deliver(self, message: Message) -> str:
        name = super()._deliver(message)
        if message.metadata.message_type != "train":
            return name
        self._round = int(message.metadata.group_id) - 1
        node = int(self.contexts[message.metadata.dst_node_id].node_config["partition-id"])
        kind = self.fault(self._round, node)
        reply = self._replies[name]
        if kind is None or reply.has_error():
            return name
        if kind in ("drop", "late"):
            del self._replies[name]
            if kind == "late":
                self._late.append((self._round, reply))
        elif kind == "again":
            self._again.append(deepcopy(reply))
        else:
            spoil_message(reply, kind)
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        due = [reply for number, reply in self._late if number < self._round]
        self._late = [(number, reply) for number, reply in self._late if number >= self._round]
        found = [*due, *super().pull_messages(message_ids), *self._again]
        self._again = []
        return found


def spoil_message(reply: Message, kind: str) -> None:
    """Spoil a reply as :func:`fairfold.federation.randomness.apply_fault` does."""
    arrays = reply.content[ARRAYS]
    assert isinstance(arrays, ArrayRecord)
    name = next(name for name in arrays if not name.endswith(INDICES))
    values = torch.from_numpy(arrays[name].numpy().copy())
    if kind == "wrong_size":
        values = values[:-1].clone()
    else:
        values[len(values) // 2] = {"nan": torch.nan, "infinite": torch.inf, "out_of_range": 1e30}[kind]
    arrays[name] = Array(values.numpy())


@dataclass
class Nodes:
    """A federation over messages, and the world that it must agree with.

    Attributes:
        strategy: The server.
        grid: The way to its nodes.
        world: The same federation in one place, before its first round.
        start: The server's tensors before the first round.
        folder: What stands for the devices' disks.
    """

    strategy: FairStrategy
    grid: FaultyGrid
    world: Federation
    start: Weights
    folder: Path

    def run(self, **options: Any) -> State:
        """All rounds that are left."""
        if self.strategy.progress.state.round_number == 0:
            options["initial_arrays"] = ArrayRecord({name: Array(of.numpy()) for name, of in self.start.items()})
        self.strategy.start(self.grid, **options)
        return self.strategy.progress.state

    def store(self, number: int) -> ClientStore:
        """Of a node."""
        return ClientStore(self.folder / f"node-{number}")

    def kept(self, number: int) -> ClientState:
        """What a node keeps, agreed with the server."""
        kept = self.store(number).load()
        if not isinstance(self.strategy.plan.algorithm, RemembersUpdates):
            return kept
        name = next(node.client_id for node in self.strategy.nodes.usable.values() if node.partition_id == number)
        network_state = self.strategy.network_state
        if kept.run != network_state.run and name not in network_state.acknowledged:
            return ClientState()
        return kept.reconcile(network_state.run, network_state.acknowledged.get(name, 0))


def cooccurrence_sums(histories: list[torch.Tensor], weights: torch.Tensor, items: int) -> torch.Tensor:
    """The packed sum over users of weight · x xᵀ over the first items; histories ascend."""
    lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
    ends = lengths.cumsum(0)
    items_of_all = torch.cat([torch.empty(0, dtype=torch.int64), *histories])
    return ops.pair_sums(items_of_all, ends - lengths, ends, weights, items)


def without_faults(settings: Settings) -> Settings:
    """The same where devices are real."""
    return settings.model_copy(update={"fleet": settings.fleet.model_copy(update={"faults": FaultSettings()})})


def partition(users: int, nodes: int) -> list[list[int]]:
    """Neighbouring users on one node."""
    return [part.tolist() for part in torch.arange(users).chunk(nodes)]


def catalogued(data: Dataset | ImageDataset, settings: Settings) -> Dataset | ImageDataset:
    """The data in the numbers of a run; all clients send statistics."""
    return data if isinstance(data, ImageDataset) else number_items(data, without_faults(settings))


def in_process(
    data: Dataset | ImageDataset,
    settings: Settings,
    nodes: int,
    devices: Path,
    *,
    inspect: Inspect = nothing,
    fault: Fault | None = None,
    app: Callable[[ClientApp], ClientApp] = lambda app: app,
    **options: Any,
) -> Nodes:
    """A federation whose nodes start where the simulator does; its faults are those that the settings ask for."""
    world = Federation.of(settings, catalogued(data, settings))
    state = world.initial()
    parts = partition(world.clients.num_clients, nodes)
    own = {
        name: rows for name, rows in world.clients.local_state.items() if name in world.plan.architecture.user_vectors
    }
    learned = not isinstance(world.plan.algorithm, RemembersUpdates) and isinstance(data, Dataset)
    for number, users in enumerate(parts if learned else []):
        rows = {name: tensor[users].clone() for name, tensor in own.items()}
        ClientStore(devices / f"node-{number}").save(
            ClientState(RememberedUpdate(0, rows), user_names=[str(user) for user in users])
        )
    sizes = [{int(world.sampler.size[user]) for user in users} for users in parts]
    assert all(len(of) == 1 for of in sizes), "users of one size on a node"
    capacities = [str(world.plan.capacities[of.pop()]) for of in sizes]

    def local(context: Context, _num_items: int) -> LocalData | LocalImages:
        mine = parts[int(context.node_config["partition-id"])]
        if isinstance(data, ImageDataset):
            assert isinstance(world.clients, ImageClients)
            rows = torch.cat([world.clients.partition.of(user) for user in mine])
            return LocalImages(data, Partition(torch.tensor([0, len(rows)]), rows))
        return LocalData(data.train, data.test, client_ids=mine)

    own_model = settings.model.kind if settings.model.is_custom else None
    config: dict[str, Any] = {}
    if isinstance(settings.privacy, SecurePrivacy):
        config = {"min-cohort": settings.privacy.min_cohort, "privacy": "secure"}
    grid = FaultyGrid(
        app(make_client_app(local, model=own_model, state=devices, repeatable=True)),
        [{"partition-id": number, "capacity": of} | config for number, of in enumerate(capacities)],
        inspect=inspect,
    )
    if fault is None and settings.fleet.faults != FaultSettings():
        grid.fault = lambda number, node: world.sampler.faults(number, [node]).get(node)
    elif fault is not None:
        grid.fault = fault
    options = {"round_timeout": 0.0} | options
    items = 0 if isinstance(data, ImageDataset) else data.num_items
    if isinstance(data, ImageDataset):
        options["image_shape"] = (*data.train.images.shape[1:], data.num_classes)
    strategy = FairStrategy(without_faults(settings), items, **options)
    return Nodes(strategy, grid, replace(world), cloned(state.full), devices)


def as_devices(
    clients: Clients, scheduled_tasks: Iterable[ScheduledTask], alone: Mapping[int, str]
) -> Iterator[ClientUpdate]:
    """Clients one after another, each by the program that devices run: the same digits, not only the same numbers."""
    for scheduled_task in scheduled_tasks:
        yield from batched(clients, [scheduled_task], {})


def simulated(
    data: Dataset | ImageDataset, settings: Settings, backend: Backend = sequential
) -> tuple[State, Federation, Rejections]:
    """The oracle: all rounds, one client after another."""
    world = Federation.of(settings, catalogued(data, settings))
    state, rejections = world.initial(), Rejections()
    for _ in range(settings.run.rounds):
        state = run_round(state, world.sampler, world.clients, rejections, backend)
    return state, world, rejections


def assert_same(found: Weights, expected: Weights, within: float = 1e-6) -> None:
    """The same numbers, relative to the largest of each tensor."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        allowed = within * max(float(tensor.abs().max()) if tensor.numel() else 0.0, 1e-3)
        difference = (found[name].view(-1) - tensor.view(-1)).abs()
        worst = float(difference.max()) if difference.numel() else 0.0
        assert worst <= allowed, f"{name}: {worst} where {allowed} is allowed"  # False for NaN as well


def assert_agrees(
    nodes: Nodes, expected: State, world: Federation, rejections: Rejections, within: float = 1e-6
) -> None:
    """The server's tensors and sums, who was left out and why, and what every device keeps."""
    state, strategy = nodes.strategy.progress.state, nodes.strategy
    assert state.round_number == expected.round_number
    assert strategy.progress.rejections.counts == rejections.counts
    assert_same(state.full, expected.full, within)
    for name, moment in expected.algorithm_state.items():
        assert_same(state.algorithm_state[name], moment, within)
    names = [name for name in world.clients.local_state if name in world.plan.architecture.user_vectors]
    remembered = RemembersUpdates.of(world.plan.algorithm).sample_state_shapes(world.plan)
    parts = partition(world.clients.num_clients, len(nodes.grid.contexts))
    for number, users in enumerate(parts):
        kept = nodes.kept(number).acknowledged.local_state
        for name in [*names, *remembered]:
            rows = world.clients.local_state[name]
            mine = rows[world.clients.sample_indices(users)] if name in remembered else rows[users]
            found = kept.get(name, torch.zeros_like(mine))
            assert_same({name: found}, {name: mine}, 10 * within)
