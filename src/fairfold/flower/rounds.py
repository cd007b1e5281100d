"""A round that is under way over a network."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fairfold.flower.nodes import Node
from fairfold.flower.secure_round import SecureRound
from fairfold.flower.wire import Order
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Sent, State
from fairfold.simulate.result import Quality

Heard = tuple[float, int]  # sum of the qualities of some users, and their number


@dataclass
class OpenRound:
    """A round that is under way."""

    # What the devices of each size were asked, as they see it; by node where every one has its own hash.
    orders: dict[int, Order] = field(default_factory=dict)
    waiting: dict[int, Node] = field(default_factory=dict)  # who has not answered
    answered: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    started: float = field(default_factory=time.monotonic)
    heard: list[tuple[int, Heard]] = field(default_factory=list)  # by size
    secure: SecureRound | None = None  # where answers come under masks
    sent_up: dict[int, int] = field(default_factory=dict)  # bytes of what nodes said under masks

    def hear(self, node: Node, quality: Heard | None) -> None:
        """Note how well a model serves a node's users."""
        node.heard(quality)
        if quality is not None:
            self.heard.append((node.group, quality))

    def hear_all(self, total: float, users: int) -> None:
        """Note how well it serves users of whom nobody knows on which node they are."""
        if users > 0:
            self.heard.append((-1, (total, users)))

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
