"""The test vectors of docs/protocol.md hold for the worker's code, which made them, and for the small device."""

import base64
import contextlib
import hashlib
import json
import os
import struct
from array import array
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fairfold.checksums import line_with_checksum
from fairfold.device import uploads
from fairfold.device.exchange import PulledMessage
from fairfold.device.masked import DeviceEncoding, Measured
from fairfold.device.model import CoOccurrenceModel, packed_bytes
from fairfold.device.protobuf import bytes_field, number_field, parse_fields, text_field
from fairfold.device.records import pack_records, parse_records
from fairfold.device.store import DeviceStore, parse_tables
from fairfold.device.stored_model import MODEL_FILE
from fairfold.device.tasks import SmallDevice
from fairfold.device.uploads import UserHistory
from fairfold.errors import InvalidMessage, InvalidSettings, RequestRefused
from fairfold.flower import LocalFile, make_client_app
from fairfold.flower.client import ClientRuntime
from fairfold.flower.fleet import connection
from fairfold.flower.fleet.credentials import Token
from fairfold.privacy.secure import keys
from fairfold.privacy.secure.log import device_name
from fairfold.privacy.secure.messages import KEY
from tests.vectors.make import FOLDER
from tests.vectors.secure import secure_vectors
from tests.vectors.sessions import as_message, packed, prepare


def vectors(name: str) -> dict[str, Any]:
    """One file of vectors."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def content(text: str) -> bytes:
    """Bytes that are written in base64."""
    return base64.b64decode(text)


# -- transport and objects ---------------------------------------------------------------------------------------------


def test_requests() -> None:
    given = vectors("transport")
    signing = given["signing"]
    key = load_pem_public_key(signing["public_key_pem"].encode())
    assert isinstance(key, EllipticCurvePublicKey)
    key.verify(content(signing["signature"]), signing["timestamp"].encode(), ECDSA(hashes.SHA256()))
    bodies = {one["name"]: (one["given"], content(one["body"])) for one in given["requests"]}
    for name in ("pull-object", "push-object", "confirm-message-received"):
        of, body = bodies[name]
        mine = bytes_field(1, number_field(1, int(of["node"], 16))) + number_field(2, int(of["run"], 16))
        mine += text_field(3, of.get("object", of.get("message")))
        if name == "push-object":
            mine += bytes_field(4, content(of["content"])) + text_field(5, of["session"])
        assert mine == body, name
    (absent,) = (one for one in given["responses"] if one["name"].endswith("not there yet"))
    assert 3 not in parse_fields(content(absent["body"]))


def test_joining() -> None:
    given = vectors("transport")
    of, pem = given["joining"], given["signing"]["public_key_pem"]
    token = Token.parse(of["token"])
    assert (token.secret.hex(), token.authority.hex()) == (of["secret"], of["authority"])
    for text in of["refused"]:
        with pytest.raises(InvalidSettings):
            Token.parse(text)
    key = load_pem_public_key(pem.encode())
    assert isinstance(key, EllipticCurvePublicKey)
    assert keys.point_of(key).hex() == of["point"]
    assert f"{device_name(bytes.fromhex(of['point'])):x}" == of["name"]
    digest = hashlib.sha256(b"fairfold device" + bytes.fromhex(of["point"])).digest()  # as docs/protocol.md says it
    assert int(of["name"], 16) == 1 + int.from_bytes(digest[:8], "big") % (2**63 - 1)


def test_a_message_is_pulled_and_a_reply_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = vectors("transport")["exchange"]
    calls = list[tuple[str, bytes]]()

    def call(name: str, body: bytes) -> bytes:
        calls.append((name, body))
        return bytes_field(3, next(iter(given["objects"])).encode()) if name == "push-messages" else b""

    message = PulledMessage(call, content(given["pull-messages"]))
    found = {
        "run": f"{message.run:x}", "sender": message.sender, "node": f"{message.node:x}", "group": message.group,
        "kind": message.kind, "ttl": message.ttl, "created": message.created, "message": message.message_id,
    }  # fmt: skip
    assert found == given["expected"]
    monkeypatch.setattr("time.time", lambda: given["reply"]["now"])
    message.send(records_of(given["reply"]["records"]), given["reply"]["seconds"])
    assert calls[0] == ("push-messages", content(given["push-messages"]))
    assert calls[1][0] == "push-object"
    assert content(next(iter(given["objects"].values()))) in calls[1][1]


def records_of(described: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Records from their description."""
    codes = {"float16": "e", "float32": "f", "float64": "d", "int64": "q", "int32": "i", "uint8": "B"}
    found: dict[str, dict[str, Any]] = {}
    for name, of in described.items():
        if "config" in of:
            found[name] = {key: content(value) if kind == "bytes" else value for key, kind, value in of["config"]}
        else:
            found[name] = {key: array(codes[dtype], numbers) for key, (dtype, numbers) in of["arrays"].items()}
    return found


