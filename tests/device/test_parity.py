"""A small device replies with the same bytes as the worker, and stores the same state, message by message.

Flower names an object by the hash of its content: two replies are the same bits if their records have the same id.
Qualities alone, which no model depends on, may differ in their last digits.
"""

import csv
import json
import math
import random
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fairfold.config import Settings
from fairfold.config.files import load_settings
from fairfold.device import encoding, gradient, masked, offline
from fairfold.device.cooccurrence import streamed_part
from fairfold.device.encoding import ENCODING_FILE
from fairfold.device.records import Records, pack_records, parse_records
from fairfold.device.requests import NeedsWorker
from fairfold.device.store import DeviceStore
from fairfold.device.stored_model import MODEL_FILE, read_model
from fairfold.device.tasks import SmallDevice
from fairfold.errors import InvalidMessage, RequestRefused
from fairfold.federation import noise as federation_noise
from fairfold.flower import FairStrategy, InProcessGrid, LocalFile, device_model, make_client_app
from fairfold.flower.client_store import ClientStore
from fairfold.flower.protocol import KEYS, REVEAL, SHARES, SIGN, VERSION
from fairfold.flower.roster import Roster, make_signer
from fairfold.flower.wire import client_settings
from fairfold.privacy.ledger import remember_privacy
from fairfold.subspace.packed import QuantizedRows
from fairfold.subspace.projection import make_projection
from tests.support.settings import make_settings

ITEMS, USERS = 60, 24


def write_files(folder: Path, seed: int, *, per_device: int) -> list[Path]:
    """Files of devices, of ``per_device`` users each, whose histories are of very different lengths."""
    draw, paths = random.Random(seed), []
    for device in range(USERS // per_device):
        paths.append(folder / f"{device}.csv")
        with paths[-1].open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["user", "item"])
            for user in range(per_device):
                items = draw.sample(range(ITEMS), draw.randint(1, 25))
                writer.writerows([f"u{user}", int(item * draw.random() ** 0.5)] for item in items)
    return paths


class Twins:
    """An app that gives every message to the worker's code and to the small device, and compares the two."""

    def __init__(self, folder: Path, files: list[Path], capacities: list[str]) -> None:
        self.folder, self.files, self.capacities = folder, files, capacities
        self.compared = list[str]()
        self.left = list[str]()  # to the worker
        self.problems = list[str]()  # the grid turns exceptions into replies

    def device(self, number: int, side: str) -> SmallDevice:
        file = LocalFile(self.files[number], holdout=0.2)
        return SmallDevice(file, self.capacities[number], self.folder / side / str(number))

    def app(self) -> ClientApp:
        return self  # type: ignore[return-value]

    def __call__(self, message: Message, context: Context) -> Message:
        number = int(context.node_config["device"])
        device = self.device(number, "small")
        state = self.folder / "worker" / str(number)
        device.folder.mkdir(parents=True, exist_ok=True)
        state.mkdir(parents=True, exist_ok=True)
        if (state / "name").exists():
            (device.folder / "name").write_bytes((state / "name").read_bytes())
        worker = make_client_app(device.file, capacity=device.capacity, state=state)
        reply = worker(message, context)
        if not (device.folder / "name").exists() and (state / "name").exists():
            (device.folder / "name").write_bytes((state / "name").read_bytes())
        try:
            self.compare(device, deepcopy(message), deepcopy(reply))  # objects that were packed cannot be copied
            self.compared.append(message.metadata.message_type)
            self.compare_states(state, device.folder)
            if message.metadata.message_type == "query.model":
                assert (device.folder / MODEL_FILE).read_bytes() == (state / MODEL_FILE).read_bytes()
            if message.metadata.message_type == "query.rows":
                assert (device.folder / ENCODING_FILE).read_bytes() == (state / ENCODING_FILE).read_bytes()
        except NeedsWorker:
            self.left.append(message.metadata.message_type)
            copytree(state, device.folder, dirs_exist_ok=True)  # on a device the two share one folder
        except Exception as error:
            self.problems.append(f"{message.metadata.message_type}: {error!r}"[:2000])
        return reply

    @staticmethod
    def compare(device: SmallDevice, message: Message, reply: Message) -> None:
        """The device's reply to a message is another's, object by object."""
        records, theirs = records_of_both(device, message, reply)
        expected = theirs["fairfold"].get("quality")
        if expected is not None:  # a sum that is shown, not used: the worker ranks in single precision
            assert records["fairfold"]["quality"] == pytest.approx(expected, abs=1e-6)
            records["fairfold"]["quality"] = expected
        sent: dict[str, bytes] = {}
        packed = pack_records(records, sent)
        assert packed.object_id == reply.content.object_id, (records, reply.content)
        assert sent == {name: one.deflate() for name, one in get_all_nested_objects(reply.content).items()}

    @staticmethod
    def compare_states(worker: Path, small: Path) -> None:
        """The two state files say the same but for the secret; each side reads the other's."""
        expected, found = ClientStore(worker).load(), ClientStore(small).load()
        assert DeviceStore(worker).load().user_names == expected.user_names
        for key in ("user_names", "run", "numbering", "item_numbers"):
            assert getattr(found, key) == getattr(expected, key), key
        tables = [
            (found.history, expected.history),
            (found.acknowledged.local_state, expected.acknowledged.local_state),
        ]
        assert found.acknowledged.update_id == expected.acknowledged.update_id
        assert (found.pending is None) == (expected.pending is None)
        if found.pending is not None and expected.pending is not None:
            assert found.pending.update_id == expected.pending.update_id
            tables.append((found.pending.local_state, expected.pending.local_state))
        for mine, theirs in tables:
            assert mine.keys() == theirs.keys()
            assert all(mine[name].equal(theirs[name]) for name in mine), (mine, theirs)


