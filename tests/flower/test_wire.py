"""What travels arrives as it was; what is not exactly what was asked for is refused, whatever it is."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fairfold.errors import InvalidMessage
from fairfold.federation.settings import read_settings
from fairfold.federation.task import Weights
from fairfold.flower import wire
from fairfold.flower.plan import Plan
from fairfold.flower.protocol import ARRAYS, FACTS
from fairfold.flower.wire import Answer, Order, pack_answer, pack_order, unpack_answer, unpack_order
from tests.federations import tiny_settings


def an_order(half: bool = False, **changes: Any) -> tuple[Order, Weights]:
    settings = tiny_settings(capacities="1x-4x", model="neumf", **changes)
    plan = Plan.of(settings, 40)
    projections = plan.assignments(3)[1].projections
    assert projections is not None
    source = torch.Generator().manual_seed(1)
    vectors = {name: torch.randn(held.size, generator=source) for name, held in projections.items()}
    return Order(3, plan.seed(3), settings, projections, half), vectors


@pytest.mark.parametrize("half", [False, True])
def test_orders_and_answers_arrive_as_they_were(half: bool) -> None:
    order, vectors = an_order(half, rehash=True)
    records, seen = pack_order(order, vectors)
    found, received = unpack_order(records)
    assert (found.round_number, found.seed, found.projections) == (3, order.seed, order.projections)
    own = {"data", "top_users", "world", "faults", "backend", "patience", "threshold"}
    assert found.settings.model_dump(exclude=own) == order.settings.model_dump(exclude=own)
    for name, vector in vectors.items():
        assert torch.equal(received[name], seen[name])
        tolerance = 2**-11 * float(vector.abs().max()) if half else 0.0
        assert float((received[name] - vector).abs().max()) <= tolerance
    answer = unpack_answer(pack_answer(order, Answer(vectors, 2.0, (0.5, 3))), order, 10.0)
    assert answer.weight == 2.0
    assert answer.quality == (0.5, 3)
    assert all(torch.equal(answer.change[name], seen[name]) for name in vectors)


def test_a_server_from_before_some_settings_is_understood_as_it_meant() -> None:
    """What it does not name is at the setting's own default, whatever the solver takes by now."""
    order, vectors = an_order()
    meant = read_settings({"solver": "least_squares", "tail_share": None, "support": 0})
    content, _ = pack_order(replace(order, settings=meant), vectors)
    facts = content.config_records[FACTS]
    sent = json.loads(str(facts["settings"]))
    del sent["tail_share"], sent["support"], sent["images"]["mean"]
    facts["settings"] = json.dumps(sent)
    assert read_settings(sent) != meant
    assert unpack_order(content)[0].settings == meant
    for text, words in ((json.dumps(sent | {"of_tomorrow": 1}), "unknown key 'of_tomorrow'"), ("[1]", "be read")):
        facts["settings"] = text
        with pytest.raises(InvalidMessage, match=words):
            unpack_order(content)


@given(st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
def test_half_floats_keep_eleven_bits_at_any_scale(scale: float, seed: int) -> None:
    vector = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * scale
    vector = vector.clamp(-3e38, 3e38)
    record, scales = wire.pack({"a": vector}, half=True)
    found = wire.unpack(record, scales, {"a": 50}, half=True)["a"]
    near = (found - vector).abs() <= vector.abs() * 2**-11 + vector.abs().max() * 2**-39
    assert bool(near.all())


@pytest.mark.parametrize("exponent", [-140, -126, -20, -1, 0, 1, 16, 100, 126])
def test_half_floats_just_below_a_power_of_two_do_not_round_to_infinity(exponent: int) -> None:
    largest = float(torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))) * 2.0**exponent
    vector = torch.tensor([largest, -largest, 0.0])
    record, scales = wire.pack({"a": vector}, half=True)
    torch.testing.assert_close(wire.unpack(record, scales, {"a": 3}, half=True)["a"], vector, rtol=2**-11, atol=0)


def test_an_order_is_an_answer_to_nothing() -> None:
    order, vectors = an_order()
    with pytest.raises(InvalidMessage):
        unpack_answer(pack_order(order, vectors)[0], order, 10.0)


# -- mutated messages --------------------------------------------------------------------------------------------------

Mutation = Callable[[RecordDict, random.Random], None]
STRANGE: list[Any] = [
    0, -1, 1, 2**62, 0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, "", "x", "0" * 70_000, b"",
    b"\x80\x04K\x01.", True, False, [], [1], [1.0], [float("nan")] * 9, ["a"], [b"a"], [True],
]  # fmt: skip


def strange_fact(content: RecordDict, chance: random.Random) -> None:
    facts = content.get(FACTS)
    if isinstance(facts, ConfigRecord):
        facts[chance.choice([*facts, "more"])] = chance.choice(STRANGE)


def lost_fact(content: RecordDict, chance: random.Random) -> None:
    facts = content.get(FACTS)
    if isinstance(facts, ConfigRecord) and facts:
        del facts[chance.choice(list(facts))]


