"""Models that devices were given: the same scores as the product's, without torch, and never half of one."""

import json
import os
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from flwr.app import Message, RecordDict
from typer.testing import CliRunner

from examples.serving import load
from fairfold.algorithms.cooccurrence.scorer import PAIRS_PER_ITEM
from fairfold.cli import app
from fairfold.config import Settings
from fairfold.data import Interactions
from fairfold.device.model import packed_bytes
from fairfold.device.stored_model import MODEL_FILE, parse_model, read_model
from fairfold.device.tasks import SmallDevice
from fairfold.errors import InvalidMessage, InvalidState
from fairfold.federation.algorithm import CompactScoring
from fairfold.flower.device_model import model_message, store_model
from fairfold.flower.fleet.node import NodeFolder
from fairfold.flower.local_data import LocalFile
from fairfold.flower.messages import facts_in
from fairfold.flower.protocol import ARRAYS, FACTS, FILE, MODEL
from fairfold.flower.roster import Roster, make_signer
from fairfold.runs.device_model import DeviceModel, device_file_contents, read_device_model
from fairfold.runs.events import read_events
from fairfold.runs.loaded import load_run
from fairfold.runs.tensors import checked_tensor_bytes
from fairfold.subspace import Capacity
from fairfold.subspace.packed import QuantizedPairs, QuantizedRows
from fairfold.subspace.projection import Projection
from tests.support.federations import tiny_data
from tests.support.nodes import Nodes, in_process

ROOT = Path(__file__).parents[2]
USERS, ITEMS = 12, 160
FORBIDDEN = "import sys; sys.modules['torch'] = None; "


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Nodes, Path]:
    """A federation that is done, with items that devices have numbered by their counts."""
    place = tmp_path_factory.mktemp("fleet")
    data = tiny_data(3, USERS, ITEMS)
    settings = Settings(
        algorithm={"kind": "co_occurrence", "support": 1}, model={"factors": 6}, fleet={"capacities": "1x-8x-16x"},
        run={"rounds": 2, "evaluate_every": 2},
    )  # fmt: skip
    nodes = in_process(data, settings, 3, place / "devices", folder=place / "run")
    nodes.strategy.start(nodes.grid)
    return nodes, place


def product_scores(place: Path, number: int, histories: list[list[int]]) -> numpy.ndarray[Any, Any]:
    """By the product's own reader and scorer, of the run's numbers of all items."""
    run = load_run(place / "run")
    model, _ = read_device_model(place / "devices" / f"node-{number}" / MODEL_FILE)
    pairs = [(user, item) for user, history in enumerate(histories) for item in history]
    users, items = (torch.tensor(of) for of in zip(*pairs, strict=True))
    given = Interactions.from_pairs(users, items, len(histories), ITEMS)
    score = CompactScoring.of(run.plan.algorithm).compact_scorer(
        run.plan, model.projections, model.stored(), run.clients(given)
    )
    return score(torch.arange(len(histories))).numpy()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_device_scores_as_the_product_does(fleet: tuple[Nodes, Path], number: int) -> None:
    nodes, place = fleet
    stored = read_model(place / "devices" / f"node-{number}")
    histories = [nodes.world.clients.train.of(user).tolist() for user in range(6)] + [[0, 7, 30]]
    for history, expected in zip(histories, product_scores(place, number, histories), strict=True):
        found = numpy.array(stored.scores(history))
        scored = numpy.isfinite(found)
        numpy.testing.assert_allclose(found[scored], expected[: len(found)][scored], rtol=2e-4, atol=1e-5)
        assert scored.sum() > 10


def test_the_server_recommends_by_the_names_of_its_catalogue(fleet: tuple[Nodes, Path]) -> None:
    """Which are beside the run; items have other numbers in the run than there."""
    _, place = fleet
    asked = ["recommend", str(place / "run"), "--top", "5", "--history"]
    numbers = CliRunner().invoke(app, [*asked, "3,7,30"]).output
    catalogue = place / "catalogue.txt"
    try:
        catalogue.write_text("".join(f"film-{number}\n" for number in range(ITEMS)))
        names = CliRunner().invoke(app, [*asked, "film-3,film-7,film-30"]).output
        shown = [[line.split("│")[2].strip() for line in of.splitlines() if "│" in line] for of in (numbers, names)]
        assert len(shown[0]) == 5
        assert shown[1] == [f"film-{number}" for number in shown[0]]
        catalogue.write_text("film-0\n")
        assert "1 names" in CliRunner().invoke(app, [*asked, "film-0"]).output
    finally:
        catalogue.unlink()


