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

from fairfold.algorithms.served import Served
from fairfold.data import Dataset
from fairfold.errors import InvalidMessage, nearest
from fairfold.flower import vectors
from fairfold.flower.device import DeviceWork, refuse_large
from fairfold.flower.local import LocalData
from fairfold.flower.protocol import ARRAYS, FACTS
from fairfold.flower.store import DeviceState
from fairfold.flower.wire import (
    Order,
    Reply,
    for_node,
    pack_order,
    pack_reply,
    sent_settings,
    unpack_order,
    unpack_reply,
)
from fairfold.protocol.architecture import Architecture
from fairfold.protocol.faults import Rejections
from fairfold.protocol.plan import Plan
from fairfold.protocol.round import in_turn, run_round
from fairfold.protocol.words import Answer, Public, Sent
from fairfold.settings import Settings
from fairfold.simulate.numbering import numbered
from fairfold.simulate.world import World
from tests.federations import tiny_data, tiny_settings
from tests.flower.allocations import HERE, counting
from tests.flower.fuzz_messages import fuzz, peak


def an_order(half: bool = False, items: int = 40, **changes: Any) -> Order:
    settings = tiny_settings(**{"capacities": "1x-4x", "model": "neumf", "rehash": True} | changes)
    projections = Plan.of(settings, Public(items)).assignments(3)[1].projections
    assert projections is not None
    source = torch.Generator().manual_seed(1)
    sent = Sent(
        3, 1, projections, {name: torch.randn(held.size, generator=source) for name, held in projections.items()}
    )
    return Order(sent, settings, items, 2**63 - 1, 7, 5, half, True, 9)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("values", [False, True])
def test_orders_and_answers_arrive_as_they_were(half: bool, values: bool) -> None:
    order = an_order(half)
    records, seen = pack_order(order)
    found = unpack_order(for_node(records, 2**62))
    assert found.sent.projections == order.sent.projections
    assert (found.sent.round_number, found.sent.size, found.items) == (3, 1, 40)
    assert (found.run, found.word, found.holds, found.half, found.numbering) == (2**63 - 1, 7, 2**62, half, 9)
    assert unpack_order(records).holds == 5, "the record that others share is as it was"
    assert sent_settings(found.settings) == sent_settings(order.settings)
    sizes = {}
    for name, vector in order.sent.vectors.items():
        assert torch.equal(found.sent.vectors[name], seen.sent.vectors[name])
        tolerance = 2**-11 * float(vector.abs().max()) if half else 0.0
        assert float((found.sent.vectors[name] - vector).abs().max()) <= tolerance
        sizes[name] = len(vector)
    said = Answer({name: 2.001 * vector for name, vector in seen.sent.vectors.items()}, 2.0)
    packed = pack_reply(found, Reply(said, (0.5, 3)), values=values)
    reply = unpack_reply(packed, seen, sizes, 10.0, values=values)
    assert reply.answer is not None
    assert reply.answer.weight == 2.0
    assert reply.quality == (0.5, 3)
    for name, vector in said.sums.items():
        allowed = {(False, False): 0.0, (True, False): 2**-11, (True, True): 1e-6}.get((half, values), 1e-7)
        assert float((reply.answer.sums[name] - vector).abs().max()) <= allowed * float(vector.abs().max())


def sparse_order() -> tuple[Order, Answer, dict[str, int]]:
    settings = Settings(algorithm="correlations")
    world = World.of(settings, numbered(tiny_data(2, 9, 120), settings))
    plan = world.plan
    (sent,) = plan.algorithm.send(plan, world.initial(), [0])
    answer, _ = plan.algorithm.answer(plan, sent, world.people.client(4, 0))
    return Order(sent, settings, 120, 3, 4), answer, plan.algorithm.answer_shapes(plan, sent)


def test_a_list_of_pairs_arrives_as_it_was_and_takes_what_is_told() -> None:
    order, answer, sizes = sparse_order()
    assert answer.sums["sum"].is_sparse
    packed = pack_reply(order, Reply(answer))
    assert vectors.bytes_in(packed) == answer.bytes_up < 4 * sizes["sum"]
    found = unpack_reply(packed, order, sizes, 10.0).answer
    assert found is not None
    assert found.sums["sum"].is_sparse
    assert found.sums["sum"].to_dense().equal(answer.sums["sum"].to_dense())
    nothing = replace(answer, sums={"sum": answer.sums["sum"] * 0})
    empty = torch.sparse_coo_tensor(torch.empty(1, 0).long(), torch.empty(0), (sizes["sum"],), check_invariants=True)
    for said in (nothing, replace(answer, sums={"sum": empty})):
        again = unpack_reply(pack_reply(order, Reply(said)), order, sizes, 10.0).answer
        assert again is not None
        assert not again.sums["sum"].to_dense().any()