def records_of_both(device: SmallDevice, message: Message, reply: Message) -> tuple[Records, Records]:
    """The device's reply to a message, and the worker's."""

    def parsed(content: Any) -> Records:
        objects = {name: one.deflate() for name, one in get_all_nested_objects(content).items()}
        return parse_records(content.object_id, objects)

    return device.reply(message.metadata.message_type, parsed(message.content)), parsed(reply.content)


def run(twins: Twins, rounds: int, base: Settings | None = None, *, half: bool = False, **keys: Any) -> FairStrategy:
    grid = InProcessGrid(twins.app(), [{"device": number} for number in range(len(twins.files))])
    settings = make_settings(base, rounds=rounds, evaluate_every=1, clients_per_round=None, **keys)
    strategy = FairStrategy(settings, ITEMS, half=half)
    strategy.start(grid, num_rounds=rounds)
    return strategy


@pytest.mark.parametrize("per_device", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_reply_of_a_run_has_the_worker_s_bits(tmp_path: Path, per_device: int) -> None:
    files = write_files(tmp_path, 3, per_device=per_device)
    capacities = [("1x", "4x", "16x", "2kB")[number % 4] for number in range(len(files))]
    twins = Twins(tmp_path, files, capacities)
    run(twins, 16, capacities="1x-4x-16x")
    assert not twins.problems
    assert not twins.left
    kinds = set(twins.compared)
    assert {"query.capacity", "query.statistics", "train", "query.model"} <= kinds
    assert twins.compared.count("train") >= 10 * len(files)


def test_histories_encoded_by_rows_that_pass_by_have_the_worker_s_bits(tmp_path: Path) -> None:
    files = write_files(tmp_path, 4, per_device=8)
    twins = Twins(tmp_path, files, ["1x", "16x", "64x"])
    algorithm = {"kind": "co_occurrence", "streamed": True, "support": 1}
    strategy = run(twins, 16, capacities="1x-16x-64x", algorithm=algorithm)
    assert not twins.problems
    assert not twins.left
    assert twins.compared.count("train") >= 10 * len(files)
    received = strategy.open_round.bytes_down
    held = [one.bytes() for one in strategy.plan.assignments(0)]
    assert sum(received.values()) > sum(held)


def test_after_a_model_the_rows_of_all_items_pass_by_and_a_device_keeps_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many small blocks; a user whose history changes is encoded by the device's own rows, as is a new one."""
    monkeypatch.setattr(device_model, "ROW_BYTES_AT_ONCE", 200)
    files = write_files(tmp_path, 4, per_device=8)
    twins = Twins(tmp_path, files, ["1x", "16x", "64x"])
    algorithm = {"kind": "co_occurrence", "streamed": True, "support": 1}
    strategy = run(twins, 2, capacities="1x-16x-64x", algorithm=algorithm)
    assert not twins.problems
    assert not twins.left
    assert twins.compared.count("query.rows") > 4
    assert not (tmp_path / "small/0" / ENCODING_FILE).exists()  # it holds all rows
    state, device = strategy.progress.state, twins.device(2, "small")
    model = read_model(device.folder)
    part = make_projection(streamed_part(model.metadata["projections"]["rows"], model.metadata["settings"])["stream"])
    assert isinstance(part, QuantizedRows)
    table = part.reduce(state.full["rows"]).view(part.kept)
    for user, items in device.file.histories(ITEMS).items():
        ranks = model.ranks(list(items))
        kept = encoding.kept_sum(device.folder, model, user, ranks)
        assert kept == pytest.approx((table[ranks, :1] * table[ranks, 2:]).sum(0).tolist(), rel=1e-5, abs=1e-5)
        assert offline.recommend(device.folder, model, user, items, 5) == model.recommend(list(items), 5, kept)
        assert encoding.kept_sum(device.folder, model, user, ranks[1:]) is None
        assert encoding.kept_sum(device.folder, model, "new", ranks) is None
        assert offline.recommend(device.folder, model, "new", items, 5) == model.recommend(list(items), 5)
    again = {"first": 4}
    with pytest.raises(InvalidMessage, match="those that follow"):
        encoding.keep_sums(device.folder, bytes(part.kept[1]), again, lambda _: {}, "")
    roster, content = Roster(tmp_path / "none", make_signer(tmp_path / "signer")), bytes(part.packed(table).numpy())
    message = device_model.rows_message((device.folder / MODEL_FILE).read_bytes(), 0, content, roster)
    facts = dict(message["fairfold"].items())
    for rows, claimed in ((content[1:] + b"1", facts), (content, facts | {"first": 1}), (content, {"first": 0})):
        with pytest.raises(InvalidMessage, match="without its server's signature"):
            encoding.keep_sums(device.folder, rows, claimed, lambda _: {}, roster.public.hex())
    encoding.keep_sums(device.folder, content, facts, lambda _: {"new": [3, 5]}, roster.public.hex())
    assert encoding.kept_sum(device.folder, model, "new", model.ranks([3, 5])) is not None


def test_replies_in_half_precision_have_the_worker_s_bits(tmp_path: Path) -> None:
    files = write_files(tmp_path, 6, per_device=8)
    twins = Twins(tmp_path, files, ["1x", "4x", "16x"])
    run(twins, 3, capacities="1x-4x-16x", half=True, history_exponent=0.75)
    assert not twins.problems
    assert not twins.left
    assert twins.compared.count("train") == 3 * len(files)


@pytest.mark.parametrize("recipe", ["paper", "fair"])
def test_fair_without_the_library_is_trained_by_the_worker_and_its_model_stored_by_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr(gradient, "library", lambda: None)
    files = write_files(tmp_path, 4, per_device=1)[:6]
    twins = Twins(tmp_path, files, ["1x", "4x", "16x"] * 2)
    run(twins, 2, load_settings(None, {}, recipe), capacities="1x-4x-16x")
    assert not twins.problems
    assert "train" in twins.left
    assert "train" not in twins.compared
    assert twins.compared.count("query.model") == len(files)


def test_other_algorithms_are_left_to_the_worker(tmp_path: Path) -> None:
    device = SmallDevice(LocalFile(tmp_path / "mine.csv"), "4x", tmp_path / "state")
    facts = {"version": VERSION, "settings": json.dumps(client_settings(make_settings(algorithm="closed_form")))}
    for kind in ("train", "evaluate", "query.statistics", "query.unknown"):
        with pytest.raises(NeedsWorker):
            device.reply(kind, {"fairfold": facts})
    assert not (tmp_path / "state").exists()  # nothing has changed


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, str(VERSION), None])
def test_a_message_of_another_version_is_refused_before_anything_is_read(tmp_path: Path, version: Any) -> None:
    device = SmallDevice(LocalFile(tmp_path / "none.csv"), "4x", tmp_path / "state")
    facts = {} if version is None else {"version": version}
    for kind in (
        "train",
        "evaluate",
        "query.statistics",
        "query.numbering",
        "query.model",
        "query.rows",
        KEYS,
        SHARES,
        SIGN,
        REVEAL,
    ):
        with pytest.raises(InvalidMessage, match=f"another version of the protocol.*version {VERSION}"):
            device.reply(kind, {"fairfold": facts})
    assert not (tmp_path / "state").exists()
    (tmp_path / "state").mkdir()
    assert device.reply("query.capacity", {"fairfold": facts})["fairfold"]["version"] == VERSION  # so the server knows


