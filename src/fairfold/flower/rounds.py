"""A round that is under way over a network."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fairfold.flower.nodes import Node
from fairfold.flower.wire import Order
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Sent, State
from fairfold.runs.nodes import ROUND, Event
from fairfold.simulate.result import Quality, RoundReport

Heard = tuple[float, int]  # sum of the qualities of some users, and their number


@dataclass
class OpenRound:
    """A round that is under way."""

    # What the devices of each size were asked, as they see it; by node where every one has its own hash.
    orders: dict[int, Order] = field(default_factory=dict)
    waiting: dict[int, Node] = field(default_factory=dict)  # who has not answered
    used: list[int] = field(default_factory=list)  # whose answers count
    left_out: dict[int, str] = field(default_factory=dict)  # whose do not, and why
    down: dict[int, int] = field(default_factory=dict)  # bytes of tensors that were sent to each
    up: dict[int, int] = field(default_factory=dict)  # and that came, whether they could be used or not
    phases: dict[str, float] = field(default_factory=dict)  # seconds, by what was done
    started: float = field(default_factory=time.monotonic)
    heard: list[tuple[int, Heard]] = field(default_factory=list)  # by size
    said: dict[int, Heard] = field(default_factory=dict)  # the same by node

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
        if not self.down:
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
        }  # fmt: skip

    def hear(self, node: Node, quality: Heard | None) -> None:
        """Note how well a model serves a node's users."""
        node.heard(quality)
        if quality is not None:
            self.heard.append((node.group, quality))
            self.said[node.node_id] = quality

    def quality(self, sizes: int) -> Quality | None:
        """The mean over all users, and over those of each size."""
        everybody = _mean(quality for _, quality in self.heard)
        by_size = (_mean(quality for of, quality in self.heard if of == size) for size in range(sizes))
        return None if everybody is None else Quality(everybody, tuple(by_size))


def _mean(qualities: Iterable[Heard]) -> float | None:
    found = list(qualities)
    return sum(total for total, _ in found) / sum(users for _, users in found) if found else None


def sent_to(plan: Plan, cohort: list[Node], state: State) -> Iterator[tuple[int, Sent]]:
    """What is sent to each size, or to each node where every one has a hash of its own."""
    if not plan.method.per_client:
        sizes = sorted({node.group for node in cohort})
        yield from zip(sizes, plan.algorithm.send(plan, state, sizes), strict=True)
        return
    for node in cohort:
        number = node.number if node.number >= 0 else node.node_id % 2**20
        yield node.node_id, plan.sent_alone(state, node.group, number)


def plain(text: object) -> str:
    """A stranger's text as one line of bounded length, for the log."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:300])