@pytest.mark.parametrize("places", [[3, 2], [3, 3], [-1, 3], [3, 10**9], [0], [0, 1, 2], "many", "none", "float"])
def test_places_that_are_none_are_refused(places: Any) -> None:
    order, answer, sizes = sparse_order()
    packed = pack_reply(order, Reply(answer))
    numbers = Array(torch.ones(2).numpy())
    if places == "many":  # all numbers would be shorter
        places = list(range(sizes["sum"] // 2 + 1))
        numbers = Array(torch.zeros(len(places)).numpy())
    if isinstance(places, list):
        where = Array(torch.tensor(places, dtype=torch.int32).numpy())
        packed[ARRAYS] = ArrayRecord({"sum": numbers, "sum.places": where})
    elif places == "none":
        packed[ARRAYS] = ArrayRecord({"sum": numbers})
    else:
        packed[ARRAYS] = ArrayRecord({"sum": numbers, "sum.places": numbers})
    with pytest.raises(InvalidMessage):
        unpack_reply(packed, order, sizes, 10.0)


def test_no_other_vector_may_come_sparse() -> None:
    order = an_order()
    sizes = {name: len(vector) for name, vector in order.sent.vectors.items()}
    said = Answer({name: vector.to_sparse() for name, vector in order.sent.vectors.items()}, 1.0)
    with pytest.raises(InvalidMessage, match="other tensors"):
        unpack_reply(pack_reply(order, Reply(said)), order, sizes, 10.0)


def test_what_a_device_does_not_know_is_refused_with_words() -> None:
    order = an_order()
    content, _ = pack_order(order)
    facts = content[FACTS]
    assert isinstance(facts, ConfigRecord)
    sent = json.loads(str(facts["settings"]))
    sent["algorithm"]["of_tomorrow"] = 1
    for text, words in ((json.dumps(sent), "of_tomorrow"), ("[1]", "be read"), ("{" * 9_000, "be read")):
        facts["settings"] = text
        with pytest.raises(InvalidMessage, match=words):
            unpack_order(content)


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


def test_an_order_is_an_answer_to_nothing() -> None:
    order = an_order()
    with pytest.raises(InvalidMessage):
        unpack_reply(pack_order(order)[0], order, {name: len(of) for name, of in order.sent.vectors.items()}, 10.0)


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
    content, _ = pack_order(an_order())
    facts, before = content[FACTS], peak()
    assert isinstance(facts, ConfigRecord)
    for key in ("projections", "context"):
        described = json.loads(str(facts["projections"]))
        described["item.weight" if "item.weight" in described else next(iter(described))]["shape"] = shape
        spoiled = content.copy()
        spoiled[FACTS] = ConfigRecord(dict(facts) | {key: json.dumps(described)})
        with pytest.raises(InvalidMessage):
            unpack_order(spoiled)
    assert peak() - before < LARGE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factors": 2**20, "solver": "closed_form", "model": "mf", "capacities": "1x-16384x"}, "numbers a user"),
        ({"negatives": 2**30, "model": "mf"}, "a round of"),
        ({"local_epochs": 2**30, "model": "mf"}, "a round of"),
    ],
)
def test_an_order_that_asks_for_more_than_it_sends_is_refused(changes: dict[str, Any], words: str) -> None:
    """A hash of a few numbers can stand for a model of any size."""
    before = peak()
    settings = tiny_settings(**{"capacities": "1x-2x", "mapping": "element"} | changes)
    plan = Plan.of(settings, Public(1))
    held = plan.assignments(0)[-1].projections
    assert held is not None
    order = Order(Sent(0, 0, held, {name: torch.zeros(one.size) for name, one in held.items()}), settings, 1, 1, 1)
    data = tiny_data(users=1, items=4)
    local = LocalData(replace(data.train, num_items=1), None)
    with pytest.raises(InvalidMessage, match=words):
        DeviceWork(unpack_order(pack_order(order)[0]), local, DeviceState(), 1)
    assert peak() - before < 2 * LARGE


