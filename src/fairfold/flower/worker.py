"""A device's work: takes a message from its other process (:mod:`.watch`), runs the device's app, sends the answer.

It is a process of its own, so that the memory that training takes (torch, above all) is given back when nothing was
asked for a while. What runs here is the app that this device was given, never code that came with a message.
"""

import contextlib
import json
import logging
import os
import queue
import resource
import sys
import threading
import time
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)  # fmt: skip
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fairfold.errors import InvalidSettings
from fairfold.flower.link import address_of, read_key
from fairfold.flower.node import NodeFolder
from fairfold.flower.watch import WORK

if TYPE_CHECKING:
    from fairfold.flower.local import LocalFile

TRIES = 5  # of a request that the network lost
log = logging.getLogger("fairfold.flower")


def app_of(node: NodeFolder) -> ClientApp:
    """What this device runs: an app that it was given by name, or fairfold's own with its file and its capacity."""
    if node.app:
        module, _, name = node.app.partition(":")
        try:
            found = getattr(import_module(module), name or "app")
        except (ImportError, AttributeError) as error:
            raise InvalidSettings(f"app {node.app!r}: {error}", "package.module:app", "Check the name.") from None
        if not isinstance(found, ClientApp):
            raise InvalidSettings(
                f"app {node.app!r}, a {type(found).__name__}",
                "a ClientApp",
                "Name a ClientApp with --app package.module:app.",
            )
        return found
    from fairfold.flower.client import make_client_app

    return make_client_app(file_of(node), model=node.model or None, budget=node.capacity, state=node.state)


def file_of(node: NodeFolder) -> "LocalFile":
    """The device's own interactions."""
    from fairfold.flower.local import LocalFile

    catalogue = node.catalogue if node.catalogue.exists() else None
    return LocalFile(node.data, test=node.test or None, holdout=node.holdout, catalogue=catalogue)


class Worker:
    """Answers the messages of one node."""

    def __init__(self, node: NodeFolder) -> None:
        self.node = node
        key = read_key(node.key)
        host, port = address_of(node.server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._client = FleetHttpClient.from_server_address(
            address, False, node.authority.read_bytes(), interceptors=[NodeAuthHttpInterceptor(key, key.public_key())]
        )
        self._retry = make_simple_http_retry_invoker()
        self._retry.max_tries = TRIES

    @cached_property
    def app(self) -> ClientApp:
        """What this device runs; found when there is work, so that the server is told where it cannot be."""
        return app_of(self.node)

    def answer(self, pulled: bytes, refused: str, say: "Say") -> None:
        """Answer a message; with an error where it cannot be, or may not be tried again (``refused`` says why)."""
        response = PullMessagesResponse.FromString(pulled)
        tree, facts = response.message_object_trees[0], response.messages_list[0].metadata
        node, run = Node(node_id=facts.dst_node_id), facts.run_id
        say(kind=facts.message_type, round=facts.group_id, until=facts.created_at + facts.ttl)
        started = time.monotonic()
        if refused:  # its pieces may have been fetched, and are gone
            error = Error(ErrorCode.CLIENT_APP_CRASHED, refused)
            reply, problem = Message(error, reply_to=message_from_proto(response.messages_list[0])), refused
        else:
            reply, problem = self._reply(self._fetch(tree, node, run))
        self._send(reply, node, run, time.monotonic() - started)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        say(done=True, seconds=time.monotonic() - started, problem=problem, peak=peak)

    def _fetch(self, tree: ObjectTree, node: Node, run: int) -> Message:
        message = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(lambda one: self._retry.invoke(self._client.PullObject, one), node, run),
            make_confirm_message_received_fn_protobuf(
                lambda one: self._retry.invoke(self._client.ConfirmMessageReceived, one), node, run
            ),
            return_type=Message,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id  # Flower's own way: it does not travel
        return message

    def _reply(self, message: Message) -> tuple[Message, str]:
        context = Context(
            run_id=message.metadata.run_id, node_id=message.metadata.dst_node_id, node_config=self.node.facts(),
            state=RecordDict(), run_config={},
        )  # fmt: skip
        try:
            return self.app(message, context), ""
        except Exception as error:  # told as Flower tells it; fairfold's own app says no more than its kind
            log.exception("the app of this device raised an exception")
            reason, cause = f"{type(error).__name__}: {error}", error
            if error.__suppress_context__ and isinstance(error.__context__, Exception):
                cause = error.__context__
            told = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
            return told, f"{type(cause).__name__}: {cause}"  # the owner of the device learns all of it

    def _send(self, reply: Message, node: Node, run: int, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            tree = get_object_tree(reply)
            proto = message_to_proto(remove_content_from_message(reply) if reply.has_content() else reply)
            request = PushMessagesRequest(
                node=node, messages_list=[proto], message_object_trees=[tree], clientapp_runtime_list=[seconds]
            )
            taken = self._retry.invoke(self._client.PushMessages, request)
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(
                    lambda one: self._retry.invoke(self._client.PushObject, one), node, run, taken.session_id
                ),
                object_ids_to_push=set(taken.objects_to_push),
            )


class Say:
    """Tells the node what happens, a line of JSON each; the node only believes what it needs."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __call__(self, **facts: Any) -> None:
        """Say one thing."""
        self._stream.write(json.dumps(facts).encode() + b"\n")
        self._stream.flush()


def _messages(stream: IO[bytes]) -> "queue.SimpleQueue[tuple[int, bytes]]":
    """What the node hands over, until it hangs up or dies: then this process ends at once, whatever it is doing."""
    found: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while len(head := stream.read(5)) == 5:
                size = int.from_bytes(head[1:], "big")
                body = stream.read(size)
                if len(body) < size:
                    break
                found.put((head[0], body))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return found


def main() -> None:
    """Serve a node until it hangs up."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request
    say = Say(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what an app prints belongs to the log
    given = _messages(os.fdopen(os.dup(0), "rb"))
    worker = Worker(NodeFolder.open(Path(sys.argv[1])))
    while True:
        kind, body = given.get()
        reason = "" if kind == WORK else "the device's program died while it worked on this"
        try:
            worker.answer(body, reason, say)
        except Exception as error:
            log.exception("a message could not be answered")
            say(done=True, problem=f"not answered: {type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
