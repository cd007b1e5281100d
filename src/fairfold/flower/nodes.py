"""Who is there: every node is asked once what it can hold, and asked again, ever more rarely, while it does not say."""

import logging
import time
from dataclasses import dataclass, field

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from fairfold.errors import FairfoldError
from fairfold.flower.exchange import ask_all
from fairfold.flower.facts import facts_in, number_in, text_in, word_in
from fairfold.flower.protocol import CAPACITY, FACTS, VERSION
from fairfold.flower.wire import trains
from fairfold.protocol.hearing import step_words, stepped_down
from fairfold.protocol.plan import Plan
from fairfold.settings import Settings
from fairfold.settings.parts import SecurePrivacy
from fairfold.subspace import Capacity

log = logging.getLogger("fairfold.flower")

LONGEST_CAPACITY = 32
LONGEST_MODEL = 256
PATIENCE = 60.0  # seconds to wait for a capacity


@dataclass
class Node:
    """A node that takes part."""

    node_id: int  # Flower's
    capacity: Capacity
    name: int = 0  # its own, which outlives this network
    group: int = -1  # its size of the plan; -1 before there is one
    number: int = -1  # its place in a simulation, or -1
    rounds: int = 0  # in which its answer counted
    bytes_down: int = 0  # tensors alone
    bytes_up: int = 0
    first_quality: tuple[float, int] | None = None  # the sum over its users, and their number
    last_quality: tuple[float, int] | None = None

    def heard(self, quality: tuple[float, int] | None) -> None:
        """Note how well a model served this node's users."""
        if quality is not None:
            self.first_quality = self.first_quality or quality
            self.last_quality = quality


@dataclass
class Nodes:
    """All nodes that were ever asked: those that take part when they are connected, and why others do not."""

    settings: Settings
    plan: Plan | None = None  # the sizes to choose from; None until devices have been surveyed
    usable: dict[int, Node] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    _silent: dict[int, tuple[int, int]] = field(default_factory=dict)  # how often asked in vain, and when last
    _connected: set[int] = field(default_factory=set)
    _stepped: dict[int, int] = field(default_factory=dict)  # sizes that are too thin to be hidden, and what they get
    _asked: int = 0

    def present(self, grid: Grid) -> list[Node]:
        """The connected nodes that take part, in an order that does not depend on who came first."""
        connected = list(grid.get_node_ids())
        self._asked += 1
        self._connected = set(connected)
        silent = {node for node in connected if self._is_due(node)}
        if silent:
            record = RecordDict({FACTS: ConfigRecord({"version": VERSION})})
            for node, content in ask_all(grid, sorted(silent), CAPACITY, record, PATIENCE):
                silent.discard(node)
                self._note(node, content)
        for node in silent:
            self._ask_later(node)
        found = [self.usable[node] for node in connected if node in self.usable]
        return sorted(found, key=lambda node: (node.number, node.node_id))

    def wait(self, grid: Grid, wanted: int, patience: float) -> list[Node]:
        """The same, once there are enough of them, or all that came within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        found = self.present(grid)
        while len(found) < wanted and time.monotonic() < deadline:
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0.0)))
            found = self.present(grid)
        if len(found) < wanted:
            log.warning("only %d of %d nodes came within %.0f s: going on with them", len(found), wanted, patience)
        return found

    def _is_due(self, node: int) -> bool:
        if node in self.usable or node in self.left_out:
            return False
        times, asked = self._silent.get(node, (0, 0))
        return times == 0 or self._asked - asked >= 2 ** min(times, 6)

    def _ask_later(self, node: int) -> None:
        self._silent[node] = (self._silent.get(node, (0, 0))[0] + 1, self._asked)

    def _note(self, node: int, content: RecordDict) -> None:
        try:
            facts = facts_in(content)
            capacity = Capacity.parse(text_in(facts, "capacity", LONGEST_CAPACITY))
            model = text_in(facts, "model", LONGEST_MODEL) if "model" in facts else None
            name, number = word_in(facts, "name"), number_in(facts, "number", 2**31 - 1, -1)
        except FairfoldError as error:
            self._leave_out(node, error.given)
            return
        if not trains(model, self.settings):
            mine = "fairfold's own models" if model is None else ascii(model)
            self._leave_out(node, f"it trains {mine}, and this run is of {self.settings.model.kind!r}")
        elif any(of.name == name and of.node_id in self._connected for of in self.usable.values()):
            # Two at a time cannot both be it; its own old connection may not have ended yet.
            self._ask_later(node)
            log.warning("node %d waits: another node that is connected has its name", node)
        else:
            self._silent.pop(node, None)
            self.usable[node] = Node(node, capacity, name, number=number)
            self._size(self.usable[node])

    def settle(self, plan: Plan) -> None:
        """There is a plan: everybody gets a size, or is left out."""
        self.plan = plan
        for node in list(self.usable.values()):
            self._size(node)

    def hide(self, present: list[Node]) -> None:
        """Sizes of which fewer are there than can be hidden in a sum hold what the next smaller one does, from now on.

        Decided once, by how many are drawn on the average: who speaks to sums that remember stays in a size.
        """
        chosen, plan = self.settings.privacy, self.plan
        if not isinstance(chosen, SecurePrivacy) or self._stepped or plan is None or not present:
            return
        drawn = min(1.0, (self.settings.fleet.clients_per_round or len(present)) / len(present))
        held = [one.bytes() for one in plan.assignments(0)]
        order = sorted(range(len(held)), key=lambda size: -held[size])
        before = torch.tensor([node.group for node in present])
        after = stepped_down(before, order, chosen.smallest_cohort / drawn)
        moved = dict(zip(before.tolist(), after.tolist(), strict=True))
        self._stepped = {size: moved.get(size, size) for size in range(len(held))}
        for sentence in step_words(before, after, [str(capacity) for capacity in plan.capacities]):
            log.warning("%s", sentence)
        for node in self.usable.values():
            node.group = self._stepped[node.group]

    def _size(self, node: Node) -> None:
        if self.plan is None:
            return
        group = self.plan.size_for(node.capacity)
        group = group if group is None else self._stepped.get(group, group)
        if group is None:
            method = self.settings.subspace.method
            del self.usable[node.node_id]
            self._leave_out(node.node_id, f"it can hold {node.capacity}, which is less than any size of {method}")
            return
        node.group = group
        size = self.plan.capacities[group]
        log.info("node %d joins: it can hold %s and gets the size of %s", node.node_id, node.capacity, size)

    def _leave_out(self, node: int, reason: str) -> None:
        self.left_out[node] = reason[:200]
        log.warning("node %d left out: %s", node, self.left_out[node])
