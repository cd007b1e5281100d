"""The C library of devices: the worker's training bit for bit, its draws by their laws, and what it refuses."""

import ctypes
import json
import shutil
import subprocess
import sys
from array import array
from collections import Counter
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fairfold.config.files import load_settings
from fairfold.device import gradient, native, uploads
from fairfold.device.layout import layout_of
from fairfold.device.records import parse_records
from fairfold.device.tasks import SmallDevice
from fairfold.errors import InvalidMessage
from fairfold.federation.training import RankingTraining
from fairfold.flower import FairStrategy, InProcessGrid, LocalFile, make_client_app
from fairfold.flower.client_store import ClientStore
from tests.device.test_parity import ITEMS, write_files
from tests.support.settings import make_settings
from tests.vectors.make import FOLDER

NATIVE = Path(__file__).parents[2] / "native"
SOURCES = [NATIVE / "device" / "fairfold_device.c"] + [
    NATIVE / f"{name}.c"
    for name in ("dispatch", "plan", "ranges", "touched", "active", "chain", "train", "pairs", "packed", "body")
]
FLAGS = [
    "-std=c11",
    "-Os",
    "-Wno-psabi",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-ffunction-sections",
    "-fdata-sections",
]


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, from the sources of this moment."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("library") / native.NAME
    built = [compiler, *FLAGS, "-fPIC", "-shared", "-fvisibility=hidden", *map(str, SOURCES), "-o", str(path), "-lm"]
    subprocess.run(built, check=True)
    loaded = native.load_library(path)
    with pytest.MonkeyPatch.context() as patch:
        for module in (native, gradient):
            patch.setattr(module, "library", lambda: loaded)
        yield loaded


class SameDraws:
    """An app of the worker; the small device gets its state, samples and message, and has to train the same numbers."""

    def __init__(self, folder: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]) -> None:
        self.folder, self.files, self.rules = folder, files, rules
        self.samples = list[Any]()
        self.compared, self.problems, self.rounds = list[str](), list[str](), Counter[int]()
        local = RankingTraining.round_samples

        def recorded(training: RankingTraining, *given: Any) -> Any:
            found = local(training, *given)
            self.samples.append(array("q", found.items.flatten().tolist()))
            return found

        monkeypatch.setattr(RankingTraining, "round_samples", recorded)
        monkeypatch.setattr(gradient, "draw_samples", lambda *_a, **_k: self.samples.pop(0))

    def __call__(self, message: Message, context: Context) -> Message:
        number, kind = int(context.node_config["device"]), message.metadata.message_type
        worker, small = self.folder / "worker" / str(number), self.folder / "small" / str(number)
        if worker.exists():
            shutil.rmtree(small, ignore_errors=True)
            copytree(worker, small)
        self.samples.clear()
        file, capacity = LocalFile(self.files[number], holdout=0.2), ("1x", "4x")[number % 2]
        context.node_config |= self.rules
        reply = make_client_app(file, capacity=capacity, state=worker)(message, context)
        content = deepcopy(message).content
        objects = {name: one.deflate() for name, one in get_all_nested_objects(content).items()}
        records = parse_records(content.object_id, objects)
        self.rounds[number] += kind == "train"
        if kind in ("train", "evaluate") and self.rounds[number] > 1:  # then the users' vectors are stored
            try:
                mine = SmallDevice(file, capacity, small, self.rules).reply(kind, records)
                rule = json.loads(str(records["fairfold"]["settings"]))["algorithm"]["aggregation"]
                self.compare(mine, reply, exact=rule == "delta")
                known, found = ClientStore(worker).load(), ClientStore(small).load()
                assert known.user_names == found.user_names
                for name, vectors in known.acknowledged.local_state.items():
                    assert torch.equal(found.acknowledged.local_state[name], vectors)  # trained through all steps
                self.compared.append(kind)
            except Exception as error:  # the grid turns exceptions into replies
                self.problems.append(f"{kind}: {error!r}"[:500])
        return reply

    @staticmethod
    def compare(mine: dict[str, dict[str, Any]], reply: Message, *, exact: bool) -> None:
        """The small device's records are the worker's; sums of whole models but for the last digit of a product."""
        facts = dict(reply.content["fairfold"])
        if "quality" in facts:
            assert mine["fairfold"].pop("quality") == pytest.approx(facts.pop("quality"), abs=1e-5)
        assert mine["fairfold"] == facts
        arrays: dict[str, Any] = dict(reply.content["arrays"].items())
        assert list(mine["arrays"]) == list(arrays)
        for name, found in arrays.items():
            expected = torch.from_numpy(found.numpy())
            difference = (torch.tensor(mine["arrays"][name]) - expected).abs().max()
            most = 0 if exact else 4e-7 * expected.abs().max()
            assert difference <= most, f"{name}: {difference:.3g} of {expected.abs().max():.3g}"