def test_a_device_that_has_taken_part_in_secure_sums_replies_to_no_plain_request(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("user,item\na,1\n")
    device = SmallDevice(LocalFile(tmp_path / "mine.csv"), "4x", tmp_path / "state")
    device.folder.mkdir()
    facts = {
        "version": VERSION,
        "settings": json.dumps(client_settings(make_settings())),
        "items": 9,
        "start": 0,
        "stop": 9,
    }
    assert device.reply("query.statistics", {"fairfold": facts})["arrays"]["users"].tolist() == [1, 1, 1]
    remember_privacy(device.folder, "secure")
    with pytest.raises(RequestRefused, match="without masks"):
        device.reply("query.statistics", {"fairfold": facts})


def small_app(folder: Path, files: list[Path], capacities: list[str], rules: dict[str, Any]) -> Any:
    """An app whose replies are those of small devices."""

    def app(message: Message, context: Context) -> Message:
        number = int(context.node_config["device"])
        device = SmallDevice(LocalFile(files[number]), capacities[number % 2], folder / "small" / str(number), rules)
        content = deepcopy(message).content
        objects = {name: one.deflate() for name, one in get_all_nested_objects(content).items()}
        sent: dict[str, bytes] = {}
        packed = pack_records(
            device.reply(message.metadata.message_type, parse_records(content.object_id, objects)), sent
        )
        reply = inflate_object_from_contents(packed.object_id, sent)
        assert isinstance(reply, RecordDict)
        return Message(reply, reply_to=message)

    return app


def worker_app(folder: Path, files: list[Path], capacities: list[str], rules: dict[str, Any]) -> Any:
    """An app whose replies are the worker's."""

    def app(message: Message, context: Context) -> Message:
        number = int(context.node_config["device"])
        state = folder / "worker" / str(number)
        context.node_config |= rules
        return make_client_app(LocalFile(files[number]), capacity=capacities[number % 2], state=state)(message, context)

    return app


@pytest.mark.parametrize(("level", "tune"), [("secure", True), ("secure", False), ("private", True)])
def test_under_masks_a_fleet_of_small_devices_trains_the_worker_s_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, tune: bool
) -> None:
    """Without its noise, which nobody can repeat: the sums are exact, so the server's state has the same bits.

    Without tuning the four rounds are for the four parts of an upload.
    """
    files = write_files(tmp_path, 5, per_device=6)
    rules = {"min-cohort": 3, "privacy": level, "epsilon": 100.0}
    noise = {"epsilon": 50.0, "delta": 1e-5} if level == "private" else {}
    algorithm = {"kind": "co_occurrence"} | ({} if noise else {"min_item_users": 0, "tune": tune})
    settings = make_settings(
        rounds=1 if level == "private" else 4, evaluate_every=1, clients_per_round=None, capacities="1x-4x",
        privacy={"level": level, "min_cohort": 3, **noise}, algorithm=algorithm,
    )  # fmt: skip
    drawn = list[int]()

    def no_noise(_self: masked.Draws, sigma: int) -> int:
        drawn.append(sigma)
        return 0

    monkeypatch.setattr(masked.Draws, "gaussian", no_noise)
    monkeypatch.setattr(federation_noise, "discrete_gaussian", lambda _s, count, _d: numpy.zeros(count, numpy.int64))
    found = []
    for make in (worker_app, small_app):
        grid = InProcessGrid(make(tmp_path, files, ["1x", "4x"], rules), [{"device": n} for n in range(len(files))])
        strategy = FairStrategy(settings, ITEMS)
        strategy.start(grid, num_rounds=settings.run.rounds)
        assert strategy.progress.history[-1].num_clients == len(files)
        found.append(strategy.progress.state)
    expected, state = found
    assert bool(drawn) == (level == "private")
    for group in ("sum", *({"quality"} & expected.algorithm_state.keys())):
        for name, tensor in expected.algorithm_state[group].items():
            assert torch.equal(tensor, state.algorithm_state[group][name]), group
    assert all(torch.equal(tensor, state.full[name]) for name, tensor in expected.full.items())
    assert bool(expected.full["rows"].any())


def test_noise_has_its_distribution() -> None:
    draws, sigma, count = masked.Draws(), 3, 20_000
    numbers = [draws.gaussian(sigma) for _ in range(count)]
    weights = {k: math.exp(-(k**2) / (2 * sigma**2)) for k in range(-60, 61)}
    total, statistic = sum(weights.values()), 0.0
    for k in range(-8, 9):
        expected = count * weights[k] / total
        statistic += (numbers.count(k) - expected) ** 2 / expected
    assert statistic < 17 + 6 * math.sqrt(2 * 17)  # chi square of 17 classes, six standard deviations
    assert all(draws.below(3) < 3 for _ in range(100))
