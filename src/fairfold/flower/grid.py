"""Ways to the nodes: a grid that streams replies, and one whose nodes live in this process.

Flower's own ``send_and_receive`` returns a list: of a hundred replies of 400 MB, 40 GB. Here a reply is handed on and
forgotten before the next ones are fetched. Fetching stops at more bytes than a reply can have, and at the deadline.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

log = logging.getLogger("fairfold.flower")

FETCHED_AT_ONCE = 4
MIN_PAUSE, MAX_PAUSE = 0.1, 3.0  # seconds between two polls for replies
Inspect = Callable[[Message], None]  # called with every message, both ways, as it would travel
Replies = Iterator[tuple[int, RecordDict]]  # with the nodes they come from


@dataclass
class PendingReplies:
    """Messages that are waited for, and replies that were fetched and not handed on yet."""

    # The node of every message: a reply is attributed by the message that it answers, as an error may name another one.
    sent_to: dict[str, int] = field(default_factory=dict)
    arrived: deque[Message] = field(default_factory=deque)

    def forget(self, node: int) -> None:
        """Stop waiting for replies of a node."""
        self.sent_to = {message: other for message, other in self.sent_to.items() if other != node}


class StreamingGrid:
    """A wrapper of a grid whose ``send_and_receive`` is a generator of replies."""

    def __init__(self, grid: Grid, max_update_bytes: int) -> None:
        self._grid = grid
        self._max_fetched, self._fetched = FETCHED_AT_ONCE * max_update_bytes, 0
        self._deadline = float("inf")
        self._lock = threading.Lock()
        client: Any = getattr(grid, "_runtime_client", None)  # a grid within one process has none
        if client is not None:
            client.PullObject = partial(self._fetch_piece, client.PullObject)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def _fetch_piece(self, fetch: Callable[[Any], Any], request: Any) -> Any:
        """Fetch a piece of a reply; fail after too many bytes or too long."""
        # Flower fetches all pieces that a client announced, by several threads, and waits two hours for missing ones.
        # It turns what this raises into a reply with an error.
        self._refuse_excess(request)  # other pieces were too large: this one is not even requested
        response = fetch(request)
        if not response.object_available and time.monotonic() >= self._deadline:
            raise ObjectPullError(request.object_id, "it did not come in time")
        with self._lock:
            self._fetched += len(response.object_content)
        self._refuse_excess(request)
        return response

    def _refuse_excess(self, request: Any) -> None:
        if self._fetched > self._max_fetched:
            raise ObjectPullError(request.object_id, "more bytes than a reply can have")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Push all messages now; then yield replies as they come, until all have come or the time is over."""
        return self.exchange(messages, PendingReplies(), timeout)

    def exchange(
        self,
        messages: Iterable[Message],
        pending: PendingReplies,
        timeout: float | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Iterator[Message]:
        """Push messages now; then yield replies to all pending ones until ``is_over``; the rest comes the next time."""
        outgoing = list(messages)
        nodes = [message.metadata.dst_node_id for message in outgoing]
        pushed = list(self._grid.push_messages(outgoing)) if outgoing else []
        pending.sent_to |= {message: node for message, node in zip(pushed, nodes, strict=False) if message}
        del outgoing, messages  # the records are shared by the clients of a size, but they are large
        return self._stream_replies(set(pending.sent_to), pending.arrived, timeout, is_over)

    def _stream_replies(
        self, waiting: set[str], arrived: deque[Message], timeout: float | None, is_over: Callable[[], bool]
    ) -> Iterator[Message]:
        deadline = self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        pause, last = MIN_PAUSE, False
        waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
        while arrived or (waiting and not last):
            while arrived:
                yield arrived.popleft()
            before = len(waiting)
            last = time.monotonic() >= deadline or is_over()
            polled = sorted(waiting)
            for start in range(0, len(polled), FETCHED_AT_ONCE):
                self._fetched = 0
                for reply in self._grid.pull_messages(polled[start : start + FETCHED_AT_ONCE]):
                    waiting.discard(reply.metadata.reply_to_message_id)
                    arrived.append(reply)
                while arrived:
                    yield arrived.popleft()
            if waiting and not last:
                pause = MIN_PAUSE if len(waiting) < before else min(pause * 1.5, MAX_PAUSE)
                time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))


def one_line(text: object) -> str:
    """Return a client's text as one printable line of bounded length, for the log."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:300])


def ask_each(grid: Grid, records: Mapping[int, RecordDict], kind: str, timeout: float) -> Replies:
    """Query each of several nodes; yield the replies, and log errors and missing replies."""
    messages = [Message(record, node, kind, ttl=2 * timeout + 60) for node, record in records.items()]
    replies = grid.send_and_receive(messages, timeout=timeout)
    waiting = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    for reply in replies:
        node = waiting.get(reply.metadata.reply_to_message_id)
        if node is not None and reply.has_error():
            log.warning("node %d failed: %s", node, one_line(reply.error.reason))
        elif node is not None:
            del waiting[reply.metadata.reply_to_message_id]
            yield node, reply.content
    for node in waiting.values():
        log.warning("node %d did not reply to %s in time, or failed", node, kind)


def ask_all(grid: Grid, nodes: Iterable[int], kind: str, record: RecordDict, timeout: float) -> Replies:
    """Send one query to several nodes; yield the replies."""
    return ask_each(grid, {node: record.copy() for node in nodes}, kind, timeout)


# -- nodes in this process ---------------------------------------------------------------------------------------------


class InProcessGrid(Grid):
    """A federation in one process, for tests: its nodes, counted from 1, run ``app``, one message after another."""

    def __init__(self, app: ClientApp, node_configs: Iterable[UserConfig], inspect: Inspect = lambda _: None) -> None:
        # Messages carry the identity of the process that makes them, which Flower's runtime would have set.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.inspect = app, inspect
        configs = enumerate(node_configs, start=1)
        self.contexts = {number: Context(1, number, dict(config), RecordDict(), {}) for number, config in configs}
        self._replies: dict[str, Message] = {}
        self._names = (f"message-{number:09d}" for number in count(1))  # fetched in this order

    def set_run(self, run: Run) -> None:
        """Ignore the run: there is one only."""

    @property
    def run(self) -> Run:
        """Not implemented: the one run has no record."""
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(message) for message in messages]

    def _deliver(self, message: Message) -> str:
        name = message.metadata.__dict__["_message_id"] = next(self._names)
        self.inspect(message)
        arrived = deepcopy(message)
        try:
            reply = deepcopy(self.app(arrived, self.contexts[message.metadata.dst_node_id]))
        except Exception as error:  # as Flower's runtime does: the server gets an error in place of a reply
            reply = Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=arrived)
        self.inspect(reply)
        self._replies[name] = reply
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002
        return self.pull_messages(self.push_messages(messages))
