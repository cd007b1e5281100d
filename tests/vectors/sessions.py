"""Runs whose messages are test vectors: what the server sends to some devices, and what the worker's code replies."""

import base64
import contextlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_der_private_key
from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fairfold.algorithms.cooccurrence.scorer import CoOccurrenceScorer, stored_scorer
from fairfold.checksums import line_with_checksum, with_checksum
from fairfold.config import Settings
from fairfold.device.stored_model import parse_model, signed_model
from fairfold.errors import InvalidMessage
from fairfold.flower import FairStrategy, InProcessGrid, LocalFile, make_client_app, secure_aggregation
from fairfold.flower.client_store import ClientStore
from fairfold.privacy.secure import keys, messages
from fairfold.subspace.packed import QuantizedPairs, QuantizedRows
from fairfold.subspace.projection import Projection, describe_projection, make_projection
from tests.support.settings import make_settings

ITEMS = 60
CAPACITIES = ("1x", "4x", "16x")


def file_of(seed: int, users: int) -> str:
    """A device's file of users with histories of very different lengths."""
    draw, lines = random.Random(seed), ["user,item"]
    for user in range(users):
        items = draw.sample(range(ITEMS), draw.randint(1, 25))
        lines += [f"u{user},{int(item * draw.random() ** 0.5)}" for item in items]
    return "\n".join(lines) + "\n"


def without_a_row(file: str) -> str:
    """The same file after its owner has removed one row, and added one of an item that another user has."""
    head, first, *rest = file.splitlines()
    user, item = first.partition(",")[0], rest[-1].partition(",")[2]
    return "\n".join([head, f"{user},{item}", *rest]) + "\n"


@contextmanager
def fixed_randomness(seed: int) -> Iterator[list[tuple[str, Any]]]:
    """Draws from a seed in place of the system's; yields those that keys and shares are made of."""
    draw, made = random.Random(seed), list[tuple[str, Any]]()

    def randbelow(end: int) -> int:
        made.append(("number", found := draw.randrange(end)))
        return found

    def urandom(count: int) -> bytes:
        found = draw.randbytes(count)
        if count == messages.KEY:  # names of temporary files are shorter
            made.append(("bytes", found))
        return found

    def new_secret() -> bytes:
        made.append(("secret", found := draw.randbytes(32)))
        return found

    with (
        mock.patch("secrets.randbelow", randbelow),
        mock.patch("os.urandom", urandom),
        mock.patch.object(keys, "new_secret", new_secret),
        mock.patch.object(secure_aggregation, "new_sequence_number", side_effect=count(1)),
    ):
        yield made


def packed(message: Message) -> dict[str, Any]:
    """A message's records: id, and the content of every object."""
    content = deepcopy(message).content  # objects that were packed cannot be copied
    objects = get_all_nested_objects(content)
    named = {name: base64.b64encode(one.deflate()).decode() for name, one in objects.items()}
    return {"id": content.object_id, "objects": named}


def as_message(step: dict[str, Any]) -> Message:
    """The message of a step, as Flower hands it to an app."""
    objects = {name: base64.b64decode(one) for name, one in step["message"]["objects"].items()}
    content = inflate_object_from_contents(step["message"]["id"], objects)
    assert isinstance(content, RecordDict)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(content, 1, step["kind"])
    message.metadata.__dict__["_message_id"] = "message"
    return message