@pytest.mark.parametrize("many", [0, 60, 400])
@pytest.mark.parametrize(("rows", "columns", "bits"), [(159, 6, 8), (120, 5, 4), (70, 3, 3), (1, 1, 8), (120, 0, 8)])
def test_all_forms_that_a_file_can_have(
    fleet: tuple[Nodes, Path], rows: int, columns: int, bits: int, many: int, tmp_path: Path
) -> None:
    """Lists that are listed and counted, and items beyond the rows; by the device's reader and by the example's."""
    nodes, place = fleet
    run, state = load_run(place / "run"), nodes.strategy.progress.state
    head = nodes.strategy.plan.architecture.tables["rows"][0]
    held: dict[str, Projection] = {
        "rows": QuantizedRows((head, 8), (rows, 2 + columns), bits),
        "pairs": QuantizedPairs((PAIRS_PER_ITEM * head, 3), (many, 3), head),
        "neighbors": QuantizedPairs((5 * head, 3), (many, 3), head, True),
        "popularity": QuantizedRows((8, 2), (8, 2), 8),
    }  # fmt: skip
    model = DeviceModel(Capacity.parse("2x"), held, {name: of.reduce(state.full[name]) for name, of in held.items()})
    tensors, metadata = device_file_contents(model, run.settings, state, run.facts, ("NDCG@20", None, None))
    content = checked_tensor_bytes(tensors, metadata)
    (tmp_path / "model").write_bytes(content)
    history = [0, 3, 8, 41, 90, 130]
    given = Interactions.from_pairs(torch.zeros(6, dtype=torch.int64), torch.tensor(history), 1, ITEMS)
    score = CompactScoring.of(run.plan.algorithm).compact_scorer(run.plan, held, model.stored(), run.clients(given))
    expected = score(torch.tensor([0]))[0].numpy()
    found = numpy.array(parse_model(content).scores(history))
    scored = numpy.isfinite(found)
    assert scored.sum() >= rows
    numpy.testing.assert_allclose(found[scored], expected[: len(found)][scored], rtol=2e-4, atol=1e-5)
    expected[history] = -numpy.inf
    best = [item for item in numpy.argsort(-expected, kind="stable") if numpy.isfinite(expected[item])]
    best = [item for item in best if item < len(found) and scored[item]][:15]
    mine = parse_model(content).recommend(history, len(best))
    others = load.recommend(*load.load(str(tmp_path / "model")), history, len(best))
    for ranked in (mine, others):
        assert [item for item, _ in ranked] == best
        values = numpy.array([value for _, value in ranked], float)
        numpy.testing.assert_allclose(values, expected[best], rtol=2e-4, atol=1e-5)


def test_what_is_recommended_are_the_best_items_in_the_catalogues_numbers(fleet: tuple[Nodes, Path]) -> None:
    nodes, place = fleet
    order = nodes.strategy.network_state.item_numbers
    assert order is not None, "or the test shows nothing"
    stored = read_model(place / "devices" / "node-0")
    history = nodes.world.clients.train.of(4).tolist()
    scores = product_scores(place, 0, [history])[0]
    scores[history] = -numpy.inf
    catalogue = order.argsort().tolist()
    wanted = [catalogue[item] for item in numpy.argsort(-scores, kind="stable")[:8]]
    found = stored.recommend([catalogue[item] for item in history], 8)
    assert [item for item, _ in found] == wanted


def test_all_that_is_left_comes_after_in_the_order_of_popularity(fleet: tuple[Nodes, Path]) -> None:
    _, place = fleet
    stored = read_model(place / "devices" / "node-2")
    found = [item for item, _ in stored.recommend([], 500)]
    assert len(found) == len(set(found)) == len(stored.tensors["leading"])
    assert found == stored.tensors["leading"].tolist()


