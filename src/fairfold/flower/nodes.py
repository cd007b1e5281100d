"""Nodes that take part, their capacities and sizes, and the sampling of cohorts.

A node is asked for its capacity when it is first drawn, or before the statistics; again, ever more rarely, if it does
not reply; and anew if it has failed, since its capacity may have changed. A round costs what its own nodes do:
connected nodes are looked up for at most a tenth of the time, and nothing else here loops over all.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid

from fairfold.config import Settings
from fairfold.config.fleet import SecurePrivacy
from fairfold.device.facts import id_in, number_in, text_in
from fairfold.errors import FairfoldError
from fairfold.federation.aggregation import merge_small_groups, merged_groups_notes
from fairfold.federation.algorithm import Tunable
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import panel, sample_cohort
from fairfold.flower.grid import ask_all
from fairfold.flower.messages import facts_in, make_facts
from fairfold.flower.protocol import CAPACITY, FACTS
from fairfold.flower.roster import Roster
from fairfold.flower.wire import can_train
from fairfold.runs.events import JOINED, LEFT_OUT, Event
from fairfold.subspace import Capacity

log = logging.getLogger("fairfold.flower")

MAX_CAPACITY_TEXT, MAX_MODEL_TEXT = 32, 256
LOOKUP_SHARE = 10  # one in so many seconds is spent on looking up connected nodes, at most
ATTEMPT = 1 << 32  # more than all rounds: another attempt at a round draws by another number
NO_CAPACITY = "it does not report its capacity"
SAME_ID = "another connected node has its client id"
OTHER_NAME = "its name is not that of its enrolled key"
NOT_ENROLLED = "its key is not in the roster, and devices take part in secure sums of those that are in it"


@dataclass
class Node:
    """A node that takes part."""

    node_id: int  # Flower's
    capacity: Capacity  # as it reported
    client_id: int = 0  # its own, which outlives this network
    size: int = -1  # index of its size in the plan; -1 before there is a plan
    partition_id: int = -1  # its place in a simulation, or -1
    rounds: int = 0  # in which its update was used
    group: int = 0  # whose updates are summed together under masks
    max_users: int = 0  # the most users that it may act for, by its invitation; 0 where there is no roster

    @property
    def hash_id(self) -> int:
        """The number by which its own hash is drawn, where every client has one."""
        return self.partition_id if self.partition_id >= 0 else self.node_id % 2**20


@dataclass
class Nodes:
    """All nodes that were ever asked for their capacity: those that take part, and why others do not."""

    settings: Settings
    plan: Plan | None = None  # None until the statistics are known
    acknowledged_sizes: dict[int, int] = field(default_factory=dict)  # by client id, where sums remember updates
    usable: dict[int, Node] = field(default_factory=dict)  # they take part when they are connected
    left_out: dict[int, str] = field(default_factory=dict)  # they never do, and why
    note: Callable[[Event], None] = lambda _event: None  # called with every event of a node
    roster: Roster | None = None  # of enrolled devices, where there is one
    secret: int = 0  # of the run, by which panels and groups of enrolled devices are drawn
    groups: dict[int, int] = field(default_factory=dict)  # by identity, the group of a node for all of the run
    _unanswered: dict[int, tuple[int, int]] = field(default_factory=dict)  # number of attempts, and lookup of the last
    _failed: set[int] = field(default_factory=set)  # since they were asked for their capacity
    _noted: dict[int, Event] = field(default_factory=dict)  # the last event of each usable node
    _node_of: dict[int, int] = field(default_factory=dict)  # the last node of each client id
    _connected: set[int] = field(default_factory=set)
    _merged_sizes: dict[int, int] = field(default_factory=dict)  # the size that clients of a size too small get
    _candidates: list[int] = field(default_factory=list)  # connected, and usable as far as is known
    _lookups: int = 0
    _next_lookup: float = -float("inf")

    def restore(self, events: list[Event]) -> None:
        """Restore the nodes of a run that is resumed from its events."""
        for event in events:
            if event["event"] == JOINED:
                node = event["node"]
                client_id = int(event["name"], 16)
                capacity = Capacity.parse(event["capacity"])
                users = self._users_of(node)
                self.usable[node] = Node(node, capacity, client_id, partition_id=event["number"], max_users=users)
                self._node_of[client_id] = node
                self._noted[node] = event
            elif event["event"] == LEFT_OUT:
                self.usable.pop(event["node"], None)

    def connected(self, grid: Grid) -> list[Node]:
        """Return the connected nodes that take part, in an order that does not depend on who came first."""
        self._look_up(grid)
        self._ask_capacities(grid, self._candidates)
        nodes = self._with_groups([self.usable[node] for node in self._candidates if node in self.usable])
        return sorted(nodes, key=lambda node: (node.partition_id, node.node_id))

    def sample(self, grid: Grid, number: int, attempt: int = 0, busy: Collection[int] = ()) -> list[Node]:
        """Draw the cohort of a round, to which ``busy`` nodes count; only those drawn are asked for their capacity."""
        cohort = self.settings.fleet.clients_per_round
        if cohort is None:
            nodes = [node for node in self.connected(grid) if node.node_id not in busy]
            share = 1.0 if self.plan is None else Tunable.of(self.plan.algorithm).participating_share(self.plan, number)
            if share < 1:
                nodes = [nodes[place] for place in panel(self._panel_numbers(nodes), share).tolist()]
            return [nodes[place] for place in self._draw_places(len(nodes), len(nodes), number, attempt)]
        self._look_up(grid)
        places = self._draw_places(len(self._candidates), cohort + len(busy), number, attempt)
        free = [self._candidates[place] for place in places if self._candidates[place] not in busy]
        drawn = free[: max(cohort - len(busy), 0)]
        self._ask_capacities(grid, drawn)
        return self._with_groups([self.usable[node] for node in drawn if node in self.usable])

    def _with_groups(self, nodes: list[Node]) -> list[Node]:
        """Give each node without a group the smallest one, so that groups are alike; nobody can choose or know it."""
        number = self.settings.fleet.secure_groups
        if number > 1:
            sizes = [0] * number
            for group in self.groups.values():
                sizes[group] += 1
            new = [one for one in nodes if self.identity(one) not in self.groups]
            ordered = sorted(zip(self._secret_numbers(new), new, strict=True), key=lambda one: one[0])
            for _, node in sorted(ordered, key=lambda one: (one[1].max_users, str(one[1].capacity))):
                group = min(range(number), key=sizes.__getitem__)
                self.groups[self.identity(node)] = group
                sizes[group] += 1
            for node in nodes:
                node.group = self.groups[self.identity(node)]
        return nodes

    def _panel_numbers(self, nodes: list[Node]) -> torch.Tensor:
        """Numbers by which a panel is drawn: places of a simulation; of a fleet what no device can choose or know."""
        if self.roster is None:
            return torch.tensor([one.partition_id for one in nodes])
        return torch.tensor(self._secret_numbers(nodes))

    def _secret_numbers(self, nodes: list[Node]) -> list[int]:
        salted = [f"{self.secret} {self.identity(one)}".encode() for one in nodes]
        return [int.from_bytes(hashlib.sha256(text).digest()[:4], "big") for text in salted]

    def identity(self, node: Node) -> int:
        """A number that a node cannot change: its name if that is its key's, else one that follows from its node."""
        enrolled = self.roster is None or self.roster.of_node(node.node_id) is not None
        return node.client_id if enrolled else -1 - node.node_id % (2**63 - 1)

    def _draw_places(self, num_nodes: int, cohort: int, number: int, attempt: int) -> list[int]:
        if not num_nodes:
            return []
        drawn = sample_cohort(self.settings, num_nodes, number + attempt * ATTEMPT, min(cohort, num_nodes))
        return list(drawn.tolist())

    def wait(self, look: Callable[[], list[Node]], min_nodes: int, wait_timeout: float) -> list[Node]:
        """Call ``look`` until there are ``min_nodes``, or ``wait_timeout`` seconds have passed."""
        deadline = time.monotonic() + wait_timeout
        while self._num_present(nodes := look()) < min_nodes and time.monotonic() < deadline:
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0.0)))
        present = self._num_present(nodes)
        if present < min_nodes:
            log.warning("only %d of %d nodes came within %.0f s: going on with them", present, min_nodes, wait_timeout)
        return nodes

    def _num_present(self, nodes: list[Node]) -> int:
        """Count the nodes that may take part: those asked, or all candidates where only a cohort is asked."""
        return len(nodes) if self.settings.fleet.clients_per_round is None or not nodes else len(self._candidates)

    def can_update(self, node: Node) -> bool:
        """Return whether a node can change its acknowledged update: only in the size in which that was sent."""
        return self.acknowledged_sizes.get(node.client_id, node.size) == node.size

    def mark_failed(self, node: int) -> None:
        """Ask a node that has failed for its capacity again, which may have changed."""
        self._failed.add(node)

    def _look_up(self, grid: Grid) -> None:
        """Look up which nodes are connected, unless that was done a moment ago."""
        began = time.monotonic()
        if began < self._next_lookup:
            return
        self._lookups += 1
        self._connected = set(grid.get_node_ids())
        not_due = {node for node in self._unanswered if not self._is_due(node)}
        self._candidates = sorted(self._connected - self.left_out.keys() - not_due)
        if self.usable.keys() >= set(self._candidates):  # in the order of a simulation
            self._candidates.sort(key=lambda node: self.usable[node].partition_id)
        ended = time.monotonic()
        self._next_lookup = ended + (LOOKUP_SHARE - 1) * (ended - began)

    def _is_due(self, node: int) -> bool:
        attempts, last = self._unanswered.get(node, (0, 0))
        return attempts == 0 or self._lookups - last >= 2 ** min(attempts, 6)

    def _ask_capacities(self, grid: Grid, nodes: list[int]) -> None:
        unknown = (node for node in nodes if node not in self.usable or node in self._failed)
        asked = {node for node in unknown if node not in self.left_out and self._is_due(node)}
        if not asked:
            return
        request = RecordDict({FACTS: make_facts()})
        for node, content in ask_all(grid, sorted(asked), CAPACITY, request, self.settings.fleet.network.join_timeout):
            asked.discard(node)
            self._failed.discard(node)
            self._add_node(node, content)
        for node in asked:
            self._postpone(node, NO_CAPACITY)

    def _add_node(self, node: int, content: RecordDict) -> None:
        try:
            facts = facts_in(content)
            capacity = Capacity.parse(text_in(facts, "capacity", MAX_CAPACITY_TEXT))
            model = text_in(facts, "model", MAX_MODEL_TEXT) if "model" in facts else None
            client_id = id_in(facts, "name")
            # A place of a simulation; in a fleet a device could choose by it whether it is drawn
            partition_id = number_in(facts, "number", 2**31 - 1, -1) if self.roster is None else -1
        except FairfoldError as error:
            self.leave_out(node, error.given)
            return
        other = self._node_of.get(client_id, node)
        if self.roster is not None and not self.roster.allows(node, client_id):
            self.leave_out(node, OTHER_NAME)
        elif self.settings.privacy.uses_secure_aggregation and not self._may_sum(node):
            self.leave_out(node, NOT_ENROLLED)
        elif not can_train(model, self.settings):
            trained = "fairfold's own models" if model is None else ascii(model)
            self.leave_out(node, f"it trains {trained}, and this run is of {self.settings.model.kind!r}")
        elif other != node and other in self._connected and other in self.usable:
            # Not both can be that client; its own old connection may not have ended yet.
            self._postpone(node, SAME_ID)
            log.warning("node %d waits: %s", node, SAME_ID)
        else:
            self._unanswered.pop(node, None)
            self._node_of[client_id] = node
            before = self.usable.get(node, Node(node, capacity))
            before = replace(before, capacity=capacity, max_users=self._users_of(node))
            self.usable[node] = replace(before, client_id=client_id, partition_id=partition_id)
            self._assign_size(self.usable[node])

    def _users_of(self, node: int) -> int:
        return 0 if self.roster is None else self.roster.users_of(node)

    def _may_sum(self, node: int) -> bool:
        """Whether enrolled devices accept a node in their sums."""
        return self.roster is None or not self.roster.entries() or self.roster.of_node(node) is not None

    def _postpone(self, node: int, reason: str) -> None:
        """Leave a node out for now; it is asked again later."""
        attempts, _ = self._unanswered.get(node, (0, 0))
        self._unanswered[node] = (attempts + 1, self._lookups)
        self._remove_node(node, reason, note=attempts == 0)

    def leave_out(self, node: int, reason: str) -> None:
        """Leave a node out for the rest of the run."""
        reason = self.left_out[node] = reason[:200]
        log.warning("node %d left out: %s", node, reason)
        self._remove_node(node, reason)

    def _remove_node(self, node: int, reason: str, *, note: bool = True) -> None:
        self.usable.pop(node, None)
        self._noted.pop(node, None)
        if note:
            self.note({"event": LEFT_OUT, "node": node, "reason": reason})

    def set_plan(self, plan: Plan) -> None:
        """Give every node its size of a plan; leave out those that can hold none."""
        self.plan = plan
        for node in list(self.usable.values()):
            self._assign_size(node)

    def merge_small_sizes(self, present: list[Node]) -> None:
        """Merge sizes with too few nodes for secure aggregation into the next smaller size, from now on."""
        # Decided once, by the expected number in a cohort: clients with an acknowledged update stay in their size.
        plan, privacy = self.plan, self.settings.privacy
        if not isinstance(privacy, SecurePrivacy) or self._merged_sizes or plan is None or not present:
            return
        share_drawn = min(1.0, (self.settings.fleet.clients_per_round or len(present)) / len(present))
        num_bytes = [assignment.bytes() for assignment in plan.assignments(0)]
        order = sorted(range(len(num_bytes)), key=lambda size: -num_bytes[size])
        before = torch.tensor([node.size for node in present])
        after = merge_small_groups(before, order, privacy.fewest_clients(self.settings.fleet) / share_drawn)
        merged = dict(zip(before.tolist(), after.tolist(), strict=True))
        self._merged_sizes = {size: merged.get(size, size) for size in range(len(num_bytes))}
        for note in merged_groups_notes(before, after, [str(capacity) for capacity in plan.capacities]):
            log.warning("%s", note)
        for node in self.usable.values():
            node.size = self._merged_sizes[node.size]

    def _assign_size(self, node: Node) -> None:
        if self.plan is None:
            return
        size = self.plan.size_for(node.capacity)
        if size is None:
            method = self.settings.subspace.method
            self.leave_out(node.node_id, f"it can hold {node.capacity}, which is less than any size of {method}")
            return
        size = self._merged_sizes.get(size, size)
        acknowledged = self.acknowledged_sizes.get(node.client_id, size)
        held = self.plan.assignments(0)
        # With more capacity than at its last update a client keeps that size; with less it is served the smaller one.
        node.size = acknowledged if held[acknowledged].bytes() <= held[size].bytes() else size
        capacity = self.plan.capacities[node.size]
        event: Event = {"event": JOINED, "node": node.node_id, "name": f"{node.client_id:x}"}
        event |= {"capacity": str(node.capacity), "size": str(capacity), "number": node.partition_id}
        if self._noted.get(node.node_id) != event:
            self._noted[node.node_id] = event
            log.info("node %d joins: it can hold %s and gets the size of %s", node.node_id, node.capacity, capacity)
            self.note(event)
