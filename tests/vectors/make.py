"""Make the test vectors of docs/protocol.md from the worker's own code: ``python -m tests.vectors.make``.

Every implementation of a device runs them (tests/device). Bytes are in base64, keys, ids and digests in hexadecimal
digits; keys and random numbers are fixed.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, node_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fairfold.algorithms.cooccurrence import cooccurrence, tuning
from fairfold.algorithms.cooccurrence.parts import TrianglePart, is_dropped, sync_states, uploaded_parts
from fairfold.data import Interactions
from fairfold.flower.fleet.credentials import Token
from fairfold.flower.local_data import _uniform
from fairfold.privacy import gram
from fairfold.privacy.secure.keys import point_of
from fairfold.privacy.secure.log import device_name
from tests.vectors.ratings import rating_vectors
from tests.vectors.secure import secure_vectors
from tests.vectors.sessions import models, secure_session, session, signed_models

FOLDER = Path(__file__).parent
NODE, RUN = 0xF1E2D3C4B5A69788, 0x1122334455667788  # 64 bits: a number of JavaScript would not hold them
OBJECT = "0f" * 32


def base64_of(content: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(content).decode()


def write(name: str, about: str, vectors: Mapping[str, Any]) -> None:
    """Write one file of vectors, short lists and objects in a line."""
    (FOLDER / f"{name}.json").write_text(_lines({"about": about, **vectors}, "") + "\n")


def _lines(value: Any, margin: str) -> str:
    text = json.dumps(value)
    if len(text) < 120 or not isinstance(value, dict | list) or (isinstance(value, list) and not _nested(value)):
        return text
    inner = margin + " "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {_lines(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{margin}}}"
    return "[\n" + ",\n".join(inner + _lines(one, inner) for one in value) + f"\n{margin}]"


def _nested(value: list[Any]) -> bool:
    return any(isinstance(one, dict | list) for one in value)


# -- transport ---------------------------------------------------------------------------------------------------------


def transport() -> dict[str, Any]:
    """Signed headers, and the bytes of every request and response."""
    key = ec.derive_private_key(
        int.from_bytes(hashlib.sha384(b"fairfold test vectors").digest(), "big") >> 8, ec.SECP384R1()
    )
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    timestamp = "2026-01-02T03:04:05.678901+00:00"
    signature = key.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
    node = node_pb2.Node(node_id=NODE)
    requests: dict[str, tuple[dict[str, Any], Any]] = {
        "activate-node": (
            {"public_key": base64_of(pem), "interval": 30.0},
            fleet_pb2.ActivateNodeRequest(public_key=pem, heartbeat_interval=30.0),
        ),
        "send-node-heartbeat": (
            {"node": f"{NODE:x}", "interval": 30.0},
            heartbeat_pb2.SendNodeHeartbeatRequest(node=node, heartbeat_interval=30.0),
        ),
        "pull-messages": ({"node": f"{NODE:x}"}, fleet_pb2.PullMessagesRequest(node=node)),
        "pull-object": (
            {"node": f"{NODE:x}", "run": f"{RUN:x}", "object": OBJECT},
            message_pb2.PullObjectRequest(node=node, run_id=RUN, object_id=OBJECT),
        ),
        "confirm-message-received": (
            {"node": f"{NODE:x}", "run": f"{RUN:x}", "message": OBJECT},
            message_pb2.ConfirmMessageReceivedRequest(node=node, run_id=RUN, message_object_id=OBJECT),
        ),
        "push-object": (
            {
                "node": f"{NODE:x}",
                "run": f"{RUN:x}",
                "object": OBJECT,
                "content": base64_of(b"content"),
                "session": "s",
            },
            message_pb2.PushObjectRequest(
                node=node, run_id=RUN, object_id=OBJECT, object_content=b"content", session_id="s"
            ),
        ),
        "deactivate-node": ({"node": f"{NODE:x}"}, fleet_pb2.DeactivateNodeRequest(node_id=NODE)),
    }
    responses: dict[str, tuple[dict[str, Any], Any]] = {
        "activate-node": ({"node": f"{NODE:x}"}, fleet_pb2.ActivateNodeResponse(node_id=NODE)),
        "send-node-heartbeat": ({"accepted": True}, heartbeat_pb2.SendNodeHeartbeatResponse(success=True)),
        "pull-messages": (
            {"next_poll": 12},
            fleet_pb2.PullMessagesResponse(reconnect=fleet_pb2.Reconnect(reconnect=12)),
        ),
        "pull-object": (
            {"found": True, "available": True, "content": base64_of(b"content")},
            message_pb2.PullObjectResponse(object_found=True, object_available=True, object_content=b"content"),
        ),
        "pull-object, not there yet": (
            {"found": True, "available": False, "content": ""},
            message_pb2.PullObjectResponse(object_found=True),
        ),
        "push-messages": (
            {"objects": [OBJECT, "1e" * 32], "session": "s"},
            fleet_pb2.PushMessagesResponse(objects_to_push=[OBJECT, "1e" * 32], session_id="s"),
        ),
    }
    private = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return {
        "signing": {
            "private_key_pkcs8": base64_of(private),
            "public_key_pem": pem.decode(),
            "timestamp": timestamp,
            "signature": base64_of(signature),
            "note": "ECDSA draws a random number: verify the signature, and one of your own, by the public key",
        },
        "requests": [
            {"name": name, "given": given, "body": base64_of(message.SerializeToString())}
            for name, (given, message) in requests.items()
        ],
        "responses": [
            {"name": name, "body": base64_of(message.SerializeToString()), "expected": expected}
            for name, (expected, message) in responses.items()
        ],
        "exchange": exchange(),
        "joining": joining(key.public_key()),
    }


def joining(key: ec.EllipticCurvePublicKey) -> dict[str, Any]:
    """An invitation with its parts, and the name of a device by its key."""
    token = Token(hashlib.sha256(b"secret").digest()[:16], hashlib.sha256(b"authority").digest())
    text, point = str(token), point_of(key)
    mistyped = [text[:-1], text[:8] + ("B" if text[8] == "A" else "A") + text[9:], text.removeprefix("ff1-"), ""]
    return {
        "token": text, "secret": token.secret.hex(), "authority": token.authority.hex(), "refused": mistyped,
        "point": point.hex(), "name": f"{device_name(point):x}",
    }  # fmt: skip


def exchange() -> dict[str, Any]:
    """A pulled message, and what is pushed in reply."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 3
    asked = Message(
        RecordDict({"fairfold": ConfigRecord({"version": 10})}), NODE, "query.capacity", ttl=86_400.0, group_id="7"
    )
    asked.metadata.__dict__["_created_at"] = 1_767_322_000.25
    asked.metadata.__dict__["_dst_task_id"] = 4
    tree = get_object_tree(asked)
    asked.metadata.__dict__["_message_id"] = asked.object_id
    announced = message_to_proto(asked)
    announced.ClearField("content")
    announced.metadata.message_id = ""
    pulled = fleet_pb2.PullMessagesResponse(messages_list=[announced], message_object_trees=[tree])
    facts: dict[str, Any] = {"version": 10, "capacity": "4x", "number": -1, "name": "1f"}
    reply = Message(RecordDict({"fairfold": ConfigRecord(facts)}), reply_to=asked)
    reply.metadata.__dict__["_created_at"] = 1_767_322_010.5
    reply.metadata.__dict__["_ttl"] = 86_389.75
    reply.metadata.__dict__["_message_id"] = ""
    objects = get_all_nested_objects(reply)
    tree = get_object_tree(reply)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    pushed = message_to_proto(reply)
    pushed.content.Clear()
    pushed.content.SetInParent()
    request = fleet_pb2.PushMessagesRequest(
        node=node_pb2.Node(node_id=NODE),
        messages_list=[pushed],
        message_object_trees=[tree],
        clientapp_runtime_list=[0.5],
    )
    return {
        "pull-messages": base64_of(pulled.SerializeToString()),
        "expected": {
            "run": f"{RUN:x}", "sender": asked.metadata.src_node_id, "node": f"{NODE:x}", "group": "7",
            "kind": "query.capacity", "ttl": 86_400.0, "created": 1_767_322_000.25, "message": asked.object_id,
        },
        "reply": {"records": described(reply.content), "now": 1_767_322_010.5, "seconds": 0.5},
        "objects": {name: base64_of(one.deflate()) for name, one in objects.items()},
        "push-messages": base64_of(request.SerializeToString()),
    }  # fmt: skip