class Recorder:
    """The devices of a run: the worker's code replies, and some devices' messages are recorded."""

    def __init__(
        self, folder: Path, files: list[str], recorded: tuple[int, ...], capacities: Sequence[str],
        draws: list[tuple[str, Any]],
    ) -> None:  # fmt: skip
        self.folder, self.files, self.capacities, self.draws = folder, list(files), capacities, draws
        self.steps: dict[int, list[dict[str, Any]]] = {number: [] for number in recorded}
        self.states: dict[int, dict[str, Any]] = {number: {} for number in recorded}  # as of their last step
        self.changed = set(recorded)  # devices whose file a step has to give

    def state(self, number: int) -> Path:
        """The folder of a device."""
        return self.folder / str(number)

    def __call__(self, message: Message, context: Context) -> Message:
        number, kind = int(context.node_config["device"]), message.metadata.message_type
        trained = [step for step in self.steps.get(number, []) if step["kind"] == "train"]
        if len(trained) == 4 and number not in self.changed and not self.steps[number][-1].get("file"):
            self.files[number] = without_a_row(self.files[number])
            self.changed.add(number)
        path = self.folder / f"{number}.csv"
        path.write_text(self.files[number])
        asked = packed(message) if number in self.steps else {}
        self.draws.clear()
        app = make_client_app(
            LocalFile(path, holdout=0.2),
            capacity=self.capacities[number % len(self.capacities)],
            state=self.state(number),
        )
        reply = app(message, context)
        if number in self.steps:
            step: dict[str, Any] = {"kind": kind}
            if number in self.changed:
                step["file"] = self.files[number]
                self.changed.discard(number)
            state = self.summary(number)
            changed = {key: value for key, value in state.items() if self.states[number].get(key, ...) != value}
            self.states[number] = state
            step |= {"message": asked, "reply": packed(reply), "changed": changed}
            if parts := drawn(kind, self.draws):
                step["draws"] = parts
            self.steps[number].append(step)
        return reply

    def summary(self, number: int) -> dict[str, Any]:
        """What the device's stored state says."""
        state = ClientStore(self.state(number)).load()
        tables = state.history
        found = {
            "run": f"{state.run:x}", "numbering": f"{state.numbering:x}",
            "item_numbers": {str(item): given for item, given in state.item_numbers.items()},
            "user_names": state.user_names,
            "history": {name: of.tolist() for name, of in tables.items()},
            "acknowledged": f"{state.acknowledged.update_id:x}",
            "pending": None if state.pending is None else f"{state.pending.update_id:x}",
        }  # fmt: skip
        if state.pending is not None:
            found["pending_state"] = {name: of.flatten().tolist() for name, of in state.pending.local_state.items()}
        return found


def drawn(kind: str, draws: list[tuple[str, Any]]) -> dict[str, Any]:
    """The random parts of a reply, in the order of their use."""
    if kind == "query.secure_keys":
        parts = [value.hex() for which, value in draws if which in ("secret", "bytes")]
        return dict(zip(("mask_secret", "share_secret", "seed", "nonce"), parts, strict=True))
    if kind == "query.secure_shares":
        numbers = [f"{value:x}" for which, value in draws if which == "number"]
        half = len(numbers) // 2
        return {"seed_factors": numbers[:half], "mask_secret_factors": numbers[half:]}
    return {}


def set_name(folder: Path, seed: int) -> None:
    """Write a device's name before its first message."""
    folder.mkdir(parents=True)
    (folder / "name").write_text(line_with_checksum(f"{random.Random(seed).getrandbits(62):x}"))


def make_identity(seed: int) -> dict[str, str]:
    """A device's enrolled key, and its signer with the certificate."""
    draw = random.Random(seed)
    enrolled = ec.derive_private_key(draw.getrandbits(380), ec.SECP384R1())
    signer = Ed25519PrivateKey.from_private_bytes(draw.randbytes(32))
    certified = b"fairfold signer" + signer.public_key().public_bytes_raw()
    signed = enrolled.sign(certified, ec.ECDSA(hashes.SHA384(), deterministic_signing=True))
    certificate = b"".join(part.to_bytes(48, "big") for part in decode_dss_signature(signed))
    stored = {
        "signer": signer.private_bytes_raw().hex(), "certificate": certificate.hex(),
        "enrolled": keys.point_of(enrolled.public_key()).hex(),
    }  # fmt: skip
    pkcs8 = enrolled.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return stored | {"key_pkcs8": base64.b64encode(pkcs8).decode()}


