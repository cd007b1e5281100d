"""Who is there: every node is asked once what it can hold, and asked again, ever more rarely, while it does not say."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fairfold.errors import FairfoldError
from fairfold.flower.protocol import CAPACITY, FACTS, VERSION
from fairfold.flower.vectors import facts_in, word_in
from fairfold.protocol.plan import Plan
from fairfold.settings import Settings
from fairfold.subspace import Capacity

log = logging.getLogger("fairfold.flower")

LONGEST_CAPACITY = 32
LONGEST_MODEL = 256


@dataclass
class Node:
    """A node that takes part.

    Attributes:
        node_id: Flower's.
        capacity: What it said it can hold.
        name: Its own, which outlives this network.
        group: Which size of the plan that is; -1 before there is one.
        number: Its place in a simulation, or -1.
        rounds: In how many rounds its answer counted.
        bytes_down: Sent to it, tensors alone.
        bytes_up: Received from it.
        first_quality: Of the first model it was asked about: the sum over its users, and their number.
        last_quality: Of the last.
    """

    node_id: int
    capacity: Capacity
    name: int = 0
    group: int = -1
    number: int = -1
    rounds: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    first_quality: tuple[float, int] | None = None
    last_quality: tuple[float, int] | None = None

    def heard(self, quality: tuple[float, int] | None) -> None:
        """Note how well a model served this node's users."""
        if quality is not None:
            self.first_quality = self.first_quality or quality
            self.last_quality = quality


@dataclass
class Nodes:
    """All nodes that were ever asked.

    Attributes:
        settings: Of the run.
        plan: The sizes to choose from; None until devices have been surveyed, where a plan needs that.
        timeout: Seconds to wait for a capacity.
        usable: Those that take part when they are connected.
        left_out: Why others do not.
    """

    settings: Settings
    plan: Plan | None = None
    timeout: float = 60.0
    usable: dict[int, Node] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    _silent: dict[int, tuple[int, int]] = field(default_factory=dict)
    _connected: set[int] = field(default_factory=set)
    _asked: int = 0

    def present(self, grid: Grid) -> list[Node]:
        """The connected nodes that take part, in an order that does not depend on who came first."""
        connected = list(grid.get_node_ids())
        self._asked += 1
        self._connected = set(connected)
        unknown = [node for node in connected if self._is_due(node)]
        if unknown:
            self._ask(unknown, grid)
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

    def _ask(self, unknown: list[int], grid: Grid) -> None:
        content = {FACTS: ConfigRecord({"version": VERSION})}
        messages = [
            Message(RecordDict(dict(content)), dst_node_id=node, message_type=CAPACITY, ttl=self.timeout)
            for node in unknown
        ]
        waiting = set(unknown)
        replies: Iterable[Message] = grid.send_and_receive(messages, timeout=self.timeout)
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        for reply in replies:
            node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if node not in waiting:
                continue
            if reply.has_error():
                continue  # it may have been busy: asked again later
            waiting.discard(node)
            self._note(node, reply)
        for node in waiting:
            self._ask_later(node)
            log.warning("node %d did not say what it can hold: asked again later", node)

    def _ask_later(self, node: int) -> None:
        self._silent[node] = (self._silent.get(node, (0, 0))[0] + 1, self._asked)

    def _note(self, node: int, reply: Message) -> None:
        try:
            facts = facts_in(reply.content)
            text, number = facts.get("capacity"), facts.get("number")
            if not isinstance(text, str) or len(text) > LONGEST_CAPACITY:
                raise ValueError
            if type(number) is not int or not -1 <= number < 2**31:
                raise ValueError
            model = facts.get("model")
            if model is not None and (not isinstance(model, str) or len(model) > LONGEST_MODEL):
                raise ValueError
            capacity, name = Capacity.parse(text), word_in(facts, "name")
        except FairfoldError as error:
            self._leave_out(node, error.given)
            return
        except ValueError:
            self._leave_out(node, "it did not say what it can hold")
            return
        if not trains(model, self.settings):
            mine = "fairfold's own models" if model is None else ascii(model)
            self._leave_out(node, f"it trains {mine}, and this run is of {self.settings.model.kind!r}")
            return
        twins = [of for of in self.usable.values() if of.name == name and of.node_id in self._connected]
        if twins:  # two at a time cannot both be it; its own old connection may not have ended yet
            self._ask_later(node)
            log.warning("node %d waits: another node that is connected has its name", node)
            return
        self._silent.pop(node, None)
        self.usable[node] = Node(node, capacity, name, number=number)
        if self.plan is not None:
            self._size(self.usable[node])

    def settle(self, plan: Plan) -> None:
        """There is a plan: everybody gets a size, or is left out."""
        self.plan = plan
        for node in list(self.usable.values()):
            self._size(node)

    def _size(self, node: Node) -> None:
        assert self.plan is not None
        group = self.plan.size_for(node.capacity)
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


def trains(model: str | None, settings: Settings) -> bool:
    """Whether a device that was given this model takes part in such a run; without one it trains any of fairfold's."""
    return settings.model.kind == model if model is not None else not settings.model.own