# -- objects -----------------------------------------------------------------------------------------------------------

KINDS = {bool: "bool", int: "int", float: "double", str: "text", bytes: "bytes", list: "doubles"}


def described(records: RecordDict) -> dict[str, Any]:
    """Records as plain values, with the kind of each."""
    found: dict[str, Any] = {}
    for name, record in records.items():
        if isinstance(record, ConfigRecord):
            entries: list[list[Any]] = [[key, KINDS[type(value)], value] for key, value in record.items()]
            found[name] = {"config": [[k, t, base64_of(v) if t == "bytes" else v] for k, t, v in entries]}
        else:
            arrays: dict[str, Any] = dict(record.items())
            found[name] = {"arrays": {key: [array.dtype, array.numpy().tolist()] for key, array in arrays.items()}}
    return found


def objects() -> dict[str, Any]:
    """Records, and the objects that they are sent as."""
    facts: dict[str, Any] = {
        "version": 10, "minus": -3, "large": 2**62, "yes": True, "no": False, "weight": 2.5, "zero": 0.0, "name": "é",
        "scales": [1.0, 0.5], "none": [], "secure": b"\x00\xff",
    }  # fmt: skip
    vectors = {
        "sum": numpy.array([1, -2.5, 3], "float32"), "none": numpy.zeros(0, "float64"),
        "numbers": numpy.array([7, -1], "int64"), "sum.indices": numpy.array([0, 5], "int32"),
        "half": numpy.array([0.5, 65504], "float16"), "file": numpy.array([0, 255], "uint8"),
    }  # fmt: skip
    twice = {"a": vectors["sum"], "b": vectors["sum"]}
    cases = {
        "all kinds of values": RecordDict({"fairfold": ConfigRecord(facts)}),
        "all kinds of vectors": _arrays(vectors),
        "arrays, facts, and one array twice": _arrays(twice, {"version": 10}),
        "no arrays": _arrays({}, {"version": 10}),
    }
    chunk = numpy.zeros(3_000_000, "float32")  # 12 MB: three chunks, of which two are the same
    chunk[-1] = 1
    large = _arrays({"sum": chunk})
    return {
        "cases": [
            {
                "name": name, "records": described(records), "id": records.object_id,
                "objects": {key: base64_of(one.deflate()) for key, one in get_all_nested_objects(records).items()},
            }
            for name, records in cases.items()
        ],
        "chunks": {
            "float32": {"zeros": len(chunk) - 1, "then": [1.0]}, "id": large.object_id,
            "lengths": {key: len(one.deflate()) for key, one in get_all_nested_objects(large).items()},
        },
    }  # fmt: skip


