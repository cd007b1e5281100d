"""Who is there, and who is drawn. A node is asked once what it can hold: when it is first drawn, or before a survey.

While it does not say, it is asked again ever more rarely; one that has failed is asked anew, since what it can hold may
have changed. A round costs what its own nodes do: who is connected is looked up no more often than takes a tenth of
the time, and nothing else here looks at everybody.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

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
from fairfold.protocol.sampling import sample_cohort
from fairfold.runs.nodes import JOINED, LEFT_OUT, Event
from fairfold.settings import Settings
from fairfold.settings.privacy import SecurePrivacy
from fairfold.subspace import Capacity

log = logging.getLogger("fairfold.flower")

LONGEST_CAPACITY = 32
LONGEST_MODEL = 256
LOOKING = 10  # looking who is connected takes one in so many seconds at the most
ATTEMPT = 1 << 32  # rounds are fewer: who is drawn when a round is tried again is drawn by another number
SILENT = "it does not say what it can hold"


@dataclass
class Node:
    """A node that takes part."""

    node_id: int  # Flower's
    capacity: Capacity  # what it said that it can hold
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
    spoken: dict[int, int] = field(default_factory=dict)  # by name, the size in which sums that remember hold a word
    usable: dict[int, Node] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    note: Callable[[Event], None] = lambda _event: None  # writes an event down
    _silent: dict[int, tuple[int, int]] = field(default_factory=dict)  # how often asked in vain, and when last
    _doubted: set[int] = field(default_factory=set)  # who has failed since they were asked
    _told: dict[int, Event] = field(default_factory=dict)  # what was written down of those that take part
    _names: dict[int, int] = field(default_factory=dict)  # the node that had a name last
    _connected: set[int] = field(default_factory=set)
    _stepped: dict[int, int] = field(default_factory=dict)  # sizes that are too thin to be hidden, and what they get
    _candidates: list[int] = field(default_factory=list)  # those connected that are not known to be of no use
    _looks: int = 0
    _look_again: float = -float("inf")

    def known(self, events: list[Event]) -> None:
        """Nodes that said what they can hold before the run was gone on with."""
        for event in events:
            if event["event"] == JOINED:
                node, capacity, name = event["node"], Capacity.parse(event["capacity"]), int(event["name"], 16)
                self.usable[node] = Node(node, capacity, name, number=event["number"])
                self._names[name], self._told[node] = node, event
            elif event["event"] == LEFT_OUT:
                self.usable.pop(event["node"], None)

    def everybody(self, grid: Grid) -> list[Node]:
        """The connected nodes that take part, in an order that does not depend on who came first."""
        self._look(grid)
        self._ask(grid, self._candidates)
        found = [self.usable[node] for node in self._candidates if node in self.usable]
        return sorted(found, key=lambda node: (node.number, node.node_id))

    def drawn(self, grid: Grid, number: int, attempt: int = 0, busy: Collection[int] = ()) -> list[Node]:
        """Those who take part in a round; only they are asked, where not all do.

        Who is ``busy`` with an order of an earlier round is one of them, and is not drawn.
        """
        wanted = self.settings.fleet.clients_per_round
        if wanted is None:
            found = [node for node in self.everybody(grid) if node.node_id not in busy]
            return [found[place] for place in self._places(len(found), len(found), number, attempt)]
        self._look(grid)
        places = self._places(len(self._candidates), wanted + len(busy), number, attempt)
        chosen = [node for node in (self._candidates[place] for place in places) if node not in busy]
        chosen = chosen[: max(wanted - len(busy), 0)]
        self._ask(grid, chosen)
        return [self.usable[node] for node in chosen if node in self.usable]

    def _places(self, many: int, wanted: int, number: int, attempt: int) -> list[int]:
        if not many:
            return []
        drawn: list[int] = sample_cohort(self.settings, many, number + attempt * ATTEMPT, min(wanted, many)).tolist()
        return drawn

    def wait(self, look: Callable[[], list[Node]], wanted: int, patience: float) -> list[Node]:
        """Look for nodes until so many are there, or those that came within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        found = look()
        while self._there(found) < wanted and time.monotonic() < deadline:
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0.0)))
            found = look()
        if self._there(found) < wanted:
            there = self._there(found)
            log.warning("only %d of %d nodes came within %.0f s: going on with them", there, wanted, patience)
        return found

    def _there(self, found: list[Node]) -> int:
        """How many may take part: those that were asked, or all where only those who are drawn are asked."""
        return len(found) if self.settings.fleet.clients_per_round is None or not found else len(self._candidates)

    def speaks(self, node: Node) -> bool:
        """Whether it can change what sums that remember hold of it: in the size in which it was said."""
        return self.spoken.get(node.name, node.group) == node.group

    def doubt(self, node: int) -> None:
        """A node has failed: what it can hold may be something else by now."""
        self._doubted.add(node)

    def _look(self, grid: Grid) -> None:
        began = time.monotonic()
        if began < self._look_again:
            return
        self._looks += 1
        self._connected = set(grid.get_node_ids())
        later = {node for node in self._silent if not self._is_due(node)}
        self._candidates = list(self._connected - self.left_out.keys() - later)
        if all(node in self.usable for node in self._candidates):  # the places that a simulation gives them
            self._candidates.sort(key=lambda node: (self.usable[node].number, node))
        else:
            self._candidates.sort()
        ended = time.monotonic()
        self._look_again = ended + (LOOKING - 1) * (ended - began)

    def _is_due(self, node: int) -> bool:
        times, asked = self._silent.get(node, (0, 0))
        return times == 0 or self._looks - asked >= 2 ** min(times, 6)

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        unknown = (node for node in nodes if node not in self.usable or node in self._doubted)
        asked = {node for node in unknown if node not in self.left_out and self._is_due(node)}
        if not asked:
            return
        record = RecordDict({FACTS: ConfigRecord({"version": VERSION})})
        for node, content in ask_all(grid, sorted(asked), CAPACITY, record, self.settings.fleet.network.ask_timeout):
            asked.discard(node)
            self._doubted.discard(node)
            self._note(node, content)
        for node in asked:
            self._later(node, SILENT)

    def _later(self, node: int, reason: str) -> None:
        """A node is of no use now, and is asked again some time."""
        self.usable.pop(node, None)
        self._told.pop(node, None)
        times = self._silent.get(node, (0, 0))[0]
        self._silent[node] = (times + 1, self._looks)
        if times == 0:
            self.note({"event": LEFT_OUT, "node": node, "reason": reason})

    def _note(self, node: int, content: RecordDict) -> None:
        try:
            facts = facts_in(content)
            capacity = Capacity.parse(text_in(facts, "capacity", LONGEST_CAPACITY))
            model = text_in(facts, "model", LONGEST_MODEL) if "model" in facts else None
            name, number = word_in(facts, "name"), number_in(facts, "number", 2**31 - 1, -1)
        except FairfoldError as error:
            self._leave_out(node, error.given)
            return
        other = self._names.get(name, node)
        if not trains(model, self.settings):
            mine = "fairfold's own models" if model is None else ascii(model)
            self._leave_out(node, f"it trains {mine}, and this run is of {self.settings.model.kind!r}")
        elif other != node and other in self._connected and other in self.usable:
            # Two at a time cannot both be it; its own old connection may not have ended yet.
            self._later(node, "another node that is connected has its name")
            log.warning("node %d waits: another node that is connected has its name", node)
        else:
            self._silent.pop(node, None)
            self._names[name] = node
            before = self.usable.get(node, Node(node, capacity))
            self.usable[node] = replace(before, capacity=capacity, name=name, number=number)
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
            self._leave_out(node.node_id, f"it can hold {node.capacity}, which is less than any size of {method}")
            return
        before, held = self.spoken.get(node.name, group), self.plan.assignments(0)
        # Who can hold more by now goes on as it spoke; who can hold less is served, and its word stays as it is.
        node.group = before if held[before].bytes() <= held[group].bytes() else group
        group = node.group
        size = self.plan.capacities[group]
        event: Event = {
            "event": JOINED, "node": node.node_id, "name": f"{node.name:x}", "capacity": str(node.capacity),
            "size": str(size), "number": node.number,
        }  # fmt: skip
        if self._told.get(node.node_id) != event:
            self._told[node.node_id] = event
            log.info("node %d joins: it can hold %s and gets the size of %s", node.node_id, node.capacity, size)
            self.note(event)

    def _leave_out(self, node: int, reason: str) -> None:
        self.usable.pop(node, None)
        self._told.pop(node, None)
        self.left_out[node] = reason[:200]
        log.warning("node %d left out: %s", node, self.left_out[node])
        self.note({"event": LEFT_OUT, "node": node, "reason": self.left_out[node]})