def other_record(content: RecordDict, chance: random.Random) -> None:
    records: list[Any] = [ArrayRecord(), ConfigRecord(), MetricRecord({"a": 1}), ConfigRecord({"version": 1})]
    content[chance.choice([ARRAYS, FACTS, "more"])] = chance.choice(records)


def lost_record(content: RecordDict, chance: random.Random) -> None:
    del content[chance.choice(list(content))]


def _arrays(content: RecordDict) -> ArrayRecord:
    arrays = content.get(ARRAYS)
    return arrays if isinstance(arrays, ArrayRecord) else ArrayRecord()


def other_tensor(content: RecordDict, chance: random.Random) -> None:
    arrays = _arrays(content)
    kinds: list[Any] = [numpy.float32, numpy.float64, numpy.float16, numpy.int32, numpy.complex64, numpy.bool_]
    shape = chance.choice([(), (0,), (3,), (3, 2), (30,), (1, 30)])
    name = chance.choice([*arrays, "../../etc/passwd"])
    arrays[name] = Array(numpy.zeros(shape, dtype=chance.choice(kinds)))


def damaged_bytes(content: RecordDict, chance: random.Random) -> None:
    arrays = _arrays(content)
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array, data = arrays[name], bytearray(arrays[name].data)
    kind = chance.randrange(4)
    if kind == 0 and data:
        data[chance.randrange(min(len(data), 128))] = chance.randrange(256)  # the header, where lies would stand
    elif kind == 1:
        data = data[: chance.randrange(len(data) + 1)]
    elif kind == 2:
        data += bytes(chance.randrange(1, 9_000))
    else:
        size = f"({chance.choice([2**31, 2**60, 10**18])},)".encode()
        data = bytearray(bytes(data).replace(b"(", size + b"(", 1))
    arrays[name] = Array(array.dtype, array.shape, array.stype, bytes(data))


def strange_number(content: RecordDict, chance: random.Random) -> None:
    arrays = _arrays(content)
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array = arrays[name]
    itemsize = {"float16": 2}.get(array.dtype, 4)
    if len(array.data) < 128 + itemsize:
        return
    value = chance.choice([float("nan"), float("inf"), -float("inf"), 6e4, 3e38])
    with numpy.errstate(over="ignore"):
        piece = numpy.array(value, dtype=numpy.float16 if itemsize == 2 else numpy.float32).tobytes()
    arrays[name] = Array(array.dtype, array.shape, array.stype, array.data[:-itemsize] + piece)


def lying_description(content: RecordDict, chance: random.Random) -> None:
    arrays = _arrays(content)
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array = arrays[name]
    lies: list[tuple[str, tuple[int, ...], str]] = [
        ("float64", array.shape, array.stype), (array.dtype, (2**60,), array.stype), (array.dtype, (-1,), array.stype),
        (array.dtype, (), array.stype), (array.dtype, array.shape, "pickle"), ("object", array.shape, array.stype),
        ("O" * 9000, (1,) * 9000, ""),
    ]  # fmt: skip
    arrays[name] = Array(*chance.choice(lies), array.data)


MUTATIONS: list[Mutation] = [
    strange_fact, lost_fact, other_record, lost_record, other_tensor, damaged_bytes, strange_number, lying_description,
]  # fmt: skip


@pytest.mark.parametrize("half", [False, True])
def test_ten_thousand_mutated_answers_are_refused_or_harmless(half: bool) -> None:
    """Nothing but InvalidMessage comes out, and what is accepted is finite, in range and of the agreed sizes."""
    order, vectors = an_order(half, largest_change=100.0)
    chance, refused, accepted = random.Random(7), 0, 0
    for _ in range(6_000):
        content = pack_answer(order, Answer(vectors, 2.0, (0.5, 3)))
        for _ in range(chance.randrange(1, 4)):
            if content:
                chance.choice(MUTATIONS)(content, chance)
        try:
            answer = unpack_answer(content, order, 10.0)
        except InvalidMessage:
            refused += 1
            continue
        accepted += 1
        assert answer.change.keys() == vectors.keys()
        assert 0 < answer.weight <= 10
        assert answer.quality is None or 0 <= answer.quality[0] <= answer.quality[1] * (1 + 1e-9)
        for name, vector in answer.change.items():
            assert vector.shape == (order.projections[name].size,)
            assert vector.dtype == torch.float32
            assert float(vector.abs().max()) <= 100.0  # False for NaN as well
    assert refused > 4_000
    assert accepted > 20, "mutations that change nothing that matters"


def test_two_thousand_mutated_orders_are_refused_or_readable() -> None:
    order, vectors = an_order()
    chance, refused = random.Random(8), 0
    for _ in range(2_000):
        content = pack_order(order, vectors)[0]
        for _ in range(chance.randrange(1, 4)):
            if content:
                chance.choice(MUTATIONS)(content, chance)
        try:
            found, received = unpack_order(content)
        except InvalidMessage:
            refused += 1
            continue
        assert all(received[name].shape == (held.size,) for name, held in found.projections.items())
    assert refused > 1_000
