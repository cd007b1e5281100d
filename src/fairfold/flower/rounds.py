"""A round that is under way over a network."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from flwr.app import MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fairfold.flower.exchange import Line
from fairfold.flower.nodes import Node, Nodes
from fairfold.flower.secure_round import SecureRound
from fairfold.flower.secure_sums import judging
from fairfold.flower.wire import Order
from fairfold.privacy.encoding import Encoding
from fairfold.privacy.encoding import Heard as Together
from fairfold.protocol.faults import Rejections
from fairfold.protocol.hearing import encoding_of, from_change
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Answer, Sent, State
from fairfold.runs.nodes import ROUND, Event
from fairfold.simulate.result import Quality, RoundReport
from fairfold.simulate.run import Progress

OTHER_SIZE = "it can hold less than when it spoke: its word stays until the next run"
NO_NUMBERS = "it was not told the numbers of its items, or could not read its own"
NO_SURVEY = "the survey before the first round is lost"
log = logging.getLogger("fairfold.flower")
Heard = tuple[float, int]  # sum of the qualities of some users, and their number


@dataclass(frozen=True)
class Asked:
    """A node that is at work on an order, and until when it is waited for."""

    node: Node
    order: Order
    until: float


@dataclass
class OpenRound:
    """A round that is under way."""

    # What the devices of each size were asked, as they see it; by node where every one has its own hash.
    orders: dict[int, Order] = field(default_factory=dict)
    waiting: dict[int, Asked] = field(default_factory=dict)  # who has not answered, to an order of this round or before
    used: list[int] = field(default_factory=list)  # whose answers count
    left_out: dict[int, str] = field(default_factory=dict)  # whose do not, and why
    behind: dict[int, int] = field(default_factory=dict)  # steps since answers were asked for, where rounds do not wait
    down: dict[int, int] = field(default_factory=dict)  # bytes of tensors that were sent to each
    up: dict[int, int] = field(default_factory=dict)  # and that came, whether they could be used or not
    phases: dict[str, float] = field(default_factory=dict)  # seconds, by what was done
    started: float = field(default_factory=time.monotonic)
    heard: list[tuple[int, Heard]] = field(default_factory=list)  # by size
    said: dict[int, Heard] = field(default_factory=dict)  # the same by node
    secure: SecureRound | None = None  # where answers come under masks
    line: Line = field(default_factory=Line)  # on which the orders went
    unsurveyed: str = ""  # why devices could not be asked for the sums before the first round

    def phase(self, name: str) -> None:
        """What was done since the last phase has a name."""
        since = self.started + sum(self.phases.values())
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - since

    @property
    def asked(self) -> int:
        """How many were sent an order."""
        return len(self.down)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    def who_speaks(self, cohort: list[Node], nodes: Nodes) -> list[Node]:
        """Those of a cohort who can change what the sums hold of them; the others are left out."""
        self.left_out |= {node.node_id: OTHER_SIZE for node in cohort if not nodes.speaks(node)}
        return [node for node in cohort if nodes.speaks(node)]

    def who_knows(self, known: list[Node], cohort: list[Node], number: int) -> list[Node]:
        """Those of a cohort who know the numbers of their items; the others are left out."""
        for node in {node.node_id for node in cohort} - {node.node_id for node in known}:
            self.left_out[node] = NO_NUMBERS
            log.warning("round %d: client %d left out: %s", number, node, NO_NUMBERS)
        return known

    def lack_survey(self, present: list[Node], why: str) -> None:
        """There are no sums before the first round: nobody takes part until there are."""
        self.unsurveyed = why
        self.left_out |= {node.node_id: NO_SURVEY for node in present} if why else {}

    def send(self, node: Node, size: int) -> None:
        """Note what is sent to a node."""
        self.down[node.node_id] = size
        node.bytes_down += size

    def receive(self, node: Node, size: int) -> None:
        """Note what came from a node."""
        self.up[node.node_id] = size
        node.bytes_up += size

    def why_empty(self) -> str:
        """Why no answer counts, in words."""
        if self.unsurveyed:
            return f"the survey before it is lost: {self.unsurveyed}"
        if not self.down and not self.left_out:
            return "no node is there that takes part"
        reasons = Counter(self.left_out.values()).most_common()
        return f"{self.asked} were asked: " + ", ".join(f"{many} × {reason}" for reason, many in reasons)

    def report(self, number: int) -> RoundReport:
        """What the history holds of it."""
        moved = sum(self.down.values()), sum(self.up.values())
        return RoundReport(number, self.seconds, len(self.used), *moved, None)

    def event(self, number: int, held: dict[str, int]) -> Event:
        """What is written down of it."""
        return {
            "event": ROUND, "round": number, "counted": bool(self.used), "asked": self.asked, "used": self.used,
            "left_out": self.left_out, "down": self.down, "up": self.up, "held": held, "at": round(time.time(), 3),
            "phases": {name: round(seconds, 4) for name, seconds in self.phases.items()},
        } | ({"behind": self.behind} if self.behind else {})  # fmt: skip

    def hear(self, node: Node, quality: Heard | None) -> None:
        """Note how well a model serves a node's users."""
        node.heard(quality)
        if quality is not None:
            self.heard.append((node.group, quality))
            self.said[node.node_id] = quality

    def hear_all(self, heard: Together) -> None:
        """Note how well it serves users of whom nobody knows on which node they are."""
        if round(heard.judges) > 0:
            self.heard.append((-1, (heard.quality, round(heard.judges))))

    def quality(self, sizes: int) -> Quality | None:
        """The mean over all users, and over those of each size."""
        everybody = _mean(quality for _, quality in self.heard)
        by_size = (_mean(quality for of, quality in self.heard if of == size) for size in range(sizes))
        return None if everybody is None else Quality(everybody, tuple(by_size))

    # -- under masks ---------------------------------------------------------------------------------------------------

    def hide(self, plan: Plan, kind: str, grid: Grid, run: int, progress: Progress, timeout: float) -> dict[int, bytes]:
        """Open a secure sum for what is asked of those who wait: what goes with the question to each, by its id.

        Who leaves before it is asked does not wait any longer. Nothing, where answers are seen as they are.
        """
        if not plan.settings.privacy.sums_alone or not self.waiting:
            return {}
        trains, number = kind == MessageType.TRAIN, next(iter(self.orders.values())).sent.round_number
        encoding: Callable[[int], Encoding] = judging
        if trains:
            encoding = partial(encoding_of, plan, {size: order.sent for size, order in self.orders.items()})
        names = {asked.node.name: asked.node for asked in self.waiting.values()}
        sizes = {name: node.group if trains else 0 for name, node in names.items()}
        self.secure = SecureRound(grid, timeout, plan.settings, encoding, sizes, names)
        told = self.secure.begin(run, number, "train" if trains else "evaluate")
        for node in [node for node in self.waiting if node not in told]:
            del self.waiting[node]
            self.left_out[node] = "no keys or shares"
            progress.rejections.note(number + 1, node, self.left_out[node])
        self.phase("masks")
        return told

    def take(self, node: Node, content: RecordDict) -> None:
        """Take a node's vector under its masks."""
        assert self.secure is not None
        self.receive(node, self.secure.hear(node, content))

    def unmasked(self, plan: Plan, number: int, rejections: Rejections) -> Iterator[tuple[Sent, Answer]]:
        """What was said under masks, by size, once enough have agreed to unmask the sum."""
        if self.secure is None:
            return
        found = self.secure.finish()
        self.secure.require_unpaid(f"round {number}")
        for size, heard in found.items():
            self.hear_all(heard)
            sent = self.orders[size].sent
            yield sent, from_change(plan, sent, heard.answer)
        for node in self.up.keys() - {node.node_id for node in self.secure.survivors}:
            self.left_out[node] = "a secure sum that is lost"
            rejections.note(number, node, self.left_out[node])

    def unmasked_qualities(self) -> None:
        """The same where nothing but qualities was asked for."""
        for heard in () if self.secure is None else self.secure.finish().values():
            self.hear_all(heard)

    def survived(self) -> list[Node]:
        """Whose vectors are in the sum."""
        return [] if self.secure is None else list(self.secure.survivors)


