"""How a device fetches the objects of a message and sends its reply, by Flower's fleet API over a given connection."""

import hashlib
import logging
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from fairfold.checksums import PARSE_ERRORS
from fairfold.device.protobuf import bytes_field, double_field, number_field, parse_fields, text_field
from fairfold.device.records import Objects, Records, add_object, pack_records, parse_records, split_object
from fairfold.device.requests import NeedsWorker
from fairfold.device.tasks import Reply, SmallDevice
from fairfold.errors import FairfoldError, InvalidMessage, InvalidState, RequestRefused

APP_RAISED_EXCEPTION = 4  # Flower's code of an error in a reply
FETCH_PAUSES = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0)  # seconds: a message may be announced before all of its objects are there
MAX_OBJECTS = 1 << 16

log = logging.getLogger("fairfold.device")
Call = Callable[[str, bytes], bytes]  # name and body of a signed request to the response


@dataclass
class PulledMessage:
    """A message that a node has pulled: metadata, and the tree of its objects, which are fetched one by one."""

    call: Call
    response: bytes

    def __post_init__(self) -> None:
        fields = parse_fields(self.response)
        metadata = parse_fields(parse_fields(fields[2][0])[1][0])
        self.tree: bytes = fields[3][0]
        self.run, self.sender, self.node = (int(metadata.get(key, [0])[0]) for key in (1, 3, 4))
        self.group = metadata.get(6, [b""])[0].decode()
        self.kind = metadata[8][0].decode()
        self.ttl, self.created = (struct.unpack("<d", metadata[key][0])[0] for key in (7, 9))
        self.tasks = tuple(int(metadata.get(key, [0])[0]) for key in (10, 11))
        self.message_id: str = parse_fields(self.tree)[1][0].decode()
        self._head = bytes_field(1, number_field(1, self.node))

    def fetch(self) -> Records:
        """Fetch all objects, checked by their ids, and return the message's records; nothing is confirmed yet."""
        objects: Objects = {}
        pending = [self.tree]
        while pending:
            fields = parse_fields(pending.pop())
            pending += fields.get(2, [])
            object_id = fields[1][0].decode()
            if object_id not in objects:
                objects[object_id] = self._fetch_object(object_id)
            if len(objects) > MAX_OBJECTS:
                raise InvalidMessage("a message of too many objects", f"at most {MAX_OBJECTS}", "Send less.")
        _, children, _ = split_object(objects[self.message_id])
        return parse_records(children[0], objects)

    def _fetch_object(self, object_id: str) -> bytes:
        request = self._head + number_field(2, self.run) + text_field(3, object_id)
        for pause in FETCH_PAUSES:
            fields = parse_fields(self.call("pull-object", request))
            if 3 in fields or 1 not in fields:
                break
            time.sleep(pause)
        content: bytes = fields.get(3, [b""])[0]
        if hashlib.sha256(content).hexdigest() != object_id:
            raise InvalidMessage("an object that is gone, or is another", "what the message names", "It is sent again.")
        return content

    def confirm(self) -> None:
        """Confirm that all objects have arrived; the server deletes them."""
        self.call("confirm-message-received", self._head + number_field(2, self.run) + text_field(3, self.message_id))

    def send(self, reply: Reply | str, seconds: float) -> None:
        """Send a reply, or the reason why there is none."""
        objects: Objects = {}
        now = time.time()
        records = [] if isinstance(reply, str) else [pack_records(reply, objects)]
        error = b""
        if isinstance(reply, str):
            error = bytes_field(3, number_field(1, APP_RAISED_EXCEPTION) + text_field(2, reply))
        metadata = self._metadata("", now)
        tree = add_object("Message", records, bytes_field(1, metadata) + error, objects)
        # The content is empty here, but present: else the server finds neither content nor error.
        message = bytes_field(1, self._metadata(tree.object_id, now)) + (error or bytes_field(2, b""))
        request = self._head + bytes_field(2, message) + bytes_field(3, tree.packed())
        accepted = parse_fields(self.call("push-messages", request + bytes_field(4, struct.pack("<d", seconds))))
        session = accepted.get(4, [b""])[0]
        for object_id in accepted.get(3, []):
            content = bytes_field(3, object_id) + bytes_field(4, objects[object_id.decode()])
            self.call("push-object", self._head + number_field(2, self.run) + content + bytes_field(5, session))

    def _metadata(self, message_id: str, now: float) -> bytes:
        ours, theirs = self.tasks
        return b"".join(
            [
                number_field(1, self.run),
                text_field(2, message_id),
                number_field(3, self.node),
                number_field(4, self.sender),
                text_field(5, self.message_id),
                text_field(6, self.group),
                double_field(7, self.created + self.ttl - now),
                text_field(8, self.kind),
                double_field(9, now),
                number_field(10, theirs),
                number_field(11, ours),
            ]
        )


def reply_to(call: Call, response: bytes, device: SmallDevice) -> str | None:
    """Fetch a pulled message, reply to it, and return what went wrong ("" if nothing); None if it needs the worker.

    The server learns the kind of an error alone: its text quotes names of items, users and files.
    """
    started = time.monotonic()
    try:
        message = PulledMessage(call, response)
    except PARSE_ERRORS:
        return None
    problem = ""
    reply: Reply | str
    try:
        reply = device.reply(message.kind, message.fetch())
    except NeedsWorker:
        return None
    except (FairfoldError, OSError, MemoryError, *PARSE_ERRORS) as error:
        log.exception("this device cannot reply")
        problem = f"{type(error).__name__}: {error}"
        given = f"{type(error).__name__} on the device"
        if isinstance(error, RequestRefused):  # it quotes the server's request and the owner's limits alone
            given = f"{given}: {error.given}; needed: {error.needed}"
        reply = f"InvalidState: {InvalidState(given, 'a device that can reply', 'Its own log has the details.')}"
    message.confirm()
    message.send(reply, time.monotonic() - started)
    return problem
