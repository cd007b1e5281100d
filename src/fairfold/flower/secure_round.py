"""A secure sum over a network: the phases around the vectors, and the sums that come of them.

Two phases before what is asked for goes out (keys, shares), two when the vectors are in (signatures of who survives,
shares that unmask). The server of :mod:`fairfold.secure` does the rest; whoever does not answer in a phase, or not
rightly, has left. Nothing here knows what is summed: an encoding says it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import RecordDict
from flwr.serverapp import Grid

from fairfold.errors import FairfoldError, InvalidState, SumLost
from fairfold.flower.exchange import ask_each
from fairfold.flower.nodes import Node
from fairfold.flower.protocol import KEYS, REVEAL, SHARES, SIGN, SURVEY
from fairfold.flower.secure_sums import segments_of, surveying
from fairfold.flower.secure_wire import masked_in, pack_secure, secure_in, with_secure
from fairfold.flower.wire import ask
from fairfold.privacy.encoding import Encoding, Heard
from fairfold.privacy.noise import STAYING
from fairfold.protocol.noising import sigma_of
from fairfold.protocol.words import Answer
from fairfold.secure.messages import Session
from fairfold.secure.server import Server
from fairfold.settings import Settings
from fairfold.settings.privacy import PrivatePrivacy, SecurePrivacy

log = logging.getLogger("fairfold.flower")

PATIENCE = 120.0  # seconds for a phase in which nothing is computed, at most
_turns = [0]


def new_turn() -> int:
    """Later than any before, also of a server that was killed: milliseconds by its clock."""
    _turns[0] = max(_turns[0] + 1, time.time_ns() // 1_000_000)
    return _turns[0]


@dataclass
class SecureRound:
    """One sum among some nodes.

    Attributes:
        grid: The way to them.
        timeout: Seconds that they have in a phase.
        settings: Of the run.
        encoding: How what is said becomes words, by the number of devices in the sum.
        sizes: The size of every node, as the encoding knows it.
        nodes: The nodes by their names.
        survivors: Those whose vectors are in the sum, once it is known.
        asked: Whether vectors were asked for: with noise, devices have paid then, whatever becomes of the sum.
        lost: Why there is no sum, where there is none.
    """

    grid: Grid
    timeout: float
    settings: Settings
    encoding: Callable[[int], Encoding]
    sizes: Mapping[int, int]
    nodes: dict[int, Node]
    survivors: list[Node] = field(default_factory=list)
    asked: bool = False
    lost: str = ""

    def begin(self, run: int, number: int, purpose: str) -> dict[int, bytes]:
        """Agree on keys and shares: what goes with the question to every node that is still there, by its id."""
        chosen = self.settings.privacy
        assert isinstance(chosen, SecurePrivacy)
        said = self.encoding(2).layout
        places = {size: place for place, size in enumerate(sorted(said.shapes))}
        noise = (0, 0.0)
        if isinstance(chosen, PrivatePrivacy):
            noise = (STAYING, sigma_of(self.settings, {name for of in said.shapes.values() for name in of}))
        session = Session(run, number, purpose, chosen.smallest_cohort, segments_of(said), *noise, new_turn())
        self.server = Server(session, {name: places[self.sizes[name]] for name in self.nodes}, room=None)
        invitation = session.packed(session.digest)
        try:
            told = self._by_id(self._ask(SHARES, self._ask(KEYS, dict.fromkeys(self.nodes, invitation))))
        except SumLost as error:
            log.warning("%s %d: no secure sum: %s", purpose, number, error)
            self.lost = f"{error.given}; needed: {error.needed}"
            return {}
        self.asked = True
        return told

    def _ask(self, kind: str, told: Mapping[int, bytes]) -> dict[int, bytes]:
        """One phase: tell devices something, hear them, and close it."""
        records = {node: pack_secure(message) for node, message in self._by_id(told).items()}
        names = {node.node_id: name for name, node in self.nodes.items()}
        for node, content in ask_each(self.grid, records, kind, min(self.timeout, PATIENCE)):
            try:
                self.server.hear(names[node], secure_in(content))
            except FairfoldError as error:
                log.warning("node %d left out of a secure sum: %s", node, error.given)
        return self.server.close()

    def _by_id(self, told: Mapping[int, bytes]) -> dict[int, bytes]:
        return {self.nodes[name].node_id: message for name, message in told.items()}

    def hear(self, node: Node, content: RecordDict) -> int:
        """Take a vector under its masks, and say how many bytes it has; refused if it is none."""
        message = masked_in(content)
        self.server.hear(node.name, message)
        return len(message)

    def finish(self) -> dict[int, Heard]:
        """What the survivors said together, by size; nothing where too few are left."""
        if self.lost:
            return {}
        try:
            self._ask(REVEAL, self._ask(SIGN, self.server.close()))
            totals = self.server.totals
        except SumLost as error:
            log.warning("a secure sum is lost: %s", error)
            self.lost = f"{error.given}; needed: {error.needed}"
            return {}
        self.survivors = [self.nodes[name] for name in self.server.survivors]
        encoding = self.encoding(len(self.server.cohort.members))
        segments = zip(encoding.layout.segments, totals, strict=True)
        return encoding.decode({segment: words for segment, words in segments if len(words)})

    def require_unpaid(self, what: str) -> None:
        """End the run where devices have paid for a sum that is lost: none of them says it twice."""
        if self.lost and self.asked and isinstance(self.settings.privacy, PrivatePrivacy):
            remedy = "Devices have paid for it: they take part in another run if their owners allow more."
            raise InvalidState(f"{what}, whose noisy sum is lost ({self.lost})", "devices that stay", remedy)


def survey(
    grid: Grid, settings: Settings, num_items: int, window: range, nodes: list[Node], run: int, timeout: float
) -> tuple[list[Answer], str]:
    """The sum of what devices say of some items before the first round; where it is lost, nothing, and why."""
    by_name = {node.name: node for node in nodes}
    summed = SecureRound(
        grid,
        timeout,
        settings,
        lambda devices: surveying(settings, window, devices),
        dict.fromkeys(by_name, 0),
        by_name,
    )
    question, ids = ask(settings, num_items, window), {node.node_id: node for node in nodes}
    told = summed.begin(run, window.start, "survey")
    records = {node: with_secure(question, message) for node, message in told.items()}
    for node, content in ask_each(grid, records, SURVEY, timeout):
        try:
            summed.hear(ids[node], content)
        except FairfoldError as error:
            log.warning("node %d left out of the survey: %s", node, error.given)
    heard = summed.finish()
    summed.require_unpaid("the survey before the first round")
    return [one.answer for one in heard.values()], summed.lost
