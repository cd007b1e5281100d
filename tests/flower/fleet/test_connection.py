"""Requests of a node, and the reasons for which they are refused."""

import json
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import Message as MessageProto

from fairfold.device.protobuf import parse_fields
from fairfold.errors import InvalidSettings
from fairfold.flower.fleet import connection, superlink
from fairfold.flower.fleet.connection import (
    API_PREFIX,
    NodeConnection,
    RefusedByServer,
    ServerConnection,
    parse_address,
)
from fairfold.flower.fleet.credentials import (
    make_certificates,
)
from tests.support.fleet import KEY, PUBLIC, FakeServer


def refused_with(connected: NodeConnection, kind: str) -> str:
    with pytest.raises(RefusedByServer) as refused:
        connected.activate()
    assert refused.value.kind == kind
    return str(refused.value)


def test_a_node_encodes_flowers_messages(fake_server: tuple[type[FakeServer], str], tmp_path: Path) -> None:
    mine, address = fake_server
    connected, number = NodeConnection(address, tmp_path / "server-keys" / "ca.crt", KEY), 2**63 + 12345
    mine.body = ActivateNodeResponse(node_id=number).SerializeToString()
    assert connected.activate() == number
    asked = ActivateNodeRequest.FromString(mine.asked)  # type: ignore[attr-defined]
    assert (asked.public_key, asked.heartbeat_interval) == (PUBLIC, 30.0)
    assert {"flwr-public-key", "flwr-signature", "flwr-timestamp"} <= set(mine.headers_seen)  # type: ignore[attr-defined]
    for known in (True, False):
        mine.body = SendNodeHeartbeatResponse(success=known).SerializeToString()
        assert connected.send_heartbeat(number) is known
    beat = SendNodeHeartbeatRequest.FromString(mine.asked)  # type: ignore[attr-defined]
    assert (beat.node.node_id, beat.heartbeat_interval) == (number, 30.0)
    mine.body = PullMessagesResponse().SerializeToString()
    assert connected.pull(number) is None
    assert PullMessagesRequest.FromString(mine.asked).node.node_id == number  # type: ignore[attr-defined]
    mine.body = PullMessagesResponse(messages_list=[MessageProto()]).SerializeToString()
    assert connected.pull(number) == mine.body
    connected.deactivate(number)
    assert DeactivateNodeRequest.FromString(mine.asked).node_id == number  # type: ignore[attr-defined]
    connected.close()


def test_every_refusal_has_its_own_message(fake_server: tuple[type[FakeServer], str], tmp_path: Path) -> None:
    mine, address = fake_server
    connected = NodeConnection(address, tmp_path / "server-keys" / "ca.crt", KEY)
    found = {}
    for kind, status, detail in (("unregistered", 403, superlink.UNREGISTERED), ("early", 409, superlink.EARLY),
                                 ("lost", 401, "Invalid"), ("busy", 503, "full"), ("refused", 500, "x")):  # fmt: skip
        mine.status, mine.body = status, json.dumps({"detail": detail}).encode()
        found[kind] = refused_with(connected, kind)
    mine.status = 401
    for off, words in ((-60, "60 s ahead of"), (400, "400 s behind")):
        mine.date = format_datetime(datetime.now(UTC) + timedelta(seconds=off), usegmt=True)
        found[words] = refused_with(connected, "clock")
        assert words.split()[-1] in found[words]
    mine.date, mine.status, mine.body = "", 200, b"\x08"  # a number that does not end
    found["broken"] = refused_with(connected, "broken")
    make_certificates(tmp_path / "other", ["localhost"])
    found["authority"] = refused_with(NodeConnection(address, tmp_path / "other" / "ca.crt", KEY), "authority")
    found["unreachable"] = refused_with(
        NodeConnection("localhost:9", tmp_path / "server-keys" / "ca.crt", KEY), "unreachable"
    )
    assert len(set(found.values())) == len(found)
    assert "too early" in found["early"]
    assert "unregistered" in found["unregistered"]
    assert "wrong authority" in found["authority"]
    connected.close()


def test_refused_certificates_have_different_messages() -> None:
    error, found = ssl.SSLCertVerificationError(), {}
    for code, kind in (
        (connection.EXPIRED, "clock"),
        (connection.NOT_YET_VALID, "clock"),
        (62, "host"),
        (19, "authority"),
    ):
        error.verify_code = code
        refused = connection._certificate_refusal(error, "a.example")
        assert refused.kind == kind
        found[code] = str(refused)
    assert len(set(found.values())) == 4
    assert "has expired by this device's clock" in found[connection.EXPIRED]
    assert "not for a.example" in found[62]


def test_what_is_no_message_is_refused() -> None:
    for content in (b"\x08", b"\x12\x05a", b"\xff" * 20, b"\x0b", b"\x09abc"):
        with pytest.raises(RefusedByServer):
            connection._first_number(content)
    content = b"\x08\x96\x01\x12\x02ab\x19" + bytes(8) + b"\x25" + bytes(4)
    assert parse_fields(content) == {1: [150], 2: [b"ab"], 3: [bytes(8)], 4: [bytes(4)]}
    assert connection._first_number(content) == 150
    assert connection._first_number(b"") == 0


def test_addresses() -> None:
    assert parse_address("https://a.example:99/") == ("a.example", 99)
    assert parse_address("a.example") == ("a.example", 8000)
    assert parse_address("[::1]:99") == ("::1", 99)
    for wrong in ("", "http://a:1", "https://", "a.example:0", "a.example:99999", "a/b:1"):
        with pytest.raises(InvalidSettings, match="name and port"):
            parse_address(wrong)


def test_a_line_without_trust_shows_nothing(fake_server: tuple[type[FakeServer], str]) -> None:
    mine, address = fake_server
    mine.body = b"certificate"
    connected = ServerConnection(address, None)
    assert connected.request("GET", API_PREFIX + "authority") == b"certificate"
    connected.close()
    assert "flwr-signature" not in mine.headers_seen  # type: ignore[attr-defined]
