"""What travels arrives as it was; what is not exactly what was asked for is refused, whatever it is."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from fairfold.algorithms.cooccurrence.scorer import CoOccurrenceScorer
from fairfold.config import Settings
from fairfold.data import Dataset
from fairfold.errors import InvalidMessage, did_you_mean
from fairfold.federation.algorithm import DeviceScoring
from fairfold.federation.architecture import Architecture
from fairfold.federation.federation import Federation, number_items
from fairfold.federation.plan import Plan
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round, sequential
from fairfold.federation.updates import ClientTask, PublicStatistics, Update
from fairfold.flower import vectors
from fairfold.flower.client_store import ClientState
from fairfold.flower.client_tasks import TaskRunner
from fairfold.flower.local_data import LocalData
from fairfold.flower.protocol import ARRAYS, FACTS
from fairfold.flower.wire import (
    Reply,
    TaskRequest,
    client_settings,
    for_node,
    pack_reply,
    pack_request,
    refuse_large_model,
    unpack_reply,
    unpack_request,
)
from tests.flower.allocations import HERE, counting
from tests.flower.fuzz_messages import fuzz, peak
from tests.support.federations import tiny_data, tiny_settings


def a_request(half: bool = False, items: int = 40, **changes: Any) -> TaskRequest:
    settings = tiny_settings(**{"capacities": "1x-4x", "model": "neumf", "rehash": True} | changes)
    projections = Plan.of(settings, PublicStatistics(items)).assignments(3)[1].projections
    assert projections is not None
    source = torch.Generator().manual_seed(1)
    task = ClientTask(
        3, 1, projections, {name: torch.randn(held.size, generator=source) for name, held in projections.items()}
    )
    return TaskRequest(task, settings, items, 2**63 - 1, 7, 5, half, True, 9)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("values", [False, True])
def test_requests_and_replies_arrive_as_they_were(half: bool, values: bool) -> None:
    request = a_request(half)
    records, seen = pack_request(request)
    found = unpack_request(for_node(records, 2**62))
    assert found.task.projections == request.task.projections
    assert (found.task.round_number, found.task.size, found.num_items) == (3, 1, 40)
    assert (found.run, found.update_id, found.acknowledged_id, found.half, found.numbering) == (
        2**63 - 1,
        7,
        2**62,
        half,
        9,
    )
    assert unpack_request(records).acknowledged_id == 5, "the record that others share is as it was"
    assert client_settings(found.settings) == client_settings(request.settings)
    sizes = {}
    for name, vector in request.task.vectors.items():
        assert torch.equal(found.task.vectors[name], seen.task.vectors[name])
        tolerance = 2**-11 * float(vector.abs().max()) if half else 0.0
        assert float((found.task.vectors[name] - vector).abs().max()) <= tolerance
        sizes[name] = len(vector)
    update = Update({name: 2.001 * vector for name, vector in seen.task.vectors.items()}, 2.0)
    packed = pack_reply(found, Reply(update, (0.5, 3)), sends_weights=values)
    reply = unpack_reply(packed, seen, sizes, 10.0, sends_weights=values)
    assert reply.update is not None
    assert reply.update.weight == 2.0
    assert reply.quality == (0.5, 3)
    for name, vector in update.sums.items():
        allowed = {(False, False): 0.0, (True, False): 2**-11, (True, True): 1e-6}.get((half, values), 1e-7)
        assert float((reply.update.sums[name] - vector).abs().max()) <= allowed * float(vector.abs().max())


def sparse_order() -> tuple[TaskRequest, Update, dict[str, int]]:
    settings = Settings(algorithm="co_occurrence")
    world = Federation.of(settings, number_items(tiny_data(2, 9, 120), settings))
    plan = world.plan
    (task,) = plan.algorithm.tasks(plan, world.initial(), [0])
    update, _ = plan.algorithm.client_update(plan, task, world.clients.client(4, 0))
    return TaskRequest(task, settings, 120, 3, 4), update, plan.algorithm.update_shapes(plan, task)


def test_a_sparse_update_arrives_as_it_was_in_the_reported_bytes() -> None:
    request, update, sizes = sparse_order()
    assert update.sums["sum"].is_sparse
    packed = pack_reply(request, Reply(update))
    assert vectors.tensor_bytes(packed) == update.bytes_up < 4 * sizes["sum"]
    found = unpack_reply(packed, request, sizes, 10.0).update
    assert found is not None
    assert found.sums["sum"].is_sparse
    assert found.sums["sum"].to_dense().equal(update.sums["sum"].to_dense())
    nothing = replace(update, sums={"sum": update.sums["sum"] * 0})
    empty = torch.sparse_coo_tensor(torch.empty(1, 0).long(), torch.empty(0), (sizes["sum"],), check_invariants=True)
    for one in (nothing, replace(update, sums={"sum": empty})):
        again = unpack_reply(pack_reply(request, Reply(one)), request, sizes, 10.0).update
        assert again is not None
        assert not again.sums["sum"].to_dense().any()


@pytest.mark.parametrize("places", [[3, 2], [3, 3], [-1, 3], [3, 10**9], [0], [0, 1, 2], "many", "none", "float"])
def test_places_that_are_none_are_refused(places: Any) -> None:
    request, update, sizes = sparse_order()
    packed = pack_reply(request, Reply(update))
    numbers = Array(torch.ones(2).numpy())
    if places == "many":  # all numbers would be shorter
        places = list(range(sizes["sum"] // 2 + 1))
        numbers = Array(torch.zeros(len(places)).numpy())
    if isinstance(places, list):
        where = Array(torch.tensor(places, dtype=torch.int32).numpy())
        packed[ARRAYS] = ArrayRecord({"sum": numbers, "sum.indices": where})
    elif places == "none":
        packed[ARRAYS] = ArrayRecord({"sum": numbers})
    else:
        packed[ARRAYS] = ArrayRecord({"sum": numbers, "sum.indices": numbers})
    with pytest.raises(InvalidMessage):
        unpack_reply(packed, request, sizes, 10.0)


def test_no_other_vector_may_come_sparse() -> None:
    request = a_request()
    sizes = {name: len(vector) for name, vector in request.task.vectors.items()}
    update = Update({name: vector.to_sparse() for name, vector in request.task.vectors.items()}, 1.0)
    with pytest.raises(InvalidMessage, match="other tensors"):
        unpack_reply(pack_reply(request, Reply(update)), request, sizes, 10.0)


def test_unknown_settings_are_refused_with_an_error() -> None:
    request = a_request()
    content, _ = pack_request(request)
    facts = content[FACTS]
    assert isinstance(facts, ConfigRecord)
    task = json.loads(str(facts["settings"]))
    task["algorithm"]["of_tomorrow"] = 1
    for text, words in ((json.dumps(task), "of_tomorrow"), ("[1]", "be read"), ("{" * 9_000, "be read")):
        facts["settings"] = text
        with pytest.raises(InvalidMessage, match=words):
            unpack_request(content)


@given(st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
def test_half_floats_keep_eleven_bits_at_any_scale(scale: float, seed: int) -> None:
    vector = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * scale
    vector = vector.clamp(-3e38, 3e38)
    record, scales = vectors.pack({"a": vector}, half=True)
    found = vectors.unpack(record, scales, {"a": 50}, half=True)["a"]
    near = (found - vector).abs() <= vector.abs() * 2**-11 + vector.abs().max() * 2**-39
    assert bool(near.all())


@pytest.mark.parametrize("exponent", [-140, -126, -20, -1, 0, 1, 16, 100, 126])
def test_half_floats_just_below_a_power_of_two_do_not_round_to_infinity(exponent: int) -> None:
    largest = float(torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))) * 2.0**exponent
    vector = torch.tensor([largest, -largest, 0.0])
    record, scales = vectors.pack({"a": vector}, half=True)
    torch.testing.assert_close(vectors.unpack(record, scales, {"a": 3}, half=True)["a"], vector, rtol=2**-11, atol=0)


def test_a_request_is_no_reply() -> None:
    request = a_request()
    with pytest.raises(InvalidMessage):
        unpack_reply(
            pack_request(request)[0], request, {name: len(of) for name, of in request.task.vectors.items()}, 10.0
        )


# -- hostile orders ----------------------------------------------------------------------------------------------------

LARGE = 64 << 20
"""Bytes that no refused message may cost."""


@pytest.mark.parametrize(
    "shape",
    [
        ["x", 2147483648], [2147483648, 2147483648], ["x" * 1_000] * 8, [2**62], [2**400], [0, 3], [-1, 3], [],
        [40, 3.0], [True, 3], [[40], 3], [1] * 9, {"a": 1}, None, "40", 40, [40] * 100_000, [None, 3], [1e300, 1],
    ],
)  # fmt: skip
def test_shapes_that_are_none_are_refused_before_anything_is_made_of_them(shape: Any) -> None:
    """The first of these once became a text of two gigabytes."""
    content, _ = pack_request(a_request())
    facts, before = content[FACTS], peak()
    assert isinstance(facts, ConfigRecord)
    for key in ("projections", "context"):
        described = json.loads(str(facts["projections"]))
        described["item.weight" if "item.weight" in described else next(iter(described))]["shape"] = shape
        spoiled = content.copy()
        spoiled[FACTS] = ConfigRecord(dict(facts) | {key: json.dumps(described)})
        with pytest.raises(InvalidMessage):
            unpack_request(spoiled)
    assert peak() - before < LARGE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factors": 2**20, "algorithm": "closed_form", "model": "mf", "capacities": "1x-16384x"}, "numbers a user"),
        ({"num_negatives": 2**30, "model": "mf"}, "a round of"),
        ({"local_epochs": 2**30, "model": "mf"}, "a round of"),
    ],
)
def test_a_task_that_asks_for_more_than_it_sends_is_refused(changes: dict[str, Any], words: str) -> None:
    """A hash of a few numbers can stand for a model of any size."""
    before = peak()
    settings = tiny_settings(**{"capacities": "1x-2x", "mapping": "element"} | changes)
    plan = Plan.of(settings, PublicStatistics(1))
    held = plan.assignments(0)[-1].projections
    assert held is not None
    request = TaskRequest(
        ClientTask(0, 0, held, {name: torch.zeros(one.size) for name, one in held.items()}), settings, 1, 1, 1
    )
    data = tiny_data(users=1, items=4)
    local = LocalData(replace(data.train, num_items=1), None)
    with pytest.raises(InvalidMessage, match=words):
        TaskRunner(unpack_request(pack_request(request)[0]), local, ClientState(), 1)
    assert peak() - before < 2 * LARGE


def test_an_unknown_name_is_compared_with_known_ones_unless_it_is_endless() -> None:
    assert "'neumf'" in did_you_mean("neumff", ["mf", "neumf"])
    assert did_you_mean("neumf" * 10_000, ["mf", "neumf" * 10_000]) == ""  # took fifty times its length


def test_layers_beyond_reason_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="in its layers"):
        refuse_large_model(Architecture(tiny_settings(model="neumf", factors=4096), 1, 1))


@pytest.mark.filterwarnings("ignore")
def test_spoiled_messages_are_refused_or_harmless() -> None:
    """Requests, replies, statistics, numberings, capacities: see ``fuzz_messages.py``, which runs any number."""
    fuzz(200, 1)
    before = peak()
    outcomes = fuzz(1_000, 7)
    assert peak() - before < LARGE
    assert outcomes["refused"] > 700
    assert outcomes["harmless"] > 50


@pytest.mark.skipif(not HERE, reason="needs Linux, and a C compiler")
def test_no_spoiled_message_takes_more_than_twice_what_was_agreed() -> None:
    command = [sys.executable, "-m", "tests.flower.fuzz_messages", "--count", "500", "--seed", "8", "--allocations"]
    root = Path(__file__).parents[2]
    with counting() as environment:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "at most twice what was agreed" in done.stdout


def trained(items: int = 40, support: int = 1) -> tuple[TaskRequest, LocalData]:
    """A request with a co-occurrence model of twelve users."""
    settings = Settings(
        algorithm={"kind": "co_occurrence", "support": support, "tune": False}, fleet={"capacities": "1x-4x"},
        run={"rounds": 1},
    )  # fmt: skip
    raw = tiny_data(1, 12, items)
    world = Federation.of(settings, number_items(raw, settings))
    state = run_round(world.initial(), world.sampler, world.clients, Rejections(), sequential)
    (task,) = world.plan.algorithm.tasks(world.plan, state, [0])
    assert isinstance(world.data, Dataset)
    return TaskRequest(task, settings, items, 5, 6), LocalData(world.data.train, world.data.test)


@pytest.mark.parametrize("block", [3, 7, 8_192])
def test_a_catalogue_far_beyond_the_model_costs_a_device_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model does not distinguish comes in its order, in whatever blocks it is looked at."""
    request, data = trained()
    whole = TaskRunner(request, data, ClientState(run=5), 1).quality()
    monkeypatch.setattr("fairfold.flower.client_tasks.BLOCK_ITEMS", block)
    assert TaskRunner(request, data, ClientState(run=5), 1).quality() == whole
    looked_at = 0
    algorithm: Any = type(request.settings.algorithm)
    block_scores = algorithm.block_scores

    def counted(self: Any, plan: Any, task: Any, vectors: Any, items: Any) -> Any:
        nonlocal looked_at
        looked_at += len(items)
        return block_scores(self, plan, task, vectors, items)

    monkeypatch.setattr(algorithm, "block_scores", counted)
    assert TaskRunner(replace(request, num_items=2**31), data, ClientState(run=5), 1).quality() == whole
    assert 0 < looked_at < 1_000