CASES: list[tuple[str, dict[str, Any]]] = [
    ("paper", {}),
    ("authors", {"depth": 2, "aggregation": "delta"}),
    ("authors", {"model": {"kind": "mf", "factors": 6}, "local_optimizer": "adagrad", "aggregation": "delta"}),
    ("paper", {"local_optimizer": "sgd", "batch_size": 7, "num_negatives": 3, "compress": "all", "weighting": "equal"}),
    ("paper", {"objective": "softmax", "num_negatives": 5, "depth": 2, "aggregation": "delta"}),
]


@pytest.mark.parametrize(("recipe", "keys"), CASES)
def test_a_device_trains_the_worker_s_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, keys: dict[str, Any]
) -> None:
    files = write_files(tmp_path, 8, per_device=8)
    settings = make_settings(
        load_settings(None, {}, recipe),
        **{"rounds": 3, "evaluate_every": 1, "clients_per_round": None, "capacities": "1x-4x", "local_epochs": 2},
        **keys,
    )
    devices: Any = SameDraws(tmp_path, files, monkeypatch, {})
    grid = InProcessGrid(devices, [{"device": number} for number in range(len(files))])
    FairStrategy(settings, ITEMS).start(grid, num_rounds=3)
    assert not devices.problems
    assert devices.compared.count("train") == 2 * len(files)
    assert "evaluate" in devices.compared


def test_draws_are_uniform_and_never_of_the_history() -> None:
    history, catalogue = [0, 3, 4, 9], 12
    items = native.draw_samples(history, catalogue, 500, 3, shuffle=True, seed=5)
    lines = [items[start : start + 4].tolist() for start in range(0, len(items), 4)]
    for epoch in range(500):
        assert sorted(line[0] for line in lines[4 * epoch : 4 * epoch + 4]) == history
    firsts = Counter(lines[4 * epoch][0] for epoch in range(500))
    assert min(firsts[item] for item in history) > 80  # of 125 expected
    drawn = Counter(item for line in lines for item in line[1:])
    assert set(drawn) == set(range(catalogue)) - set(history)
    expected = 6_000 / 8
    assert sum((count - expected) ** 2 / expected for count in drawn.values()) < 7 + 6 * 14**0.5
    again = native.draw_samples(history, catalogue, 500, 3, shuffle=True, seed=5)
    assert items == again
    assert items != native.draw_samples(history, catalogue, 500, 3, shuffle=True, seed=6)
    ordered = native.draw_samples(history, catalogue, 1, 0, shuffle=False, seed=5)
    assert ordered.tolist() == history


@pytest.mark.parametrize("history", [[3, 3], [4, 3], [-1, 2], [0, 12], list(range(12))])
def test_histories_that_are_none_are_refused(history: list[int]) -> None:
    with pytest.raises(InvalidMessage):
        native.draw_samples(history, 12, 1, 1, shuffle=True, seed=1)


