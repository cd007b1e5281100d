"""A federation inside one process, for trying out and for tests: every message really is one, without a network."""

from collections.abc import Callable, Iterable
from copy import deepcopy

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Inspect = Callable[[Message], None]


class InProcessGrid(Grid):
    """Nodes that run a ClientApp here, one message after another.

    Args:
        app: What every node runs.
        node_configs: What each node is started with; node ids are counted from 1.
        inspect: Shown every message, both ways, as it would travel.
    """

    def __init__(
        self, app: ClientApp, node_configs: Iterable[UserConfig], inspect: Inspect = lambda _message: None
    ) -> None:
        # Messages carry the identity of the process that makes them, which Flower's runtime would have set.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.inspect = app, inspect
        self.contexts = {
            number: Context(1, number, dict(config), RecordDict(), {})
            for number, config in enumerate(node_configs, start=1)
        }
        self._replies: dict[str, Message] = {}
        self._count = 0

    def set_run(self, run: Run) -> None:
        """There is one run only."""

    @property
    def run(self) -> Run:
        """There is one run only."""
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As :class:`Message` does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run each message at its node at once."""
        return [self._deliver(message) for message in messages]

    def _deliver(self, message: Message) -> str:
        self._count += 1
        name = f"message-{self._count:09d}"  # in this order they are fetched
        message.metadata.__dict__["_message_id"] = name
        self.inspect(message)
        arrived = deepcopy(message)
        try:
            reply = deepcopy(self.app(arrived, self.contexts[message.metadata.dst_node_id]))
        except Exception as error:  # as Flower's runtime does: the server is told that the app failed
            reply = Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=arrived)
        self.inspect(reply)
        self._replies[name] = reply
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to these messages, each once."""
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002
        """All answers, at once."""
        return self.pull_messages(self.push_messages(messages))
