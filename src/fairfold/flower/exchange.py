"""Messages out, answers in as they come: the server never holds the answers of a whole round.

Flower's own ``send_and_receive`` returns a list, which for a hundred devices of 400 MB would be 40 GB. Here an answer
is handed on, checked, added to the sum of its size and forgotten before the next ones are fetched. And a device decides
how much it sends and how fast, so fetching stops when it is more than an answer can be, or when the time is over.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

FETCHED_AT_ONCE = 4
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 3.0


class Meter:
    """Counts what is fetched of some answers, and stops Flower's fetching when it is too much or takes too long.

    Flower fetches an answer in pieces, as many as the device announced, and waits two hours for those that have not
    come. What this raises it turns into an answer that has an error in place of a content.

    Args:
        most: Bytes that may be fetched between two calls of :meth:`restart`.
    """

    def __init__(self, most: int) -> None:
        self._most, self._fetched, self._lock = most, 0, threading.Lock()
        self._deadline = float("inf")

    def restart(self, deadline: float) -> None:
        """Other answers are fetched from now on; after the deadline only pieces that are there."""
        self._fetched, self._deadline = 0, deadline

    def watch(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same fetching of a piece, counted; pieces are fetched by several threads."""

        def counted(request: Any) -> Any:
            if self._fetched > self._most:  # other pieces were too many: this one is not even asked for
                raise ObjectPullError(request.object_id, "more bytes than an answer can have")
            response = fetch(request)
            if not response.object_available and time.monotonic() >= self._deadline:
                raise ObjectPullError(request.object_id, "it did not come in time")
            with self._lock:
                self._fetched += len(response.object_content)
            if self._fetched > self._most:
                raise ObjectPullError(request.object_id, "more bytes than an answer can have")
            return response

        return counted


class StreamingGrid:
    """A grid whose ``send_and_receive`` yields; all else is the grid's it stands for.

    Args:
        grid: What it stands for.
        largest_answer: Bytes that an answer may have.

    Attributes:
        sent_to: To which node every message went. Who answers is told by the message answered, since the sender named
            in an error may be another.
    """

    def __init__(self, grid: Grid, largest_answer: int) -> None:
        self._grid = grid
        self.sent_to: dict[str, int] = {}
        self._meter = Meter(FETCHED_AT_ONCE * largest_answer)
        client: Any = getattr(grid, "_runtime_client", None)  # a grid within one process has none
        if client is not None:
            client.PullObject = self._meter.watch(client.PullObject)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Push all messages now; then yield answers as they come, until there are all or the time is over."""
        outgoing = list(messages)
        if not outgoing:
            return iter(())
        nodes = [message.metadata.dst_node_id for message in outgoing]
        pushed = list(self._grid.push_messages(outgoing))
        self.sent_to = {message: node for message, node in zip(pushed, nodes, strict=False) if message}
        del outgoing, messages  # the records are shared by the devices of a size, but they are large
        return self._answers(set(self.sent_to), timeout)

    def _answers(self, waiting: set[str], timeout: float | None) -> Iterator[Message]:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        pause, over = SHORTEST_PAUSE, False
        while waiting and not over:
            before, over = len(waiting), time.monotonic() >= deadline
            asked = sorted(waiting)
            for start in range(0, len(asked), FETCHED_AT_ONCE):
                self._meter.restart(deadline)
                for answer in self._grid.pull_messages(asked[start : start + FETCHED_AT_ONCE]):
                    waiting.discard(answer.metadata.reply_to_message_id)
                    yield answer
            if waiting and not over:
                pause = SHORTEST_PAUSE if len(waiting) < before else min(pause * 1.5, LONGEST_PAUSE)
                time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
