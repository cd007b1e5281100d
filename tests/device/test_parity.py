"""A small device replies with the same bytes as the worker, and stores the same state, message by message.

Flower names an object by the hash of its content: two replies are the same bits if their records have the same id.
Qualities alone, which no model depends on, may differ in their last digits.
"""

import csv
import json
import random
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fairfold.config import Settings
from fairfold.config.files import load_settings
from fairfold.device.records import pack_records, parse_records
from fairfold.device.store import DeviceStore
from fairfold.device.stored_model import MODEL_FILE
from fairfold.device.tasks import NeedsWorker, SmallDevice
from fairfold.flower import FairStrategy, InProcessGrid, LocalFile, make_client_app
from fairfold.flower.client_store import ClientStore
from fairfold.flower.wire import client_settings
from fairfold.privacy.ledger import remember_privacy
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
        except NeedsWorker:
            self.left.append(message.metadata.message_type)
            copytree(state, device.folder, dirs_exist_ok=True)  # on a device the two share one folder
        except Exception as error:
            self.problems.append(f"{message.metadata.message_type}: {error!r}"[:2000])
        return reply

    @staticmethod
    def compare(device: SmallDevice, message: Message, reply: Message) -> None:
        """The device's reply to a message is another's, object by object."""
        objects = {name: one.deflate() for name, one in get_all_nested_objects(message.content).items()}
        records = device.reply(message.metadata.message_type, parse_records(message.content.object_id, objects))
        expected = reply.content["fairfold"].get("quality")
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


def run(twins: Twins, rounds: int, base: Settings | None = None, **keys: Any) -> FairStrategy:
    grid = InProcessGrid(twins.app(), [{"device": number} for number in range(len(twins.files))])
    settings = make_settings(base, rounds=rounds, evaluate_every=1, clients_per_round=None, **keys)
    strategy = FairStrategy(settings, ITEMS)
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


@pytest.mark.parametrize("recipe", ["paper", "fair"])
def test_fair_is_trained_by_the_worker_and_its_model_stored_by_either(tmp_path: Path, recipe: str) -> None:
    files = write_files(tmp_path, 4, per_device=1)[:6]
    twins = Twins(tmp_path, files, ["1x", "4x", "16x"] * 2)
    run(twins, 2, load_settings(None, {}, recipe), capacities="1x-4x-16x")
    assert not twins.problems
    assert "train" in twins.left
    assert "train" not in twins.compared
    assert twins.compared.count("query.model") == len(files)


@pytest.mark.parametrize("keys", [{"algorithm": "gradient"}, {"privacy": "secure"}])
def test_other_algorithms_and_secure_sums_are_left_to_the_worker(tmp_path: Path, keys: dict[str, Any]) -> None:
    device = SmallDevice(LocalFile(tmp_path / "mine.csv"), "4x", tmp_path / "state")
    facts = {"version": 9, "settings": json.dumps(client_settings(make_settings(**keys)))}
    for kind in ("train", "evaluate", "query.statistics", "query.secure_keys"):
        with pytest.raises(NeedsWorker):
            device.reply(kind, {"fairfold": facts})
    assert not (tmp_path / "state").exists()  # nothing has changed


def test_a_device_that_has_taken_part_in_secure_sums_replies_to_no_plain_request(tmp_path: Path) -> None:
    device = SmallDevice(LocalFile(tmp_path / "mine.csv"), "4x", tmp_path / "state")
    device.folder.mkdir()
    remember_privacy(device.folder, "secure")
    facts = {"version": 9, "settings": json.dumps(client_settings(make_settings()))}
    for kind in ("train", "evaluate", "query.statistics"):
        with pytest.raises(NeedsWorker):  # which refuses it, with the reason
            device.reply(kind, {"fairfold": facts})
