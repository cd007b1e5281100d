"""Messages out, answers in as they come: the server never holds the answers of a whole round.

Flower's own ``send_and_receive`` returns a list, which for a hundred devices of 400 MB would be 40 GB. Here an answer
is handed on, checked, added to the sum of its size and forgotten before the next ones are fetched. And a device decides
how much it sends and how fast, so fetching stops when it is more than an answer can be, or when the time is over.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

log = logging.getLogger("fairfold.flower")

FETCHED_AT_ONCE = 4
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 3.0


@dataclass
class Line:
    """Orders that are waited for, and answers to them that were fetched and not handed on yet.

    ``sent_to`` says to which node every order went: who answers is told by the message answered, since the sender named
    in an error may be another.
    """

    sent_to: dict[str, int] = field(default_factory=dict)
    arrived: deque[Message] = field(default_factory=deque)

    def forget(self, node: int) -> None:
        """Wait no longer for an answer of a node."""
        self.sent_to = {message: of for message, of in self.sent_to.items() if of != node}


class StreamingGrid:
    """A grid whose ``send_and_receive`` yields; all else is the grid's it stands for."""

    def __init__(self, grid: Grid, largest_answer: int) -> None:
        self._grid = grid
        self._most, self._fetched, self._deadline = FETCHED_AT_ONCE * largest_answer, 0, float("inf")
        self._lock = threading.Lock()
        client: Any = getattr(grid, "_runtime_client", None)  # a grid within one process has none
        if client is not None:
            client.PullObject = self._metered(client.PullObject)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def _metered(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The fetching of a piece of an answer, counted, which ends when it is too much or takes too long.

        Flower fetches an answer in pieces, by several threads, as many as the device announced, and waits two hours for
        those that have not come. What this raises it turns into an answer that has an error in place of a content.
        """

        def metered(request: Any) -> Any:
            self._refuse_excess(request)  # other pieces were too many: this one is not even asked for
            response = fetch(request)
            if not response.object_available and time.monotonic() >= self._deadline:
                raise ObjectPullError(request.object_id, "it did not come in time")
            with self._lock:
                self._fetched += len(response.object_content)
            self._refuse_excess(request)
            return response

        return metered

    def _refuse_excess(self, request: Any) -> None:
        if self._fetched > self._most:
            raise ObjectPullError(request.object_id, "more bytes than an answer can have")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Push all messages now; then yield answers as they come, until there are all or the time is over."""
        outgoing = list(messages)
        if not outgoing:
            return iter(())
        waiting = {message for message in self._grid.push_messages(outgoing) if message}
        del outgoing, messages  # the records are shared by the devices of a size, but they are large
        return self._answers(waiting, timeout)

    def order(
        self, messages: Iterable[Message], line: Line, timeout: float, over: Callable[[], bool]
    ) -> Iterator[Message]:
        """Push more orders on a line now; then yield answers to all of its orders, until ``over`` says so.

        Whoever has heard enough may stop listening: what was fetched by then is handed on the next time.
        """
        outgoing = list(messages)
        nodes = [message.metadata.dst_node_id for message in outgoing]
        pushed = list(self._grid.push_messages(outgoing)) if outgoing else []
        line.sent_to |= {message: node for message, node in zip(pushed, nodes, strict=False) if message}
        del outgoing, messages
        return self._answers(set(line.sent_to), timeout, over, line.arrived)

    def _answers(
        self,
        waiting: set[str],
        timeout: float | None,
        over: Callable[[], bool] | None = None,
        arrived: deque[Message] | None = None,
    ) -> Iterator[Message]:
        deadline = self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        pause, fetched = SHORTEST_PAUSE, deque[Message]() if arrived is None else arrived
        left, last = waiting - {answer.metadata.reply_to_message_id for answer in fetched}, False
        while fetched or (left and not last):
            while fetched:
                yield fetched.popleft()
            before, last = len(left), time.monotonic() >= deadline or (over is not None and over())
            asked = sorted(left)
            for start in range(0, len(asked), FETCHED_AT_ONCE):
                self._fetched = 0
                for answer in self._grid.pull_messages(asked[start : start + FETCHED_AT_ONCE]):
                    left.discard(answer.metadata.reply_to_message_id)
                    fetched.append(answer)
                while fetched:
                    yield fetched.popleft()
            if left and not last:
                pause = SHORTEST_PAUSE if len(left) < before else min(pause * 1.5, LONGEST_PAUSE)
                time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))


def plain(text: object) -> str:
    """A stranger's text as one line of bounded length, for the log."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:300])


def ask_each(
    grid: Grid, records: Mapping[int, RecordDict], kind: str, timeout: float
) -> Iterator[tuple[int, RecordDict]]:
    """A question to each of several nodes, and what they answer; who does not is logged, with the reason they give."""
    messages = [
        Message(record, dst_node_id=node, message_type=kind, ttl=2 * timeout + 60) for node, record in records.items()
    ]
    replies = grid.send_and_receive(messages, timeout=timeout)
    waiting = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    for reply in replies:
        node = waiting.get(reply.metadata.reply_to_message_id)
        if node is not None and reply.has_error():
            log.warning("node %d says: %s", node, plain(reply.error.reason))
        elif node is not None:
            del waiting[reply.metadata.reply_to_message_id]
            yield node, reply.content
    for node in waiting.values():
        log.warning("node %d cannot answer %s, or did not in time", node, kind)


def ask_all(
    grid: Grid, nodes: Iterable[int], kind: str, record: RecordDict, timeout: float
) -> Iterator[tuple[int, RecordDict]]:
    """The same question to several nodes."""
    return ask_each(grid, {node: record.copy() for node in nodes}, kind, timeout)
