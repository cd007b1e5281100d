"""Secure aggregation over a network: its phases around the masked vectors, and the aggregates that come of them.

Two phases come before the request (keys, shares), two after the vectors (signatures of the survivors, shares that
unmask); a client without a valid reply in a phase has dropped out. Nothing here knows what is summed: an encoding does.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from flwr.app import RecordDict
from flwr.serverapp import Grid

from fairfold.config import Settings
from fairfold.config.fleet import FEWEST_GROUPS, DifferentialPrivacy, SecurePrivacy
from fairfold.errors import AggregationFailed, FairfoldError, InvalidMessage, InvalidState
from fairfold.federation.bounds import checked_statistics
from fairfold.federation.noise import noise_headroom, noise_multiplier
from fairfold.federation.robust import combined_statistics
from fairfold.federation.updates import Update
from fairfold.flower.grid import ask_each
from fairfold.flower.messages import masked_in, pack_secure, secure_in, with_facts
from fairfold.flower.nodes import Node
from fairfold.flower.protocol import KEYS, REVEAL, SECURE, SHARES, SIGN, STATISTICS
from fairfold.flower.roster import Roster
from fairfold.flower.wire import pack_statistics_request, statistics_lengths
from fairfold.privacy.fixed_point import Encoding, MeasuredUpdate, VectorLayout
from fairfold.privacy.ledger import STATISTICS_PURPOSE
from fairfold.privacy.secure.messages import NO_LOG, Session
from fairfold.privacy.secure.segments import MIN_STAYING_PERCENT, SegmentLayout
from fairfold.privacy.secure.server import SecureServer

log = logging.getLogger("fairfold.flower")

PHASE_TIMEOUT = 120.0  # seconds for a phase in which nothing is computed, at most
CLIENT_STEPS, ITEM_STEPS = 16, 4_096  # steps of the fixed-point encoding in 1, for statistics of a client and by item
_last_sequence_number = 0


def new_sequence_number() -> int:
    """Return a number above all before, also of a server that was killed: milliseconds by its clock."""
    global _last_sequence_number
    _last_sequence_number = max(_last_sequence_number + 1, time.time_ns() // 1_000_000)
    return _last_sequence_number


@dataclass
class SecureRound:
    """One secure aggregation among some nodes: of a whole cohort, or of one group of it."""

    grid: Grid
    timeout: float  # of a phase
    settings: Settings
    encoding: Callable[[int], Encoding]  # by the number of clients
    sizes: Mapping[int, int]  # by client id, as the encoding has them
    nodes: dict[int, Node]  # by client id
    group: int = 0
    roster: Roster | None = None  # of enrolled devices, where there is one
    survivors: list[Node] = field(default_factory=list)  # nodes whose vectors are in the aggregate, once it is known
    asked: bool = False  # whether vectors were asked for: with noise, clients have spent privacy budget then
    failure: str = ""  # why there is no aggregate

    def invite(self, run: int, number: int, purpose: str) -> dict[int, bytes]:
        """Open a session; return the message of its first phase to each node."""
        privacy = self.settings.privacy
        assert isinstance(privacy, SecurePrivacy)
        layout = self.encoding(2).layout
        noise = (0, 0.0)
        if isinstance(privacy, DifferentialPrivacy):
            names = {name for shapes in layout.shapes.values() for name in shapes}
            noise = (MIN_STAYING_PERCENT, noise_multiplier(self.settings, names))
        sequence_number = new_sequence_number()
        indices = {size: index for index, size in enumerate(sorted(layout.shapes))}
        wanted = {client: indices[self.sizes[client]] for client in self.nodes}
        log, enrolled = NO_LOG, None
        if self.roster is not None and self.roster.entries():
            # The keys before the head: a log that grows meanwhile has all of them.
            found = {client: self.roster.of_node(node.node_id) for client, node in self.nodes.items()}
            enrolled = {client: one.key for client, one in found.items() if one is not None}
            log = self.roster.head()
        terms = secure_layout(layout), *noise, sequence_number, log
        session = Session(run, number, purpose, privacy.min_cohort, *terms)
        self.server = SecureServer(session, wanted, room=None, enrolled=enrolled)
        return self._by_node_id(dict.fromkeys(self.nodes, session.packed(session.digest)))

    def close(self) -> dict[int, bytes]:
        """End a phase; return the messages of the next one, none where too few nodes are left."""
        if self.failure:
            return {}
        try:
            return self._by_node_id(self.server.close())
        except AggregationFailed as error:
            session = self.server.session
            self._fail(error, "after the vectors" if self.asked else f"{session.purpose} {session.round}")
            return {}

    def _fail(self, error: AggregationFailed, what: str) -> None:
        log.warning("%s: no secure sum: %s", what, error)
        self.failure = f"{error.given}; needed: {error.needed}"

    def _by_node_id(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        return {self.nodes[client].node_id: message for client, message in messages.items()}

    def finish(self) -> dict[int, MeasuredUpdate]:
        """The aggregate of the survivors, by size, once all phases have ended; empty where too few are left."""
        if self.failure:
            return {}
        try:
            totals = self.server.sums
        except AggregationFailed as error:
            self._fail(error, "after the vectors")
            return {}
        self.survivors = [self.nodes[client] for client in self.server.survivors]
        encoding = self.encoding(len(self.server.cohort.members))
        segments = zip(encoding.layout.segments, totals, strict=True)
        return encoding.decode({segment: total for segment, total in segments if len(total)})

    def require_budget_unspent(self, what: str) -> None:
        """End the run where clients have spent privacy budget on a lost aggregate: none of them sends it twice."""
        if self.failure and self.asked and isinstance(self.settings.privacy, DifferentialPrivacy):
            remedy = "Devices have paid for it: they take part in another run if their owners allow more."
            raise InvalidState(f"{what}, whose noisy sum is lost ({self.failure})", "devices that stay", remedy)


@dataclass
class SecureRounds:
    """The secure aggregations of the groups of a cohort: their phases go side by side."""

    groups: list[SecureRound]
    timeout: float  # of a phase

    @classmethod
    def of(
        cls,
        grid: Grid,
        timeout: float,
        settings: Settings,
        encoding: Callable[[int], Encoding],
        sizes: Mapping[int, int],
        nodes: Iterable[Node],
        roster: Roster | None,
        *,
        together: bool = False,
    ) -> "SecureRounds":
        """One aggregation for each group of some nodes, or one for all; ``sizes`` by client id."""
        groups = dict[int, dict[int, Node]]()
        for node in nodes:
            groups.setdefault(0 if together else node.group, {})[node.client_id] = node
        of_all = grid, timeout, settings, encoding, sizes
        return cls([SecureRound(*of_all, groups[one], one, roster) for one in sorted(groups)], timeout)

    def begin(self, run: int, number: int, purpose: str) -> dict[int, bytes]:
        """Agree on keys and shares; return the message that goes with the request to each remaining node."""
        invitations = dict[int, bytes]()
        for group in self.groups:
            invitations |= group.invite(run, number, purpose)
        messages = self._run_phases((KEYS, SHARES), invitations)
        for group in self.groups:
            group.asked = not group.failure
        return messages

    def _run_phases(self, kinds: Sequence[str], messages: dict[int, bytes]) -> dict[int, bytes]:
        """Send nodes their messages of each phase and receive theirs; return those of the phase after."""
        places = {node.node_id: (group, client) for group in self.groups for client, node in group.nodes.items()}
        for kind in kinds:
            records = {node: pack_secure(message) for node, message in messages.items()}
            replies = ask_each(self.groups[0].grid, records, kind, min(self.timeout, PHASE_TIMEOUT)) if records else ()
            for node, content in replies:
                group, client = places[node]
                try:
                    group.server.receive(client, secure_in(content))
                except FairfoldError as error:
                    log.warning("node %d left out of a secure sum: %s", node, error.given)
            messages = self._close()
        return messages

    def _close(self) -> dict[int, bytes]:
        return {node: message for group in self.groups for node, message in group.close().items()}

    def receive(self, node: Node, content: RecordDict) -> int:
        """Receive a masked vector, or refuse it; return its bytes."""
        message = masked_in(content)
        group = next(group for group in self.groups if node.client_id in group.nodes)
        group.server.receive(node.client_id, message)
        return len(message)

    def finish(self) -> list[tuple[SecureRound, dict[int, MeasuredUpdate]]]:
        """Unmask the aggregates of all groups; empty where too few are left."""
        self._run_phases((SIGN, REVEAL), self._close())
        return [(group, group.finish()) for group in self.groups]

    @property
    def survivors(self) -> list[Node]:
        """The nodes whose vectors are in an aggregate."""
        return [node for group in self.groups for node in group.survivors]


def secure_statistics(
    grid: Grid,
    settings: Settings,
    num_items: int,
    window: range,
    nodes: list[Node],
    run: int,
    timeout: float,
    users_of: Callable[[Node], int],
    roster: Roster | None,
) -> tuple[list[Update], str]:
    """Aggregate the statistics of a window before the first round; where that fails, nothing, and why.

    It fails where the users of these nodes cannot have such statistics; noise may exceed what they have. Of several
    groups those that cannot are left out.
    """
    by_node_id = {node.node_id: node for node in nodes}
    encoding = partial(statistics_encoding, settings, window)
    sizes = dict.fromkeys((node.client_id for node in nodes), 0)
    aggregation = SecureRounds.of(grid, timeout, settings, encoding, sizes, nodes, roster)
    request = pack_statistics_request(settings, num_items, window)
    messages = aggregation.begin(run, window.start, STATISTICS_PURPOSE)
    records = {node: with_facts(request, **{SECURE: message}) for node, message in messages.items()}
    for node, content in ask_each(grid, records, STATISTICS, timeout):
        try:
            aggregation.receive(by_node_id[node], content)
        except FairfoldError as error:
            log.warning("node %d left out of the statistics: %s", node, error.given)
    checked, failure = list[Update](), ""
    for group, aggregates in aggregation.finish():
        group.require_budget_unspent("the statistics before the first round")
        failure = failure or group.failure
        users = sum(map(users_of, group.survivors))
        try:
            for aggregate in aggregates.values():
                noisy = isinstance(settings.privacy, DifferentialPrivacy)
                update = aggregate.update
                checked.append(update if noisy else _checked_statistics(settings, update, num_items, users))
        except InvalidMessage as error:
            failure = f"{error.given} in a secure sum, and under masks nobody can be named"
            log.warning("statistics: %s", failure)
    if settings.fleet.secure_groups > 1 and len(checked) < FEWEST_GROUPS:
        return [], failure or f"{len(checked)} groups of devices are too few to compare"
    return [combined_statistics(settings, checked)] if len(checked) > 1 else checked, failure


def _checked_statistics(settings: Settings, update: Update, num_items: int, users: int) -> Update:
    if not 0 < update.weight <= users:
        raise InvalidMessage("a number of users out of range", f"at most {users}", "It is summed again.")
    return checked_statistics(settings, update, num_items)


# -- encodings that both sides derive ----------------------------------------------------------------------------------


def secure_layout(layout: VectorLayout) -> SegmentLayout:
    """Return the layout of a secure aggregation; its sizes are those of ``layout``, in their order."""
    segments = layout.segments
    sizes = (tuple(n for n, segment in enumerate(segments) if size in segment.owners) for size in sorted(layout.shapes))
    return SegmentLayout(tuple(len(segment) for segment in segments), tuple(sizes))


def quality_encoding(num_clients: int) -> Encoding:
    """Return the encoding of the qualities that clients measure, in one sum."""
    return Encoding(VectorLayout({0: {}}), 1.0, num_clients)


def quality_update(quality: tuple[float, int] | None) -> MeasuredUpdate:
    """Return the quality that a client measured, if any, as an additive update."""
    total, users = quality or (0.0, 0)
    return MeasuredUpdate(Update({}, 0.0), total, float(users))


def statistics_encoding(settings: Settings, window: range, num_clients: int) -> Encoding:
    """Return the encoding of clients' statistics of a window, in one sum."""
    statistics = settings.algorithm.statistics(settings)
    steps = {name: one.steps or (ITEM_STEPS if one.per_item else CLIENT_STEPS) for name, one in statistics.items()}
    layout = VectorLayout({0: statistics_lengths(settings, window)})
    return Encoding(layout, 1.0, num_clients, steps, noise_headroom(settings, steps, num_clients))
