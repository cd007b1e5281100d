"""Federations of nodes in one process, beside the simulator's on the same data; nodes that fail as they are told."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fairfold.backends.batched import batched
from fairfold.data import Dataset
from fairfold.data.clients import Clients
from fairfold.data.images import ImageDataset
from fairfold.flower.client import make_client_app
from fairfold.flower.inprocess import InProcessGrid, Inspect
from fairfold.flower.local import LocalData, LocalImages
from fairfold.flower.protocol import ARRAYS
from fairfold.flower.store import DeviceState, DeviceStore, Word
from fairfold.flower.strategy import FairStrategy
from fairfold.flower.vectors import PLACES
from fairfold.protocol.faults import Rejections
from fairfold.protocol.people import ImagePeople, People
from fairfold.protocol.round import Backend, in_turn, run_round
from fairfold.protocol.words import State, Visit
from fairfold.protocol.words import Word as Said
from fairfold.settings import Settings
from fairfold.settings.parts import FaultSettings
from fairfold.settings.privacy import SecurePrivacy
from fairfold.simulate.numbering import numbered
from fairfold.simulate.world import World
from fairfold.values import Weights
from tests.federations import copied

Fault = Callable[[int, int], str | None]
"""From a round, counted from 0, and a node's number to the way in which it fails."""


def nothing(_message: Message) -> None:
    """Look away."""


class FaultyGrid(InProcessGrid):
    """Nodes whose answers are lost, late (they come in the next round), repeated or spoiled."""

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
    """Spoil an answer as :func:`fairfold.protocol.faults.spoil` does."""
    arrays = reply.content[ARRAYS]
    assert isinstance(arrays, ArrayRecord)
    name = next(name for name in arrays if not name.endswith(PLACES))
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
    world: World
    start: Weights
    folder: Path

    def run(self, **options: Any) -> State:
        """All rounds that are left."""
        if self.strategy.progress.state.round_number == 0:
            options["initial_arrays"] = ArrayRecord({name: Array(of.numpy()) for name, of in self.start.items()})
        self.strategy.start(self.grid, **options)
        return self.strategy.progress.state

    def store(self, number: int) -> DeviceStore:
        """Of a node."""
        return DeviceStore(self.folder / f"node-{number}")

    def kept(self, number: int) -> DeviceState:
        """What a node keeps, agreed with the server."""
        kept = self.store(number).load()
        if self.strategy.plan.algorithm.keeps != "acknowledged":
            return kept
        name = next(of.name for of in self.strategy.nodes.usable.values() if of.number == number)
        books = self.strategy.books
        if kept.run != books.run and name not in books.held:
            return DeviceState()
        return kept.agreed(books.run, books.held.get(name, 0))


def without_faults(settings: Settings) -> Settings:
    """The same where devices are real."""
    return settings.model_copy(update={"fleet": settings.fleet.model_copy(update={"faults": FaultSettings()})})


def partition(users: int, nodes: int) -> list[list[int]]:
    """Neighbouring users on one node."""
    return [part.tolist() for part in torch.arange(users).chunk(nodes)]


