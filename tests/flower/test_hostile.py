"""Somebody with a registered key against a real SuperLink: it keeps its bounds, and an honest run goes on."""

import contextlib
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fairfold.flower.fleet.gateway import LIMITS
from fairfold.flower.fleet.local_fleet import HOST, LocalFleet, make_local_fleet
from fairfold.flower.fleet.processes import descendants, stop_on_exit
from tests.flower.fleet.test_superlink import PIECE, tree
from tests.support.settings import make_settings

WORLD = {"users": 24, "items": 80, "interactions_per_user": 12}


class Hostile:
    """Somebody with a registered key and a program of his own."""

    def __init__(self, local_fleet: LocalFleet, number: int) -> None:
        key = load_ssh_private_key((local_fleet.node(number) / "key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self.address, self.ca = f"{HOST}:{local_fleet.port}", str(local_fleet.server.authority)
        self.link = FleetHttpClient.from_server_address(
            self.address, False, self.ca, interceptors=[NodeAuthHttpInterceptor(key, key.public_key())]
        )
        public = public_key_to_bytes(key.public_key())
        self.node = Node(
            node_id=self.link.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=600)).node_id
        )
        self.task = self.stored = self.refused = 0
        self.lock = threading.Lock()

    def wait_for_message(self, seconds: float = 300.0) -> MessageProto:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := self.link.PullMessages(PullMessagesRequest(node=self.node)).messages_list:
                message: MessageProto = found[0]
                return message
            time.sleep(0.3)
        raise AssertionError("was never asked")

    def reply(self, asked: MessageProto, root: ObjectTree) -> str:
        """Announce a reply made of pieces; returns the session in which to send them."""
        facts = asked.metadata
        metadata = Metadata(
            run_id=facts.run_id, message_id=root.object_id, message_type=facts.message_type, group_id=facts.group_id,
            src_node_id=self.node.node_id, dst_node_id=facts.src_node_id, reply_to_message_id=facts.message_id,
            created_at=time.time(), ttl=facts.created_at + facts.ttl - time.time() - 1,
        )  # fmt: skip
        return self.push(metadata, root)

    def push(self, metadata: Metadata, root: ObjectTree) -> str:
        reply = MessageProto(metadata=metadata)
        reply.content.SetInParent()
        request = PushMessagesRequest(node=self.node, messages_list=[reply], message_object_trees=[root])
        return self.link.PushMessages(request).session_id

    def upload(self, run: int, session: str, contents: Iterator[bytes]) -> None:
        for content in contents:
            request = PushObjectRequest(
                node=self.node, run_id=run, session_id=session, object_content=content,
                object_id=hashlib.sha256(content).hexdigest(),
            )  # fmt: skip
            stored = self.link.PushObject(request).stored
            with self.lock:
                self.task += len(content)
                self.stored += stored * len(content)
                self.refused += not stored

    def pour(self, path: str, megabytes: int) -> int:
        """A request without an end; returns the bytes that were sent before the connection broke."""
        context = ssl.create_default_context(cafile=self.ca)
        host, port = self.address.split(":")
        poured = 0
        with (
            socket.create_connection((host, int(port)), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname=host) as link,
        ):
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
            link.sendall(f"{head}content-length: {megabytes * len(PIECE)}\r\n\r\n".encode())
            try:
                for _ in range(megabytes):
                    link.sendall(PIECE)
                    poured += len(PIECE)
            except OSError:
                pass
        return poured


def content(number: int) -> bytes:
    body = number.to_bytes(8, "big") * (5 << 17)
    return b"ArrayChunk  %d\0" % len(body) + body


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def memory_of(pid: int, key: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0]) * 1024


def together(*works: Any) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.verify=<str>:DeprecationWarning")  # Flower calls it so
def test_a_node_that_uploads_without_end_fills_its_share_and_the_run_goes_on(tmp_path: Path) -> None:
    """Stated bound: what the SuperLink had, the node's share, and three copies of every piece that is at work.

    One node is honest. The other has a registered key: in place of a reply it announces more pieces than it may, and
    trees that would grow, sends 2 GB from 24 threads, and requests that do not end. Flower alone keeps the 2 GB.
    """
    share = 64_000_000
    settings = make_settings(rounds=2, evaluate_every=100, data=WORLD)
    local_fleet, data = make_local_fleet(settings, "1x,2x", tmp_path / "trial")
    local_fleet.round_timeout, local_fleet.wait_for = 240.0, 1
    local_fleet.prepare(data)
    numbers = range(400)
    names = [hashlib.sha256(content(number)).hexdigest() for number in numbers]
    with stop_on_exit(local_fleet.programs), contextlib.ExitStack() as opened:
        server = local_fleet.start_server("--node-quota", "64")
        superlink = next(pid for pid in descendants([server.pid]) if "fleet.superlink" in command_of(pid))
        for number in range(2):
            local_fleet.enrol(number)
        hostile = Hostile(local_fleet, 1)
        opened.enter_context(hostile.link)
        local_fleet.start_node(0)
        job = local_fleet.start_run("--wait-for", "2")
        asked = hostile.wait_for_message()
        before = memory_of(superlink, "VmRSS")
        # What is no reply; a tree that would grow; a reply of more pieces than a share has room for.
        for wrong in (Metadata(run_id=asked.metadata.run_id), asked.metadata):
            with pytest.raises(httpx.HTTPStatusError, match="400"):
                hostile.push(wrong, tree("a"))
        bomb = tree(0)
        for number in range(1, 30):
            bomb = tree(number, bomb, tree(number - 1))
        for root in (bomb, tree("many", *(tree(number) for number in range(2000)))):
            with pytest.raises(httpx.HTTPStatusError, match="429"):
                hostile.reply(asked, root)
        # One that has room, with far more bytes.
        session = hostile.reply(asked, tree("root", *(ObjectTree(object_id=one) for one in names)))
        pieces = [map(content, numbers[start::24]) for start in range(24)]
        run = asked.metadata.run_id
        together(*(lambda part=part: hostile.upload(run, session, part) for part in pieces))
        assert hostile.task > 2e9
        assert 0 < hostile.stored <= share
        assert hostile.refused > 300
        # Requests without an end, some of them to where one needs no key.
        taken: list[int] = []
        paths = ["/v1/fleet/push-object", "/v1/fleet/push-messages", "/v1/fleet/activate-node", "/v1/fleet/nothing"]
        together(*(lambda path=path: taken.append(hostile.pour(path, 200)) for path in paths * 4))
        assert len(taken) == 16
        at_work = sum(3 * size * at_once for size, at_once in LIMITS.values())
        assert memory_of(superlink, "VmHWM") < before + share + at_work
        # All but a node's own paths are shut to all who lack the server's secret, on its machine too, key or not.
        with httpx.Client(verify=ssl.create_default_context(cafile=hostile.ca)) as client:
            for path in ("/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs"):
                assert client.post(f"https://{hostile.address}{path}").status_code == 403
        assert job.wait(1200) == 0, job.tail(40)
        assert server.status() is None
    assert [updates for _, updates in local_fleet.server.completed_rounds()] == [1, 1]
    assert (local_fleet.run_folder / "result.json").exists()
