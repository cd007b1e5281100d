"""The worker of a node: takes a message from the node's process (:mod:`.node_loop`), runs the app, sends the reply.

As a process of its own it frees the memory of training when there is no work. It runs no code that came with a message.
"""

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fairfold.errors import InvalidSettings
from fairfold.flower.fleet.connection import parse_address, read_key
from fairfold.flower.fleet.node import NodeFolder
from fairfold.flower.fleet.node_loop import peak_memory

MAX_TRIES = 5  # of a request that the network lost
log = logging.getLogger("fairfold.flower")


def load_app(node: NodeFolder) -> ClientApp:
    """The ClientApp of a node: a custom one by its name, or fairfold's own with the node's file and capacity."""
    if node.app:
        module, _, name = node.app.partition(":")
        try:
            app = getattr(import_module(module), name or "app")
        except (ImportError, AttributeError) as error:
            raise InvalidSettings(f"app {node.app!r}: {error}", "package.module:app", "Check the name.") from None
        if not isinstance(app, ClientApp):
            remedy = "Name a ClientApp with --app package.module:app."
            raise InvalidSettings(f"app {node.app!r}, a {type(app).__name__}", "a ClientApp", remedy)
        return app
    from fairfold.flower.client import make_client_app
    from fairfold.flower.local_data import LocalFile

    catalogue = node.catalogue if node.catalogue.exists() else None
    file = LocalFile(node.data, test=node.test or None, holdout=node.holdout, catalogue=catalogue)
    return make_client_app(file, model=node.model or None, capacity=node.capacity, state=node.state)


class Worker:
    """Replies to the messages of one node."""

    def __init__(self, node: NodeFolder) -> None:
        self.node = node
        key, (host, port) = read_key(node.key), parse_address(node.server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        signing, authority = [NodeAuthHttpInterceptor(key, key.public_key())], node.authority.read_bytes()
        self._client = FleetHttpClient.from_server_address(address, False, authority, interceptors=signing)
        self._retry = make_simple_http_retry_invoker()
        self._retry.max_tries = MAX_TRIES

    @cached_property
    def app(self) -> ClientApp:
        """The node's ClientApp; loaded with the first message, so that the server learns where that fails."""
        return load_app(self.node)

    def reply(self, pulled: bytes, events: "EventWriter") -> None:
        """Reply to a message; with an error where the app fails."""
        response = PullMessagesResponse.FromString(pulled)
        tree, metadata = response.message_object_trees[0], response.messages_list[0].metadata
        node = Node(node_id=metadata.dst_node_id)
        events.write(kind=metadata.message_type, round=metadata.group_id, deadline=metadata.created_at + metadata.ttl)
        started = time.monotonic()
        reply, problem = self._run_app(self._fetch(tree, node, metadata.run_id))
        self._send(reply, node, metadata.run_id, time.monotonic() - started)
        events.write(done=True, seconds=time.monotonic() - started, problem=problem, peak=peak_memory())

    def _retried(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return partial(self._retry.invoke, call)

    def _fetch(self, tree: ObjectTree, node: Node, run: int) -> Message:
        pull = make_pull_object_fn_protobuf(self._retried(self._client.PullObject), node, run)
        received = self._retried(self._client.ConfirmMessageReceived)
        confirm = make_confirm_message_received_fn_protobuf(received, node, run)
        message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)
        message.metadata.__dict__["_message_id"] = tree.object_id  # as Flower does: the id is not transmitted
        return message

    def _run_app(self, message: Message) -> tuple[Message, str]:
        """The app's reply, and for the device's owner what went wrong."""
        metadata = message.metadata
        context = Context(metadata.run_id, metadata.dst_node_id, self.node.node_config(), RecordDict(), {})
        try:
            return self.app(message, context), ""
        except Exception as error:  # sent as Flower sends it; fairfold's own app raises no more than its kind
            log.exception("the app of this device raised an exception")
            hides_cause = error.__suppress_context__ and isinstance(error.__context__, Exception)
            cause = error.__context__ if hides_cause else error
            reason = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}")
            return Message(reason, reply_to=message), f"{type(cause).__name__}: {cause}"

    def _send(self, reply: Message, node: Node, run: int, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            tree = get_object_tree(reply)
            proto = message_to_proto(remove_content_from_message(reply) if reply.has_content() else reply)
            request = PushMessagesRequest(
                node=node, messages_list=[proto], message_object_trees=[tree], clientapp_runtime_list=[seconds]
            )
            accepted = self._retried(self._client.PushMessages)(request)
            push = make_push_object_fn_protobuf(self._retried(self._client.PushObject), node, run, accepted.session_id)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=set(accepted.objects_to_push))


class EventWriter:
    """Writes events for the node's process, one JSON object per line."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, **event: Any) -> None:
        """Write one event."""
        self._stream.write(json.dumps(event).encode() + b"\n")
        self._stream.flush()


def _read_messages(stream: IO[bytes]) -> "queue.SimpleQueue[bytes]":
    """Queue the messages that the node hands over; when the stream ends, this process ends at once."""
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while len(head := stream.read(4)) == 4:
                body = stream.read(size := int.from_bytes(head, "big"))
                if len(body) < size:
                    break
                messages.put(body)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return messages


def main() -> None:
    """Serve the node of a folder until it closes the stream of messages."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    events = EventWriter(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what an app prints belongs to the log
    messages = _read_messages(os.fdopen(os.dup(0), "rb"))
    worker = Worker(NodeFolder.open(Path(sys.argv[1])))
    while True:
        try:
            worker.reply(messages.get(), events)
        except Exception as error:
            log.exception("no reply to a message")
            events.write(done=True, problem=f"no reply: {type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