def _mean(qualities: Iterable[Heard]) -> float | None:
    found = list(qualities)
    return sum(total for total, _ in found) / sum(users for _, users in found) if found else None


def sent_to(plan: Plan, cohort: list[Node], state: State) -> Iterator[tuple[int, Sent]]:
    """What is sent to each size, or to each node where every one has a hash of its own.

    What is waited for beyond the next step is a copy: it may be the server's own, which the step changes.
    """
    for key, sent in _sent_to(plan, cohort, state):
        copied = sent.vectors if plan.settings.fleet.pace.waits else {n: of.clone() for n, of in sent.vectors.items()}
        yield key, replace(sent, vectors=copied)


def _sent_to(plan: Plan, cohort: list[Node], state: State) -> Iterator[tuple[int, Sent]]:
    if not plan.method.per_client:
        sizes = sorted({node.group for node in cohort})
        yield from zip(sizes, plan.algorithm.send(plan, state, sizes), strict=True)
        return
    for node in cohort:
        number = node.number if node.number >= 0 else node.node_id % 2**20
        yield node.node_id, plan.sent_alone(state, node.group, number)


def metrics_of(metric: str, plan: Plan, quality: Quality) -> MetricRecord:
    """The quality over all users, and over those of each size, as Flower has it."""
    by_size = zip(plan.capacities, quality.groups, strict=True)
    sizes = {f"{metric} {capacity}": value for capacity, value in by_size if value is not None}
    return MetricRecord({metric: quality.server, **sizes})