@pytest.mark.parametrize("support", [1, 6, 7])
def test_looking_at_all_items_finds_nothing_better(support: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of few items fills the first places with others, in their order."""
    request, data = trained(support=support)

    def first() -> torch.Tensor:
        work = TaskRunner(request, data, ClientState(run=5), 1)
        vectors = DeviceScoring.of(work.plan.algorithm).scoring_vectors(work.plan, work.task, work.clients, work.users)
        return work._best_items(vectors, work.users, 20)

    some = first()
    assert (request.task.projections["rows"].shape[0] < 20) == (support > 1)
    monkeypatch.setattr(type(request.settings.algorithm), "num_candidates", lambda *_: 40)
    assert torch.equal(first(), some)


def test_items_without_a_score_come_in_their_order_in_whatever_blocks() -> None:
    rows = torch.tensor([[1.0, 1.0, 2.0], [1.0, 1.0, -1.0], [1.0, 0.5, 1.0]])
    served = CoOccurrenceScorer(rows, torch.empty(0, 3), 1.0)
    made = served.histories([torch.tensor([0]), torch.tensor([1, 2])])
    blocks = [served.scores(made, torch.arange(first, first + 5)) for first in range(0, 40, 5)]
    scores = torch.cat(blocks, dim=1)
    assert bool((scores[:, 3:].diff(dim=1) < 0).all())
    assert bool((scores[:, 3] < scores[:, :3].amin(1)).all())


@pytest.mark.parametrize("item", [1e9, -1.0, 40.0])
def test_pairs_of_items_that_are_none_are_refused(item: float) -> None:
    request, data = trained()
    name = next(name for name in ("neighbors", "pairs") if request.task.vectors.get(name, torch.empty(0)).numel())
    request.task.vectors[name].view(-1, 3)[0, 1] = item
    with pytest.raises(InvalidMessage, match="pairs of unknown items"):
        TaskRunner(request, data, ClientState(run=5), 1).reply(train=False, evaluate=True)