def _arrays(vectors: dict[str, Any], facts: dict[str, Any] | None = None) -> RecordDict:
    records = RecordDict({"arrays": ArrayRecord({name: Array(vector) for name, vector in vectors.items()})})
    if facts is not None:
        records["fairfold"] = ConfigRecord(facts)
    return records


# -- what a device computes --------------------------------------------------------------------------------------------

HISTORIES = [
    [], [3], [0, 1], [2, 5, 7], [0, 4, 6, 9, 30], list(range(0, 50, 2)), list(range(1, 15)),
    [5, 99_999, 262_143], list(range(60)),
]  # fmt: skip


def uploads() -> dict[str, Any]:
    """Hashes, held-out items, and sums of pairs."""
    numbers = [0, 1, 2, 77, 2**31, 2**32 - 1, 2**32, 2**40 + 5]
    parts = []
    for items in HISTORIES:
        mine = torch.tensor(items, dtype=torch.int64)
        mask = tuning.training_mask(mine, torch.tensor([len(items)]))
        chance = int(tuning.scatter(mine.sum() * 7 + len(items)))
        parts.append({"items": items, "held_out": mine[~mask].tolist(), "chance": chance})
    cases = []
    for head, leading, most, share, exponent in (
        (10, 10, 100, 1.0, 0.5),
        (40, 40, 100, 0.9, 1.0),
        (40, 12, 3, 1.0, 0.5),
        (3_000, 3_000, 100, 0.9, 0.5),
    ):
        for states in ("new", "uploaded, and one item is lost", "one item is new"):
            cases.append(upload_case(head, leading, most, share, exponent, states))
    for part in ((0, 3), (2, 3), (5, 16)):  # as secure aggregation needs it: all numbers, of all items
        for states in ("new", "uploaded, and one item is lost", "one item is new"):
            cases.append(upload_case(40, 35, None, 0.9, 0.5, states, part))
    return {
        "scatter": [[number, int(tuning.scatter(torch.tensor(number)))] for number in numbers],
        "histories": parts,
        "pair_weight": [
            [n, exponent, float(cooccurrence.history_weights(torch.tensor([n]), exponent)[0])]
            for exponent in (1.0, 0.5, 0.0)
            for n in (1, 2, 3, 7, 16, 75, 70_000)
        ],
        "file_rows": [
            [user, item, _uniform((user, item, None))] for user, item in (("", "3"), ("u1", "17"), ("é", "a b"))
        ],
        "private": private_case(),
        "cases": cases,
    }