def test_a_word_that_is_not_known_is_compared_with_known_ones_unless_it_is_endless() -> None:
    assert "'neumf'" in nearest("neumff", ["mf", "neumf"])
    assert nearest("neumf" * 10_000, ["mf", "neumf" * 10_000]) == ""  # took fifty times its length


def test_layers_beyond_reason_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="in its layers"):
        refuse_large(Architecture(tiny_settings(model="neumf", factors=4096), 1, 1))


@pytest.mark.filterwarnings("ignore")
def test_spoiled_messages_are_refused_or_harmless() -> None:
    """Orders, answers, surveys, numberings, capacities: see ``fuzz_messages.py``, which runs as many as one likes."""
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


def trained(items: int = 40, support: int = 1) -> tuple[Order, LocalData]:
    """An order of a model of pairs that was made of twelve users."""
    settings = Settings(
        algorithm={"kind": "correlations", "support": support, "choose": False}, fleet={"capacities": "1x-4x"},
        run={"rounds": 1},
    )  # fmt: skip
    raw = tiny_data(1, 12, items)
    world = World.of(settings, numbered(raw, settings))
    state = run_round(world.initial(), world.fleet, world.people, Rejections(), in_turn)
    (sent,) = world.plan.algorithm.send(world.plan, state, [0])
    assert isinstance(world.data, Dataset)
    return Order(sent, settings, items, 5, 6), LocalData(world.data.train, world.data.test)


@pytest.mark.parametrize("block", [3, 7, 8_192])
def test_a_catalogue_far_beyond_the_model_costs_a_device_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model does not tell apart comes in its order, in whatever blocks it is looked at."""
    order, data = trained()
    whole = DeviceWork(order, data, DeviceState(run=5), 1).quality()
    monkeypatch.setattr("fairfold.flower.device.BLOCK_ITEMS", block)
    assert DeviceWork(order, data, DeviceState(run=5), 1).quality() == whole
    looked_at = 0
    block_scores = type(order.settings.algorithm).block_scores

    def counted(self: Any, plan: Any, sent: Any, vectors: Any, items: Any) -> Any:
        nonlocal looked_at
        looked_at += len(items)
        return block_scores(self, plan, sent, vectors, items)

    monkeypatch.setattr(type(order.settings.algorithm), "block_scores", counted)
    assert DeviceWork(replace(order, items=2**31), data, DeviceState(run=5), 1).quality() == whole
    assert 0 < looked_at < 1_000


@pytest.mark.parametrize("support", [1, 6, 7])
def test_looking_at_all_items_finds_nothing_better(support: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of few items fills the first places with others, in their order."""
    order, data = trained(support=support)

    def first() -> torch.Tensor:
        work = DeviceWork(order, data, DeviceState(run=5), 1)
        vectors = work.plan.algorithm.own_vectors(work.plan, work.sent, work.people, work.users)
        return work._best(vectors, work.users, 20)

    some = first()
    assert (order.sent.projections["rows"].shape[0] < 20) == (support > 1)
    monkeypatch.setattr(type(order.settings.algorithm), "candidates", lambda *_: 40)
    assert torch.equal(first(), some)


def test_items_without_a_score_come_in_their_order_in_whatever_blocks() -> None:
    rows = torch.tensor([[1.0, 1.0, 2.0], [1.0, 1.0, -1.0], [1.0, 0.5, 1.0]])
    served = Served(rows, torch.empty(0, 3), 1.0)
    made = served.histories([torch.tensor([0]), torch.tensor([1, 2])])
    blocks = [served.scores(made, torch.arange(first, first + 5)) for first in range(0, 40, 5)]
    scores = torch.cat(blocks, dim=1)
    assert bool((scores[:, 3:].diff(dim=1) < 0).all())
    assert bool((scores[:, 3] < scores[:, :3].amin(1)).all())


@pytest.mark.parametrize("item", [1e9, -1.0, 40.0])
def test_pairs_of_items_that_are_none_are_refused(item: float) -> None:
    order, data = trained()
    name = next(name for name in ("near", "pairs") if order.sent.vectors.get(name, torch.empty(0)).numel())
    order.sent.vectors[name].view(-1, 3)[0, 1] = item
    with pytest.raises(InvalidMessage, match="items that are none"):
        DeviceWork(order, data, DeviceState(run=5), 1).reply(train=False, quality=True)