def prepare(folder: Path, identity: dict[str, str] | None) -> None:
    """Write a device's enrolled key and signer before its first message."""
    if identity:
        secure = folder / "secure"
        secure.mkdir(parents=True)
        enrolled = load_der_private_key(base64.b64decode(identity["key_pkcs8"]), None)
        (secure / "key").write_bytes(enrolled.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        stored = {key: identity[key] for key in ("signer", "certificate", "enrolled")}
        (secure / "signer.json").write_bytes(with_checksum(stored))


def record(
    settings: Settings,
    files: list[str],
    recorded: tuple[int, ...],
    capacities: Sequence[str] = CAPACITIES,
    **config: Any,
) -> dict[str, Any]:
    """Run a federation of devices; returns some of them with all their messages."""
    seed = 20_260
    with tempfile.TemporaryDirectory() as folder, fixed_randomness(seed) as draws:
        recorder = Recorder(Path(folder), files, recorded, capacities, draws)
        identities = []
        for number in range(len(files)):
            set_name(recorder.state(number), number + 1)
            identities.append(make_identity(number + 1) if config else {})
            prepare(recorder.state(number), identities[-1])
        names = [(recorder.state(number) / "name").read_text() for number in range(len(files))]
        app: Any = recorder
        grid = InProcessGrid(app, [{"device": number, **config} for number in range(len(files))])
        FairStrategy(settings, ITEMS).start(grid, num_rounds=settings.run.rounds)
        devices = []
        for number, steps in recorder.steps.items():
            one: dict[str, Any] = {
                "capacity": capacities[number % len(capacities)],
                "holdout": 0.2,
                "name": names[number].split()[0],
            }
            if config:
                one |= {"identity": identities[number], "min_cohort": config["min-cohort"]}
            devices.append(one | {"steps": steps})
    return {"devices": devices}


def session() -> dict[str, Any]:
    """A plain run of 16 rounds."""
    files = [file_of(number, 4) for number in range(6)]
    settings = make_settings(rounds=16, evaluate_every=4, clients_per_round=None, capacities="1x-4x-16x")
    return record(settings, files, (1, 2))


def secure_session() -> dict[str, Any]:
    """A run of three rounds under secure aggregation among eight devices."""
    files = [file_of(number + 50, 1 + number % 2) for number in range(8)]
    privacy = {"level": "secure", "min_cohort": 3}
    algorithm = {"kind": "co_occurrence", "min_item_users": 0, "support": 1}
    settings = make_settings(
        rounds=3, evaluate_every=1, clients_per_round=None, capacities="1x-4x", privacy=privacy, algorithm=algorithm
    )
    return record(settings, files, (1,), ("1x", "4x"), **{"min-cohort": 3, "privacy": "secure"})


def models() -> dict[str, Any]:
    """Model files as devices are given them, with the scores of items for some histories."""
    found = []
    for capacities in ("1x-4x-16x", "4kB-2kB-1kB"):
        files = [file_of(number, 4) for number in range(6)]
        settings = make_settings(rounds=4, evaluate_every=4, clients_per_round=None, capacities=capacities)
        given = record(settings, files, (0, 1, 2), capacities.split("-"))["devices"]
        found += [model_case(device["steps"][-1]) for device in given]
    return {"items": ITEMS, "cases": found, "lists": list_cases()}


def list_cases() -> list[dict[str, Any]]:
    """Lists of pairs and neighbors alone, without a row, and scores by them; damaged ones, which have none."""
    found = []
    for items, pairs, neighbors in ((2, 1, 1), (9, 36, 72), (60, 0, 1), (300, 5, 40), (4_000, 61, 0), (70_000, 17, 30)):
        draw = random.Random(items)
        histories = [[0], draw.sample(range(items), min(items, 3)), sorted(draw.sample(range(items), min(items, 12)))]
        tensors: dict[str, torch.Tensor] = {"rows": torch.empty(0, dtype=torch.uint8)}
        touched = {0, items - 1}
        held: dict[str, Projection] = {"rows": QuantizedRows((items, 2), (0, 2), 8)}
        for name, many, directed in (("pairs", pairs, False), ("neighbors", neighbors, True)):
            ids = set[tuple[int, int]]()
            while len(ids) < many:  # most are of items of the histories
                one, other = draw.choice(draw.choice(histories)), draw.randrange(items)
                if one != other:
                    ids.add((one, other) if directed else (max(one, other), min(one, other)))
            touched |= {item for pair in ids for item in pair}
            rows = torch.tensor([(*pair, draw.random()) for pair in sorted(ids)]).view(-1, 3)
            held[name] = QuantizedPairs((many + 1, 3), (many, 3), items, directed)
            tensors[name] = held[name].packed(held[name].reduce(torch.nn.functional.pad(rows, (0, 0, 0, 1)).view(-1)))
        scored = sorted(touched)
        scorer = stored_scorer(held, tensors, 0.75)
        case = {
            "projections": {name: describe_projection(one) for name, one in held.items()}, "pair_weight": 0.75,
            "histories": [
                {"rows": history, "items": scored, "scores": scores_of(scorer, history, items)[scored].tolist()}
                for history in histories
            ],
        }  # fmt: skip
        found.append(case | {"tensors": base64_texts(tensors)})
        last = "neighbors" if neighbors else "pairs"
        for place, byte in ((-1, 0xFF), (-1, 0x00), (3, 0x7F), (2, 0xFF)):
            damaged = {name: one.clone() for name, one in tensors.items()}
            damaged[last][place] = byte
            wrong = case | {"tensors": base64_texts(damaged), "histories": []}
            with contextlib.suppress(InvalidMessage):
                stored_scorer(held, damaged, 0.75)
                continue
            found.append(wrong)
    return found


def scores_of(scorer: CoOccurrenceScorer, history: list[int], items: int) -> torch.Tensor:
    """All scores from a history, in double precision."""
    given = torch.tensor(history, dtype=torch.int64)
    return scorer.scores(scorer.histories([given]), torch.arange(items))[0].double()


def base64_texts(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """The bytes of tensors."""
    return {name: base64.b64encode(bytes(one.tolist())).decode() for name, one in tensors.items()}


def model_case(step: dict[str, Any]) -> dict[str, Any]:
    """A model file's scores and recommendations, in double precision."""
    assert step["kind"] == "query.model"
    objects = {name: base64.b64decode(one) for name, one in step["message"]["objects"].items()}
    chunk = next(one for one in objects.values() if one.startswith(b"ArrayChunk"))
    vector = chunk.partition(b"\0")[2]
    file = vector[10 + int.from_bytes(vector[8:10], "little") :]
    model = parse_model(file)
    held = {name: make_projection(one) for name, one in model.metadata["projections"].items()}
    tensors = {name: torch.tensor(list(model.tensors[name]), dtype=torch.uint8) for name in held}
    scorer = stored_scorer(held, tensors, model.metadata["settings"]["algorithm"]["pair_weight"])
    histories = []
    for history in ([], [0], [3, 7, 20], list(range(0, 30, 3)), [59]):
        scores = scores_of(scorer, history, ITEMS).tolist()
        best = [item for item, _ in model.recommend(history, 10)]
        histories.append({"rows": history, "scores": scores, "catalogue": history, "best": best})
    return {
        "file": base64.b64encode(file).decode(), "projections": json.loads(json.dumps(model.metadata["projections"])),
        "leading": model.tensors["leading"].tolist() if "leading" in model.tensors else None, "histories": histories,
    }  # fmt: skip


def signed_models(given: dict[str, Any]) -> dict[str, Any]:
    """Models of ``models``, by their places there, as messages to one device, and whether it stores them."""
    signer, other = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
    files = [base64.b64decode(case["file"]) for case in given["cases"]]

    def message(
        what: str, file: int, number: int, stored: bool,
        *, key: Ed25519PrivateKey = signer, of: int | None = None, by: int = 0, facts: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A message whose signature may be another key's, or of another file or number than it names."""
        content = files[file if of is None else of]
        signature = key.sign(signed_model(by or number, content)).hex()
        return {
            "what": what, "file": file, "stored": stored,
            "facts": {"number": f"{number:x}", "signature": signature} | (facts or {}),
        }  # fmt: skip

    first = 2**53 + 3  # a number that a double would not hold
    return {
        "signer": signer.public_key().public_bytes_raw().hex(),
        "messages": [
            message("the first", 0, first, True),
            message("the same again", 0, first, True),
            message("an older one", 1, first - 1, False),
            message("another with the same number", 1, first, True),
            message("signed by somebody else", 0, first + 1, False, key=other),
            message("a signature of another file", 0, first + 1, False, of=1),
            message("a signature of another number", 0, first + 1, False, by=first),
            message("no hexadecimal digits", 0, first + 1, False, facts={"signature": "signature"}),
            message("no signature", 0, first + 1, False, facts={"signature": ""}),
            message("no number", 0, first + 1, False, facts={"number": ""}),
            message("a newer one", 2, first + 1, True),
        ],
    }