def flat(lists: list[list[int]]) -> list[int]:
    """All numbers of some lists."""
    return [number for one in lists for number in one]


def upload_case(
    head: int, leading: int, most: int | None, share: float, exponent: float, which: str, part: tuple[int, int] = (0, 1)
) -> dict[str, Any]:
    """The change of some users' pairs; state 0 is new, 1 and 3 uploaded, −2 to be retracted, −1 dropped."""
    users = [items for items in HISTORIES if items and max(items) < 100]
    states = [[0] * len(items) for items in users]
    if which.startswith("uploaded"):
        states = [[1] * len(items) for items in users]
        for place, of in enumerate(states):
            of[0] = -2 if place % 2 else 1
    elif which.startswith("one"):
        states = [[1] * (len(items) - 1) + [0] for items in users]
    items, lengths = torch.tensor(flat(users)), torch.tensor([len(one) for one in users])
    before = torch.tensor(flat(states)).float()
    wanted = tuning.training_mask(items, lengths) if share < 1 else torch.ones_like(items).bool()
    held, dropped = uploaded_parts(before), is_dropped(before)
    uploaded, now = (held >> part[0] & 1).bool(), ~dropped & ((held > 0) | wanted)
    both, limit = (now & (items < head), uploaded & (items < head)), len(items) if most is None else most
    changes = cooccurrence.CoOccurrenceUpload.changes(items, lengths, *both, limit, exponent)
    size = cooccurrence.triangle_size(leading)
    whole = changes.shortest(leading, torch.float32)
    total = whole if most is not None else TrianglePart((size,), (size,), *part).reduce(whole.to_dense())
    after = sync_states(held & ~(1 << part[0]) | now.long() << part[0], dropped).int().tolist()
    found: dict[str, Any] = {"head": head, "leading": leading, "most": most, "share": share, "users": users}
    found |= {} if part == (0, 1) else {"part": list(part)}
    found |= {
        "exponent": exponent,
        "states": states,
        "states_after": [
            after[end - n : end]
            for n, end in zip(
                map(len, users), torch.tensor([len(one) for one in users]).cumsum(0).tolist(), strict=True
            )
        ],
    }
    unit = cooccurrence.UNIT
    if total.is_sparse:
        total = total.coalesce()
        found["indices"], total = total.indices()[0].tolist(), total.values()
    return found | {"sum_times_65536": (total.double() * unit).long().tolist()}


def private_case() -> dict[str, Any]:
    """Sums for noisy aggregation: each user's residuals, of a bounded norm."""
    users = [[0, 2], [1], [0, 1, 2, 3, 4, 5, 9]]
    counts = torch.tensor([5.0, 4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 0.5])
    shares = gram.item_shares(counts, len(counts)).float()
    items, lengths = torch.tensor(flat(users)), torch.tensor([len(one) for one in users])
    data = Interactions.from_pairs(torch.repeat_interleave(torch.arange(3), lengths), items, 3, 10)
    return {
        "users": users, "item_shares": shares.tolist(), "leading": 6,
        "residuals_times_256": (gram.clipped_residuals(items, lengths, shares) * gram.RESIDUAL_STEPS).long().tolist(),
        "sum_times_65536": (gram.private_sum(items, lengths, shares, 6) * 65_536).long().tolist(),
        "count_weights": gram.count_weights(data).tolist(),
    }  # fmt: skip


def main() -> None:
    """Write all files."""
    write("transport", "Requests and responses of the fleet API (docs/protocol.md, Transport).", transport())
    write("objects", "Records and the content-addressed objects of messages (docs/protocol.md, Objects).", objects())
    write("uploads", "Hashes, held-out items and uploads of the default algorithm.", uploads())
    found = models()
    write("models", "Cut models and scores of items by them (docs/export.md); scores agree to 1e-6.", found)
    write("signed", "Models sent one after another to a device that knows its server's signer.", signed_models(found))
    write(
        "ratings", "Rows of items, and a user's part in the sums of ratings; numbers agree to 1e-9.", rating_vectors()
    )
    write("session", "All messages of a run to two devices, and their replies.", session())
    write(
        "secure",
        "Parts of secure aggregation: keys, masks, shares, graph, messages, fixed point, log.",
        secure_vectors(),
    )
    write(
        "secure_session",
        "A run under secure aggregation: messages to one device, its draws, its replies.",
        secure_session(),
    )


if __name__ == "__main__":
    main()