def test_objects() -> None:
    given = vectors("objects")
    for case in given["cases"]:
        stored = {name: content(one) for name, one in case["objects"].items()}
        assert all(hashlib.sha256(one).hexdigest() == name for name, one in stored.items())
        described = case["records"]
        half = any("half" in of.get("arrays", {}) for of in described.values())  # sent by the server alone
        if not half:
            objects: dict[str, bytes] = {}
            tree = pack_records(records_of(described), objects)
            assert (tree.object_id, objects) == (case["id"], stored), case["name"]
        parsed = parse_records(case["id"], stored)
        for name, of in described.items():
            for key, (_, numbers) in of.get("arrays", {}).items():
                assert parsed[name][key].tolist() == numbers
            if "config" in of:
                assert parsed[name] == records_of({name: of})[name]
    chunks = given["chunks"]
    objects = {}
    vector = array("f", bytes(4 * chunks["float32"]["zeros"])) + array("f", chunks["float32"]["then"])
    assert pack_records({"arrays": {"sum": vector}}, objects).object_id == chunks["id"]
    assert {name: len(one) for name, one in objects.items()} == chunks["lengths"]


# -- what a device computes --------------------------------------------------------------------------------------------


def test_uploads() -> None:
    given = vectors("uploads")
    for number, expected in given["scatter"]:
        assert uploads.scatter(number) == expected
    for one in given["histories"]:
        assert sorted(uploads.held_out_items(one["items"])) == one["held_out"]
        assert uploads.scatter(sum(one["items"]) * 7 + len(one["items"])) == one["chance"]
    for length, exponent, weight in given["pair_weight"]:
        assert uploads.pair_weight(length, exponent) == weight
    for case in given["cases"]:
        users = [UserHistory(list(items), list(of)) for items, of in zip(case["users"], case["states"], strict=True)]
        keys = {key: case[key] for key in ("head", "leading", "share", "most", "exponent")}
        sums = uploads.upload(users, **keys, part=tuple(case.get("part", (0, 1))))
        assert [user.states for user in users] == case["states_after"]
        assert ("sum.indices" in sums) == ("indices" in case)
        assert list(sums.get("sum.indices", [])) == case.get("indices", [])
        assert [number * 65_536 for number in sums["sum"]] == case["sum_times_65536"]
    assert any("indices" in case for case in given["cases"])
    assert not all("indices" in case for case in given["cases"])


def test_signed_models(tmp_path: Path) -> None:
    given, files = vectors("signed"), [content(case["file"]) for case in vectors("models")["cases"]]
    device = SmallDevice(LocalFile(tmp_path / "mine.csv"), "1x", tmp_path / "state", {"signer": given["signer"]})
    path = device.folder / MODEL_FILE
    for message in given["messages"]:
        before = path.read_bytes() if path.exists() else None
        facts = {"version": 10, **message["facts"]}
        records = {"arrays": {"file": array("B", files[message["file"]])}, "fairfold": facts}
        if message["stored"]:
            device.reply("query.model", records)
            assert path.read_bytes() == files[message["file"]], message["what"]
        else:
            with pytest.raises(InvalidMessage, match=r"signature|older model"):
                device.reply("query.model", records)
            assert path.read_bytes() == before, message["what"]


def test_models() -> None:
    given = vectors("models")
    kinds = set[str]()
    for case in given["cases"]:
        tables, _, _ = parse_tables(content(case["file"]))
        tensors = {name: numbers.tobytes() for name, (_, numbers) in tables.items()}
        settings = json.loads(parse_metadata(content(case["file"]))["settings"])
        model = CoOccurrenceModel(tensors, case["projections"], settings["algorithm"]["pair_weight"])
        kinds |= set(case["projections"])
        for one in case["histories"]:
            scores, expected = model.scores(one["rows"], given["items"]).tolist(), one["scores"]
            scored = [item for item, score in enumerate(scores) if isfinite(score)]
            assert [scores[item] for item in scored] == pytest.approx([expected[item] for item in scored], abs=1e-5)
            worst = min(expected[item] for item in scored)
            assert all(expected[item] < worst for item in set(range(given["items"])).difference(scored))
    assert kinds == {"rows", "pairs", "neighbors", "popularity"}


