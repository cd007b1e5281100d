"""Devices of different kinds in one fleet: the server's model is that of a fleet of workers."""

import base64
import contextlib
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fairfold.config import Settings
from fairfold.config.files import load_settings
from fairfold.device import gradient, native
from fairfold.device.records import pack_records, parse_records
from fairfold.device.tasks import SmallDevice
from fairfold.flower import FairStrategy, InProcessGrid, LocalFile, make_client_app
from tests.device.test_browser import PARTS, needs_node
from tests.device.test_parity import ITEMS, write_files
from tests.support.settings import make_settings
from tests.vectors.make import FOLDER
from tests.vectors.sessions import packed, set_name

HOLDOUT = 0.2
App = Callable[[Message, Context], Message]


class Fleet:
    """Devices of one folder; the kind of each is given by a function of its number."""

    def __init__(self, folder: Path, files: list[Path], capacities: list[str], kind: Callable[[int], str]) -> None:
        self.folder, self.files, self.capacities, self.kind = folder, files, capacities, kind
        self.replied, self.problems, self.lock = list[str](), list[str](), Lock()
        self.node: subprocess.Popen[str] | None = None
        for number in range(len(files)):
            set_name(folder / str(number), number + 1)

    def __call__(self, message: Message, context: Context) -> Message:
        number = int(context.node_config["device"])
        kind = self.kind(number)
        try:
            reply = {"worker": self.worker, "python": self.small, "browser": self.browser}[kind](
                number, message, context
            )
        except Exception as error:  # the grid turns exceptions into replies
            self.problems.append(f"{kind}: {message.metadata.message_type}: {error!r}"[:2000])
            raise
        self.replied.append(kind)
        return reply

    def worker(self, number: int, message: Message, context: Context) -> Message:
        file = LocalFile(self.files[number], holdout=HOLDOUT)
        app = make_client_app(file, capacity=self.capacities[number], state=self.folder / str(number))
        return app(message, context)

    def small(self, number: int, message: Message, _context: Context) -> Message:
        file = LocalFile(self.files[number], holdout=HOLDOUT)
        device = SmallDevice(file, self.capacities[number], self.folder / str(number))
        content = deepcopy(message).content  # objects that were packed cannot be copied
        objects = {name: one.deflate() for name, one in get_all_nested_objects(content).items()}
        sent: dict[str, bytes] = {}
        records = parse_records(content.object_id, objects)
        return reply_of(
            message, pack_records(device.reply(message.metadata.message_type, records), sent).object_id, sent
        )

    def browser(self, number: int, message: Message, _context: Context) -> Message:
        assert self.node is not None
        assert self.node.stdin is not None
        assert self.node.stdout is not None
        name = (self.folder / str(number) / "name").read_text().split()[0]
        about = {"number": number, "name": name, "capacity": self.capacities[number], "holdout": HOLDOUT}
        about |= {"file": self.files[number].read_text(), "kind": message.metadata.message_type, **packed(message)}
        with self.lock:
            self.node.stdin.write(json.dumps(about) + "\n")
            self.node.stdin.flush()
            found = json.loads(self.node.stdout.readline())
        assert "error" not in found, found["error"]
        sent = {name: base64.b64decode(one) for name, one in found["objects"].items()}
        return reply_of(message, found["id"], sent)

    def run(self, settings: Settings) -> FairStrategy:
        """Train; returns the server."""
        app: Any = self
        with self.browsers():
            grid = InProcessGrid(app, [{"device": number} for number in range(len(self.files))])
            strategy = FairStrategy(settings, ITEMS)
            strategy.start(grid, num_rounds=settings.run.rounds)
        assert not self.problems
        return strategy

    @contextlib.contextmanager
    def browsers(self) -> Iterator[None]:
        """A process of node, where a device needs one."""
        if "browser" not in map(self.kind, range(len(self.files))):
            yield
            return
        command = ["node", str(Path(__file__).with_name("browser_node.mjs")), str(PARTS), str(FOLDER)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as self.node:
            yield
            assert self.node.stdin is not None
            self.node.stdin.close()
            assert self.node.wait(30) == 0


def reply_of(message: Message, name: str, objects: dict[str, bytes]) -> Message:
    """A reply of records that are packed as objects."""
    records = inflate_object_from_contents(name, objects)
    assert isinstance(records, RecordDict)
    return Message(records, reply_to=message)


@needs_node
@pytest.mark.slow
def test_a_mixed_fleet_trains_the_model_of_a_fleet_of_workers(tmp_path: Path) -> None:
    """Sixteen rounds of the default recipe: a worker, a small Python device and a browser of each size in turn."""
    files = write_files(tmp_path, 9, per_device=4)
    capacities = [("1x", "1x", "1x", "4x", "16x", "4x")[number % 6] for number in range(len(files))]
    settings = make_settings(rounds=16, evaluate_every=4, clients_per_round=None, capacities="1x-4x-16x")
    kinds = ("worker", "python", "browser")
    mixed = Fleet(tmp_path / "mixed", files, capacities, lambda number: kinds[number % 3])
    workers = Fleet(tmp_path / "workers", files, capacities, lambda _: "worker")
    expected, found = (one.run(settings).progress for one in (workers, mixed))
    assert {kind: mixed.replied.count(kind) for kind in kinds} == dict.fromkeys(kinds, len(workers.replied) // 3)
    assert found.state.full.keys() == expected.state.full.keys()
    assert all(torch.equal(tensor, found.state.full[name]) for name, tensor in expected.state.full.items())
    assert bool(expected.state.full["rows"].any())
    for group in ("statistics", "sum", "solver", "quality"):  # others have numbers that each run draws
        tensors, mine = (one.state.algorithm_state[group] for one in (expected, found))
        assert tensors.keys() == mine.keys()
        assert all(torch.equal(tensor, mine[name]) for name, tensor in tensors.items()), group
    for one, other in zip(expected.history, found.history, strict=True):
        assert (one.num_clients, one.bytes_up) == (other.num_clients, other.bytes_up)


def test_a_fleet_half_of_which_trains_in_c_ends_all_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of gradient FAIR are a device's own: so the model is not the workers' by bits."""
    library = native.library() or pytest.skip("the C library of devices was not built")
    monkeypatch.setattr(gradient, "library", lambda: library)
    files = write_files(tmp_path, 8, per_device=6)
    keys: dict[str, Any] = {"rounds": 8, "evaluate_every": 8, "clients_per_round": None, "capacities": "1x-4x"}
    settings = make_settings(load_settings(None, {}, "paper"), **keys, local_epochs=4)
    mixed = Fleet(tmp_path / "mixed", files, ["1x", "1x", "4x", "4x"], lambda number: ("worker", "python")[number % 2])
    progress = mixed.run(settings).progress
    assert mixed.replied.count("python") == mixed.replied.count("worker") >= 2 * settings.run.rounds
    assert progress.history[-1].num_clients == len(files)
    assert all(math.isfinite(float(tensor.abs().sum())) for tensor in progress.state.full.values())