def catalogued(data: Dataset | ImageDataset, settings: Settings) -> Dataset | ImageDataset:
    """The data in the numbers of a run; everybody answers before the first round."""
    return data if isinstance(data, ImageDataset) else numbered(data, without_faults(settings))


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
    world = World.of(settings, catalogued(data, settings))
    state = world.initial()
    parts = partition(world.people.num_clients, nodes)
    own = {name: rows for name, rows in world.people.private.items() if name in world.plan.architecture.own}
    learned = world.plan.algorithm.keeps == "learned" and isinstance(data, Dataset)
    for number, users in enumerate(parts if learned else []):
        rows = {name: tensor[users].clone() for name, tensor in own.items()}
        DeviceStore(devices / f"node-{number}").save(DeviceState(Word(0, rows), names=[str(user) for user in users]))
    sizes = [{int(world.fleet.size[user]) for user in users} for users in parts]
    assert all(len(of) == 1 for of in sizes), "users of one size on a node"
    capacities = [str(world.plan.capacities[of.pop()]) for of in sizes]

    def local(context: Context, _num_items: int) -> LocalData | LocalImages:
        mine = parts[int(context.node_config["partition-id"])]
        if isinstance(data, ImageDataset):
            assert isinstance(world.people, ImagePeople)
            rows = torch.cat([world.people.clients.of(user) for user in mine])
            return LocalImages(data, Clients(torch.tensor([0, len(rows)]), rows))
        return LocalData(data.train, data.test, clients=mine)

    own_model = settings.model.kind if settings.model.own else None
    config: dict[str, Any] = {}
    if isinstance(settings.privacy, SecurePrivacy):
        config = {"smallest-cohort": settings.privacy.smallest_cohort, "privacy": "secure"}
    grid = FaultyGrid(
        app(make_client_app(local, model=own_model, state=devices, repeatable=True)),
        [{"partition-id": number, "capacity": of} | config for number, of in enumerate(capacities)],
        inspect=inspect,
    )
    if fault is None and settings.fleet.faults != FaultSettings():
        grid.fault = lambda number, node: world.fleet.faults(number, [node]).get(node)
    elif fault is not None:
        grid.fault = fault
    options = {"round_timeout": 0.0} | options
    items = 0 if isinstance(data, ImageDataset) else data.num_items
    if isinstance(data, ImageDataset):
        options["picture"] = (*data.train.images.shape[1:], data.num_classes)
    strategy = FairStrategy(without_faults(settings), items, **options)
    return Nodes(strategy, grid, replace(world), copied(state.full), devices)


def as_devices(people: People, visits: Iterable[Visit], alone: Mapping[int, str]) -> Iterator[Said]:
    """Clients one after another, each by the program that devices run: the same digits, not only the same numbers."""
    for visit in visits:
        yield from batched(people, [visit], {})


def simulated(
    data: Dataset | ImageDataset, settings: Settings, backend: Backend = in_turn
) -> tuple[State, World, Rejections]:
    """The oracle: all rounds, one client after another."""
    world = World.of(settings, catalogued(data, settings))
    state, rejections = world.initial(), Rejections()
    for _ in range(settings.run.rounds):
        state = run_round(state, world.fleet, world.people, rejections, backend)
    return state, world, rejections


def assert_same(found: Weights, expected: Weights, within: float = 1e-6) -> None:
    """The same numbers, relative to the largest of each tensor."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        allowed = within * max(float(tensor.abs().max()) if tensor.numel() else 0.0, 1e-3)
        difference = (found[name].view(-1) - tensor.view(-1)).abs()
        worst = float(difference.max()) if difference.numel() else 0.0
        assert worst <= allowed, f"{name}: {worst} where {allowed} is allowed"  # False for NaN as well


def assert_agrees(nodes: Nodes, expected: State, world: World, rejections: Rejections, within: float = 1e-6) -> None:
    """The server's tensors and sums, who was left out and why, and what every device keeps."""
    state, strategy = nodes.strategy.progress.state, nodes.strategy
    assert state.round_number == expected.round_number
    assert strategy.progress.rejections.counts == rejections.counts
    assert_same(state.full, expected.full, within)
    for name, moment in expected.moments.items():
        assert_same(state.moments[name], moment, within)
    names = [name for name in world.people.private if name in world.plan.architecture.own]
    remembered = world.plan.algorithm.remembered(world.plan)
    parts = partition(world.people.num_clients, len(nodes.grid.contexts))
    for number, users in enumerate(parts):
        kept = nodes.kept(number).said.own
        for name in [*names, *remembered]:
            rows = world.people.private[name]
            mine = rows[world.people.chosen(users)] if name in remembered else rows[users]
            found = kept.get(name, torch.zeros_like(mine))
            assert_same({name: found}, {name: mine}, 10 * within)
