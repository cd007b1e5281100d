"""What devices answered: who it was, whether it can be read and used, and if not, why."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from flwr.app import Message

from fairfold.errors import InvalidMessage
from fairfold.flower.exchange import plain
from fairfold.flower.nodes import Node
from fairfold.flower.vectors import bytes_in
from fairfold.flower.wire import Order, Reply, unpack_reply

if TYPE_CHECKING:
    from fairfold.flower.strategy import FairStrategy

log = logging.getLogger("fairfold.flower")

NOBODY = -1


def usable_answers(
    strategy: FairStrategy, number: int, replies: Iterable[Message], *, trained: bool
) -> Iterator[tuple[Node, Order, Reply]]:
    """The readable answers; everybody else is noted with the reason."""
    opened, algorithm, pace = strategy.open_round, strategy.plan.algorithm, strategy.settings.fleet.pace
    for reply in replies:
        asked = opened.waiting.pop(_sender(strategy, reply), None)
        if asked is None:
            log.warning("round %d: an answer of somebody who was not asked, or had answered", number)
            continue
        node, order = asked.node, asked.order
        if reply.has_error():
            log.warning("round %d: node %d says: %s", number, node.node_id, plain(reply.error.reason))
            _reject(strategy, number, node, "the device failed")
            strategy.numbered.discard(node.node_id)  # it may lack what it was told: told again next time
            strategy.nodes.doubt(node.node_id)
            continue
        if opened.secure is None:
            opened.receive(node, bytes_in(reply.content))
        behind = strategy.progress.state.round_number - order.sent.round_number if trained else 0
        if trained and not pace.waits:
            opened.behind[node.node_id] = behind
        if (late := pace.late(behind, ages=algorithm.ages)) is not None:
            _reject(strategy, number, node, late)  # the sums hold its word from before, as its next order will say
            continue
        sizes = algorithm.answer_shapes(strategy.plan, order.sent) if trained else {}
        try:
            if opened.secure is not None:
                opened.take(node, reply.content)
                continue
            found = unpack_reply(reply.content, order, sizes, strategy.largest_weight, values=algorithm.values)
        except InvalidMessage as error:
            _reject(strategy, number, node, error.given)
            continue
        problem = algorithm.problem(strategy.plan, order.sent, found.answer) if trained else None
        if problem is not None or (trained and found.answer is None):
            _reject(strategy, number, node, problem or "no answer")
            continue
        yield node, order, found


def give_up(strategy: FairStrategy, number: int, *, everybody: bool) -> None:
    """Wait no longer for those whose time is over, or for everybody; what they say later is not heard."""
    opened, now = strategy.open_round, time.monotonic()
    for asked in [asked for asked in opened.waiting.values() if everybody or asked.until <= now]:
        del opened.waiting[asked.node.node_id]
        _reject(strategy, number, asked.node, "no answer in time")
        opened.line.forget(asked.node.node_id)
    opened.phase("answers")


def step_due(strategy: FairStrategy, *, wait: bool) -> Callable[[], bool]:
    """Whether answers are waited for no longer, from now on: the time of all is over, or a step is due.

    That is after ``fleet.pace.seconds``, if an answer counts by then; not where it is to ``wait`` for all.
    """
    opened, pace, began = strategy.open_round, strategy.settings.fleet.pace, time.monotonic()

    def due() -> bool:
        if wait:
            return False  # all have the same time, which the grid knows
        now, heard = time.monotonic(), len(opened.used) + len(opened.said)
        if heard and pace.seconds is not None and now >= began + pace.seconds:
            return True
        return all(asked.until <= now for asked in opened.waiting.values())

    return due


def enough(strategy: FairStrategy, *, wait: bool) -> bool:
    """Whether as many answers have come as a step needs."""
    opened, pace = strategy.open_round, strategy.settings.fleet.pace
    return not wait and pace.answers is not None and max(len(opened.used), len(opened.said)) >= pace.answers


def _reject(strategy: FairStrategy, number: int, node: Node, reason: str) -> None:
    strategy.progress.rejections.note(number, node.node_id, reason)
    strategy.open_round.left_out[node.node_id] = reason


def _sender(strategy: FairStrategy, reply: Message) -> int:
    """Who answered: told by the message answered, so that a late answer is not taken for that to a new order."""
    if strategy.streaming is None:
        return reply.metadata.src_node_id
    return strategy.open_round.line.sent_to.pop(reply.metadata.reply_to_message_id, NOBODY)