HELD = {"kind": "hashed", "shape": [6, 2], "full_size": 12, "size": 4, "seed": 1, "mapping": "element", "chunk": 1,
        "head": 0, "sign": True}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"size": 13}, {"size": 0}, {"chunk": 3}, {"head": 4}, {"seed": -1}, {"full_size": 14}, {"kind": "low rank"}],
)
def test_subspaces_that_are_none_are_refused(change: dict[str, Any]) -> None:
    assert layout_of(HELD)[:4] == (12, 0, 4, 1)
    with pytest.raises(InvalidMessage):
        layout_of(HELD | change)


def test_samples_beyond_the_table_change_nothing() -> None:
    form = native.NetworkForm(2, 0, (), False, ("t",), ("u",), (), "bpr", 0.0, "sgd", 0.1)
    values, own = {"t": array("f", [1, 2, 3, 4])}, {"u": array("f", [1, 1])}
    network = native.LocalNetwork(form, {"t": HELD}, values, own)
    for items, ends in (([0, 6], [1]), ([0, -1], [1]), ([0, 1], [2]), ([0, 1], [0])):
        with pytest.raises(InvalidMessage):
            network.train(array("q", items), 2, ends)
    assert values["t"].tolist() == [1, 2, 3, 4]
    network.train(array("q", [0, 5]), 2, [1])
    assert values["t"].tolist() != [1, 2, 3, 4]
    with pytest.raises(InvalidMessage):
        network.scores(0, 7)


def test_vectors_of_slots_and_pairs(library: Any) -> None:
    """Those of docs/protocol.md: where numbers stand in a compact tensor, and what a device uploads."""
    for case in json.loads((FOLDER / "ratings.json").read_text())["layouts"]:
        sizes = [case[key] for key in ("full_size", "head", "tail", "chunk")]
        layout = native._Layout(*sizes, int(case["key"], 16), case["signed"])
        coordinates, slots = array("q", case["coordinates"]), array("q", bytes(8 * len(case["slots"])))
        signs = array("b", bytes(len(slots)))
        library.fairfold_slots_and_signs.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] + [ctypes.c_void_p] * 2
        if case["tail"]:
            addresses = [native._address(of) for of in (coordinates, slots, signs)]
            places, count = ctypes.addressof(layout), len(slots)
            assert library.fairfold_slots_and_signs(places, addresses[0], count, *addresses[1:]) == 0
            assert (slots.tolist(), signs.tolist()) == (case["slots"], case["signs"])
    cases = json.loads((FOLDER / "uploads.json").read_text())["cases"]
    whole = [one for one in cases if "indices" not in one and "part" not in one and one["share"] == 1]
    dense = [one for one in whole if not any(map(any, one["states"]))]
    assert dense
    for case in dense:
        mine = [[item for item in items if item < case["head"]] for items in case["users"]]
        most = case["most"]
        kept = [items if most is None else items[:most] for items in mine]
        ends = array("q", accumulate(map(len, kept)))
        begins = array("q", [0, *ends[:-1]])
        items = array("q", [item for of in kept for item in of])
        weights = array("f", [uploads.pair_weight(len(of), case["exponent"]) for of in mine])
        total = array("f", bytes(4 * len(case["sum_times_65536"])))
        word, address = ctypes.c_int64, ctypes.c_void_p
        library.fairfold_pair_sums.argtypes = [address, word, address, address, word, ctypes.c_int, address, word,
                                               address, word, ctypes.c_int]  # fmt: skip
        given = [native._address(of) for of in (items, begins, ends, weights, total)]
        status = library.fairfold_pair_sums(
            given[0], len(items), given[1], given[2], len(kept), 4, given[3], case["leading"], given[4], len(total), 1
        )
        assert status == 0
        assert [number * 65_536 for number in total] == case["sum_times_65536"]


def test_it_is_small() -> None:
    if sys.platform != "linux":
        pytest.skip("sections have other names")
    loaded = native.library()
    size = subprocess.run(["size", loaded._name], capture_output=True, text=True, check=True).stdout.splitlines()[1]
    assert int(size.split()[0]) <= 120_000