def test_the_example_without_torch_agrees_with_the_product(fleet: tuple[Nodes, Path], tmp_path: Path) -> None:
    nodes, place = fleet
    order = nodes.strategy.network_state.item_numbers
    assert order is not None
    catalogue = order.argsort().tolist()
    history = nodes.world.clients.train.of(2).tolist()
    for capacity, number in (("1x", 0), ("16x", 2)):
        path = tmp_path / f"{capacity}.safetensors"
        done = CliRunner().invoke(app, ["export", str(place / "run"), "--capacity", capacity, "--out", str(path)])
        assert done.exit_code == 0, done.output
        code = FORBIDDEN + f"sys.argv = ['', {str(path)!r}, {','.join(str(catalogue[i]) for i in history)!r}]; "
        code += f"exec(open({str(ROOT / 'examples' / 'serving' / 'load.py')!r}).read())"
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        scores = product_scores(place, number, [history])[0]
        scores[history] = -numpy.inf
        best = numpy.argsort(-scores, kind="stable")[:10]
        found = [line.strip("()").split(", ") for line in output.splitlines()]
        assert [int(item) for item, _ in found] == [catalogue[item] for item in best]
        for (_, score), item in zip(found, best, strict=True):
            assert float(score) == pytest.approx(scores[item], rel=2e-4, abs=1e-5)
    lines = (ROOT / "examples" / "serving" / "load.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 50


def test_a_node_recommends_offline_without_torch(fleet: tuple[Nodes, Path], tmp_path: Path) -> None:
    nodes, place = fleet
    order = nodes.strategy.network_state.item_numbers
    assert order is not None
    catalogue = order.argsort().tolist()
    mine = [catalogue[item] for item in nodes.world.clients.train.of(1).tolist()]
    (tmp_path / "mine.csv").write_text("user,item\n" + "".join(f"anna,{item}\n" for item in mine))
    NodeFolder(tmp_path, "a.example:8000", str(tmp_path / "mine.csv"), "16x").save()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / MODEL_FILE).write_bytes((place / "devices" / "node-1" / MODEL_FILE).read_bytes())
    peak = "sys.stderr.write(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    code = FORBIDDEN + f"import fairfold.cli, atexit; sys.argv = ['fairfold', 'node', 'recommend', {str(tmp_path)!r}]; "
    code += f"atexit.register(lambda: exec({peak!r})); fairfold.cli.app()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    wanted = [item for item, _ in read_model(place / "devices" / "node-1").recommend(mine, 10)]
    found = [line.split("│")[2].strip() for line in done.stdout.splitlines() if line.count("│") == 4]
    assert [int(word) for word in found] == wanted
    assert int(done.stderr) < 70_000, "kilobytes"


def test_every_device_was_sent_the_model_of_its_size_and_that_is_logged(fleet: tuple[Nodes, Path]) -> None:
    nodes, place = fleet
    stored = [read_model(place / "devices" / f"node-{number}") for number in range(3)]
    assert [model.metadata["capacity"] for model in stored] == ["1x", "8x", "16x"]
    assert {model.metadata["run"] for model in stored} == {f"{nodes.strategy.network_state.run:x}"}
    assert {model.round_number for model in stored} == {2}
    assert read_events(place / "run")[-1] == {"event": "pushed", "round": 2, "asked": 3, "nodes": [1, 2, 3]}


def test_a_model_that_the_server_did_not_sign_or_an_older_one_is_refused(
    fleet: tuple[Nodes, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that knows its server's signer; before, whatever came was stored."""
    content = (fleet[1] / "devices" / "node-2" / MODEL_FILE).read_bytes()
    roster, other = (Roster(tmp_path / "none", make_signer(tmp_path / name)) for name in ("signer", "other"))
    signer, now = roster.public.hex(), time.time_ns()
    old = model_message(content, roster)
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**12)
    new = model_message(content, roster)
    for device in (tmp_path / "a", tmp_path / "b"):
        file = device / MODEL_FILE

        def store(message: RecordDict, device: Path = device) -> None:
            if device.name == "a":
                store_model(device, message, "16x", signer)
            else:
                facts = dict(message[FACTS].items())
                sent: dict[str, dict[str, Any]] = {FACTS: facts, ARRAYS: {FILE: array("B", content)}}
                SmallDevice(LocalFile("none"), "16x", device, {"signer": signer}).reply(MODEL, sent)

        forged = model_message(content, other)
        changed = model_message(content, roster)
        facts_in(changed)["number"] = "7"
        for wrong in (model_message(content), forged, changed):
            with pytest.raises(InvalidMessage, match="without its server's signature"):
                store(wrong)
            assert not file.exists()
        store(old)
        store(new)
        store(new)
        with pytest.raises(InvalidMessage, match="an older model than the stored one"):
            store(old)
        assert file.read_bytes() == content


def test_a_damaged_model_is_refused_and_the_old_one_stays(fleet: tuple[Nodes, Path], tmp_path: Path) -> None:
    _, place = fleet
    right = (place / "devices" / "node-2" / MODEL_FILE).read_bytes()
    store_model(tmp_path, model_message(right), "16x")
    assert (tmp_path / MODEL_FILE).read_bytes() == right
    for spot in (*range(8), *range(8, len(right), 61)):
        broken = bytearray(right)
        broken[spot] ^= 1 << (spot % 8)
        with pytest.raises(InvalidMessage):
            store_model(tmp_path, model_message(bytes(broken)), "16x")
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / MODEL_FILE).write_bytes(broken)
        with pytest.raises(InvalidState, match="damaged"):
            read_model(tmp_path / "other")
    assert (tmp_path / MODEL_FILE).read_bytes() == right
    with pytest.raises(InvalidMessage, match="at most 1kB"):
        store_model(tmp_path, model_message((place / "devices" / "node-0" / MODEL_FILE).read_bytes()), "1kB")
    assert parse_model((tmp_path / MODEL_FILE).read_bytes()).metadata["capacity"] == "16x"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("rows", "kept", [2**40, 3]), ("rows", "kept", [1, 2**40]), ("rows", "bits", 2**50), ("rows", "bits", -8),
        ("pairs", "kept", [2**40]), ("pairs", "kept", ["x"]), ("pairs", "kept", [-1]),
    ],
)  # fmt: skip
def test_a_server_that_lies_about_sizes_makes_a_device_allocate_nothing(
    fleet: tuple[Nodes, Path], tmp_path: Path, name: str, key: str, value: object
) -> None:
    model, _ = read_device_model(fleet[1] / "devices" / "node-1" / MODEL_FILE)
    strategy = fleet[0].strategy
    tensors, metadata = device_file_contents(
        model, strategy.plan.settings, strategy.progress.state, {"name": "d", "items": ITEMS}, ("ndcg@20", None, None)
    )
    facts = json.loads(metadata["projections"])
    facts[name][key] = value
    if name == "pairs":
        facts[name]["items"] = 2**40
    sealed = checked_tensor_bytes(
        tensors, metadata | {"projections": json.dumps(facts)}
    )  # with the checksum that belongs to it
    with pytest.raises(InvalidMessage):
        store_model(tmp_path, model_message(sealed), "1MB")
    assert not (tmp_path / MODEL_FILE).exists()