def test_lists_of_pairs() -> None:
    given = vectors("models")["lists"]
    for case in given:
        tensors = {name: content(one) for name, one in case["tensors"].items()}
        assert all(len(tensors[name]) == packed_bytes(held) for name, held in case["projections"].items())
        if not case["histories"]:
            with pytest.raises(InvalidMessage):
                CoOccurrenceModel(tensors, case["projections"], case["pair_weight"])
            continue
        model = CoOccurrenceModel(tensors, case["projections"], case["pair_weight"])
        for one in case["histories"]:
            scores = model.scores(one["rows"], case["projections"]["rows"]["shape"][0])
            assert [max(scores[item], 0) for item in one["items"]] == pytest.approx(
                [max(score, 0) for score in one["scores"]], abs=1e-6
            )
    assert sum(not case["histories"] for case in given) >= 6
    assert sum(score > 0 for case in given for one in case["histories"] for score in one["scores"]) > 50


def parse_metadata(file: bytes) -> dict[str, str]:
    """The metadata of a model file."""
    length = struct.unpack("<Q", file[:8])[0]
    found: dict[str, str] = json.loads(file[8 : 8 + length])["__metadata__"]
    return found


# -- sessions ----------------------------------------------------------------------------------------------------------


@contextmanager
def device_of(folder: Path, given: dict[str, Any]) -> Iterator[tuple[LocalFile, Path]]:
    """A device's file and state folder, with its name and keys in it."""
    state = folder / "state"
    state.mkdir(parents=True)
    (state / "name").write_text(line_with_checksum(given["name"]))
    prepare(state, given.get("identity"))
    yield LocalFile(folder / "mine.csv", holdout=given["holdout"]), state


RUNS = [("session", 0), ("session", 1), ("secure_session", 0)]


@pytest.mark.parametrize(("name", "number"), RUNS)
def test_the_small_device_replies_as_recorded(tmp_path: Path, name: str, number: int) -> None:
    given = vectors(name)["devices"][number]
    rules = {"min-cohort": given["min_cohort"], "privacy": "secure"} if "identity" in given else {}
    with device_of(tmp_path, given) as (file, state):
        known: dict[str, Any] = {}
        for step in given["steps"]:
            if "file" in step:
                Path(file.path).write_text(step["file"])
            objects = {name: content(one) for name, one in step["message"]["objects"].items()}
            device = SmallDevice(file, given["capacity"], state, rules)
            with given_draws(step):
                records = device.reply(step["kind"], parse_records(step["message"]["id"], objects))
            require_reply(records, step["reply"])
            known |= step["changed"]
            require_state(state, known)
        assert (state / "model.safetensors").exists()


@contextmanager
def given_draws(step: dict[str, Any]) -> Iterator[None]:
    """The recorded random numbers in place of the system's."""
    draws = step.get("draws", {})
    secrets = [bytes.fromhex(draws[key]) for key in ("mask_secret", "share_secret") if key in draws]
    others = [bytes.fromhex(draws[key]) for key in ("seed", "nonce") if key in draws]
    factors = [int(one, 16) for key in ("seed_factors", "mask_secret_factors") for one in draws.get(key, [])]
    system = os.urandom

    def urandom(count: int) -> bytes:
        return others.pop(0) if count == KEY and others else system(count)

    with mock.patch("os.urandom", urandom), contextlib.ExitStack() as stack:
        if secrets:
            stack.enter_context(mock.patch.object(keys, "new_secret", side_effect=secrets))
        if factors:
            stack.enter_context(mock.patch("secrets.randbelow", side_effect=factors))
        yield


def require_reply(records: dict[str, dict[str, Any]], reply: dict[str, Any]) -> None:
    """The records are those of the reply; qualities may differ in their last digits."""
    expected = {name: content(one) for name, one in reply["objects"].items()}
    quality = parse_records(reply["id"], expected).get("fairfold", {}).get("quality")
    if quality is not None:
        assert records["fairfold"]["quality"] == pytest.approx(quality, abs=1e-6)
        records["fairfold"]["quality"] = quality
    objects: dict[str, bytes] = {}
    assert pack_records(records, objects).object_id == reply["id"]
    assert objects == expected


