"""A round that is under way over a network, and the answers that can be read."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.serverapp.strategy import Strategy

from fairfold.errors import InvalidMessage
from fairfold.flower.nodes import Node
from fairfold.flower.wire import Order, Reply, unpack_reply

if TYPE_CHECKING:
    from fairfold.flower.exchange import StreamingGrid
    from fairfold.protocol.plan import Plan
    from fairfold.simulate.run import Progress

log = logging.getLogger("fairfold.flower")

NOBODY = -1


@dataclass
class OpenRound:
    """A round that is under way.

    Attributes:
        orders: What the devices of each size were asked, as they see it; by node where every one has its own hash.
        waiting: Who has not answered.
    """

    orders: dict[int, Order] = field(default_factory=dict)
    waiting: dict[int, Node] = field(default_factory=dict)
    answered: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    started: float = field(default_factory=time.monotonic)


class Hearing(Strategy):
    """Who answers what; what it asks of a strategy is what :class:`FairStrategy` has."""

    if TYPE_CHECKING:
        plan: Plan
        progress: Progress
        largest_weight: float
        _open: OpenRound
        _grid: StreamingGrid | None
        _numbered: set[int]

    def _key(self, node: Node) -> int:
        return node.node_id if self.plan.method.per_client else node.group

    def _answers(
        self, number: int, replies: Iterable[Message], *, trained: bool
    ) -> Iterator[tuple[Node, Order, Reply]]:
        """The readable answers; everybody else is noted with the reason."""
        opened, algorithm = self._open, self.plan.algorithm
        for reply in replies:
            node = opened.waiting.pop(self._sender(reply), None)
            if node is None:
                log.warning("round %d: an answer of somebody who was not asked, or had answered", number)
                continue
            if reply.has_error():
                log.warning("round %d: node %d says: %s", number, node.node_id, _plain(reply.error.reason))
                self.progress.rejections.note(number, node.node_id, "the device failed")
                self._numbered.discard(node.node_id)  # it may lack what it was told: told again next time
                continue
            order = opened.orders[self._key(node)]
            sizes = algorithm.answer_shapes(self.plan, order.sent) if trained else {}
            try:
                found = unpack_reply(reply.content, order, sizes, self.largest_weight, values=algorithm.values)
            except InvalidMessage as error:
                self.progress.rejections.note(number, node.node_id, error.given)
                continue
            yield node, order, found
        for node in opened.waiting.values():
            self.progress.rejections.note(number, node.node_id, "no answer in time")

    def _sender(self, reply: Message) -> int:
        """Who answered: told by the message answered, so that a late answer is not taken for that to a new order."""
        if self._grid is None:
            return reply.metadata.src_node_id
        return self._grid.sent_to.get(reply.metadata.reply_to_message_id, NOBODY)


def _plain(text: object) -> str:
    """A stranger's text as one line of bounded length, for the log."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:300])