@pytest.mark.parametrize(
    ("many", "items", "directed", "listed"),
    [(0, 10, False, 0), (3, 10, False, 64 + 2 + 2 + 1), (3, 10, True, 64 + 2 + 2 + 1), (3, 2, False, 64 + 2 + 0 + 1)],
)
def test_tensors_have_the_bytes_of_their_metadata(many: int, items: int, directed: bool, listed: int) -> None:
    """Two rows of two factors and one column of a byte; levels, half a byte a pair, low bits of positions, a bitmap.

    Three pairs of 10 items are at 55 places, 4 low bits each, or at 100, 5 each.
    """
    assert packed_bytes({"kind": "quantized rows", "kept": [2, 3], "shape": [2, 3], "bits": 8}) == 6
    pairs = {"kind": "quantized pairs", "kept": [many, 3], "shape": [many, 3], "items": items, "directed": directed}
    assert packed_bytes(pairs) == listed


def test_commands_serve_a_federations_run(fleet: tuple[Nodes, Path], tmp_path: Path) -> None:
    nodes, place = fleet
    run, order = str(place / "run"), nodes.strategy.network_state.item_numbers
    assert order is not None
    history = ",".join(str(order.argsort().tolist()[item]) for item in nodes.world.clients.train.of(2).tolist())
    (tmp_path / "history.csv").write_text("item\n" + history.replace(",", "\n") + "\n")
    output = [
        CliRunner().invoke(app, ["recommend", run, "--history", given, "--top", "5"])
        for given in (",".join([history] * 3), str(tmp_path / "history.csv"))  # longer than the name of a file
    ]
    assert all(done.exit_code == 0 for done in output), output[0].output
    assert output[0].output.splitlines()[1:] == output[1].output.splitlines()[1:]
    refused = CliRunner().invoke(app, ["recommend", run, "--user", "3"])
    assert refused.exit_code == 2
    assert "on a device" in refused.output
    small = CliRunner().invoke(app, ["recommend", run, "--history", history, "--capacity", "16x"])
    assert small.exit_code == 0, small.output
    report = CliRunner().invoke(app, ["report", run, "--no-page"])
    assert report.exit_code == 0, report.output
    assert f"devices: {ITEMS} items" in report.output
    trained = CliRunner().invoke(app, ["train", str(place / "run" / "settings.toml"), "--out", str(tmp_path / "new")])
    assert trained.exit_code == 2
    assert "whose data lies on its devices" in trained.output


def test_who_does_not_want_it_is_not_given_a_model(tmp_path: Path) -> None:
    settings = Settings(
        algorithm={"kind": "closed_form"}, fleet={"capacities": "1x", "clients_per_round": None,
        "network": {"push_model": False}}, run={"rounds": 1, "evaluate_every": 2},
    )  # fmt: skip
    kinds: list[str] = []
    nodes = in_process(tiny_data(0, 4, 40), settings, 2, tmp_path / "a", inspect=lambda m: kinds.append(kind_of(m)))
    nodes.strategy.start(nodes.grid)
    assert "query.model" not in kinds
    pushed = settings.with_changes({"fleet.network.push_model": True})
    nodes = in_process(tiny_data(0, 4, 40), pushed, 2, tmp_path / "b", inspect=lambda m: kinds.append(kind_of(m)))
    nodes.strategy.start(nodes.grid)
    assert kinds.count("query.model") == 4


def kind_of(message: Message) -> str:
    return str(message.metadata.message_type)