def require_state(folder: Path, known: dict[str, Any]) -> None:
    """The stored state says what the vectors say."""
    state = DeviceStore(folder).load()
    assert f"{state.run:x}" == known["run"]
    assert f"{state.acknowledged.update_id:x}" == known["acknowledged"]
    assert (None if state.pending is None else f"{state.pending.update_id:x}") == known["pending"]
    assert {str(item): number for item, number in state.item_numbers.items()} == known["item_numbers"]
    assert state.user_names == known["user_names"]
    assert {name: numbers.tolist() for name, (_, numbers) in state.history.items()} == known["history"]
    if state.pending is not None:
        tables = {name: numbers.tolist() for name, (_, numbers) in state.pending.local_state.items()}
        assert tables == known["pending_state"]


@pytest.mark.parametrize(("name", "number"), RUNS)
def test_the_worker_s_code_replies_as_recorded(tmp_path: Path, name: str, number: int) -> None:
    given = vectors(name)["devices"][number]
    rules = {"min-cohort": given["min_cohort"], "privacy": "secure"} if "identity" in given else {}
    with device_of(tmp_path, given) as (file, state):
        for step in given["steps"]:
            if "file" in step:
                Path(file.path).write_text(step["file"])
            app = make_client_app(file, capacity=given["capacity"], state=state)
            with given_draws(step):
                reply = app(as_message(step), Context(1, 1, dict(rules), RecordDict(), {}))
            assert packed(reply) == step["reply"], step["kind"]
            assert isinstance(reply, Message)


# -- parts of secure sums ----------------------------------------------------------------------------------------------


def test_secure_parts() -> None:
    given = vectors("secure")
    del given["about"]
    assert given == json.loads(json.dumps(secure_vectors()))  # as the code makes them now
    for case in given["fixed_point"]:
        steps = {} if case["what"] == "gradient" else case["steps"]  # they follow from the bound
        encoding = DeviceEncoding(steps, case["clients"], clip=case.get("clip", 1.0))
        measured = Measured(case["sums"], case["weight"], case["quality"], case["users"])
        assert encoding.encode(measured).tolist() == case["encoded"]


@pytest.mark.parametrize("program", ["small device", "worker"])
@pytest.mark.parametrize("number", [0, 1])
def test_the_log_is_followed_as_recorded(
    program: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device takes part by one log that only grows, fetches what it lacks, and refuses members that are not in it."""
    given = vectors("secure")["log"]
    own, shown, asked = given["devices"][number], "", list[int]()

    def fetch(_server: str, _authority: Path, start: int) -> Generator[bytes]:
        asked.append(start)
        yield shown.encode()[start:]

    monkeypatch.setattr(connection, "stream_roster", fetch)
    rules = {"min-cohort": 3, "signer": given["signer"], "server": "here", "authority": "ca.crt", "privacy": "secure"}
    with device_of(tmp_path, own | {"holdout": 0.2}) as (file, state):
        small = SmallDevice(file, "1x", state, rules, fetch_log=partial(fetch, "here", Path("ca.crt")))
        runtime = ClientRuntime(file, None, "1x", state, share_quality=True, repeatable=False)
        for step in own["steps"]:
            shown, content = step["log"], bytes.fromhex(step["message"])
            facts = ConfigRecord({"version": 10, "secure": content})
            reply: dict[str, Any] = {}
            with given_draws(step):
                try:
                    if program == "worker":
                        message = Message(RecordDict({"fairfold": facts}), 1, step["kind"])
                        reply = dict(runtime.handle(message, Context(1, 1, dict(rules), RecordDict(), {})))
                    else:
                        reply = small.reply(step["kind"], {"fairfold": dict(facts)})
                    assert reply["fairfold"]["secure"].hex() == step["reply"], step["what"]
                except RequestRefused as error:
                    assert error.given == step["refused"], step["what"]  # noqa: PT017
            assert (bool(reply), asked) == (not step["refused"], step["asked"]), step["what"]
            asked.clear()


def test_private_uploads() -> None:
    given = vectors("uploads")["private"]
    users = [UserHistory(items, [0] * len(items)) for items in given["users"]]
    for user, expected in zip(users, given["residuals_times_256"], strict=True):
        assert uploads.residual_steps(user.items, given["item_shares"]) == expected
    sums = uploads.private_upload(users, given["item_shares"], given["leading"], share=1.0)
    assert [number * 65_536 for number in sums["sum"]] == given["sum_times_65536"]
    for user, weight in zip(users, given["count_weights"], strict=True):
        sums = uploads.statistics([user.items], range(10), is_private=True, with_pairs=False)
        assert max(sums["counts"]) == weight
        assert sums["users"].tolist() == [1, 0, 0]
