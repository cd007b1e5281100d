"""Real messages, spoiled in every way, read by both sides: refused with words, or harmless; never large.

    python -m tests.flower.fuzz_messages --count 200000 --seed 1                # as many of every kind
    python -m tests.flower.fuzz_messages --count 10000000 --seed 1 --orders .02  # more of the kinds that are read fast
    python -m tests.flower.fuzz_messages --count 200000 --seed 1 --allocations  # what each of them allocates is counted

It says what came of them. An order is read a hundred times slower than an answer: it is carried out if it can be read.

With ``--allocations`` (Linux, with a C compiler) no message may take more than twice what was agreed and ``BESIDE``.
What was agreed is what a good message of the same kind takes, vectors and words together: all that a device does for an
order, all that a server does with an answer. Settings that an order may have as well (``algorithm.prox``) are agreed by
it. All these are small here, so that every byte beyond them shows.
"""

import argparse
import atexit
import json
import logging
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fairfold.data.clients import Clients
from fairfold.errors import FairfoldError, InvalidMessage
from fairfold.flower.device import DeviceWork
from fairfold.flower.local import LocalData, LocalImages
from fairfold.flower.nodes import Nodes
from fairfold.flower.offline import given_model, keep_model, read_model
from fairfold.flower.protocol import ARRAYS, FACTS, VERSION
from fairfold.flower.store import DeviceState
from fairfold.flower.wire import (
    Order,
    Reply,
    ask,
    asked_in,
    pack_order,
    pack_reply,
    pack_survey,
    tell,
    told_in,
    unpack_order,
    unpack_reply,
    unpack_survey,
)
from fairfold.protocol.words import numbers_of
from fairfold.runs.device import contents, reduced_to
from fairfold.runs.tensors import sealed_bytes
from fairfold.settings import Settings
from fairfold.simulate.numbering import numbered
from fairfold.simulate.world import World
from tests.federations import tiny_data
from tests.flat import flat
from tests.flower.allocations import Allocations, counted, counting
from tests.pictures import pictures

ITEMS, LARGEST_WEIGHT = 40, 100.0
BESIDE = 1 << 18
"""Bytes beside what was agreed: four times the longest text of a message, which is parsed, and quoted where refused."""

SETTINGS: dict[str, dict[str, Any]] = {
    "correlations": {"solver": "correlations"},
    "neumf": {"solver": "gradient", "model": "neumf", "factors": 4},
    "closed_form": {"solver": "closed_form", "factors": 4},
    "heterofl": {"solver": "gradient", "model": "mf", "method": "heterofl", "aggregation": "paper", "factors": 4},
    "fedhm": {
        "solver": "gradient",
        "model": "mf",
        "method": "fedhm",
        "aggregation": "paper",
        "factors": 4,
        "capacities": "1x-2x",
    },
    "closed_form by counts": {"solver": "closed_form", "support": 2, "popularity": "counts", "factors": 4},
    "ratings": {"solver": "ratings", "streamed": True, "factors": 4},
    "mlp": {"data": "pictures", "model": "mlp", "images": {"devices": 4}, "local_epochs": 1},
    "mlp prox": {"data": "pictures", "model": "mlp", "images": {"devices": 4}, "local_epochs": 1, "prox": 0.1},
}


@dataclass(frozen=True)
class Kind:
    """A kind of message: how a good one is made, and what its receiver does with it."""

    make: Callable[[], RecordDict]
    read: Callable[[RecordDict], None]


def kinds() -> dict[str, Kind]:
    """All that travels."""
    found: dict[str, Kind] = {}
    for name, keys in SETTINGS.items():
        for half in (False, True):
            found |= _of_round(
                f"{name}{' half' if half else ''}",
                flat(**{"capacities": "1x-4x", "clients_per_round": None} | keys),
                half,
            )
    settings = flat(**SETTINGS["ratings"])
    mine, window = tiny_data(1, 6, ITEMS, ratings=True).train, range(ITEMS)
    answer = settings.algorithm.survey(settings, mine, window)
    asked, survey = ask(settings, ITEMS, window), pack_survey(answer)
    found["order of a survey"] = Kind(lambda: _copied(asked), lambda content: _nothing(asked_in(content)))
    found["survey"] = Kind(lambda: _copied(survey), lambda content: _nothing(unpack_survey(content, settings, window)))
    place = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(1))
    told = tell(7, place, window, ratings=True)
    found["numbering"] = Kind(lambda: _copied(told), lambda content: _nothing(told_in(content)))
    found["model"] = _model()
    facts: dict[str, Any] = {"version": VERSION, "capacity": "4x", "number": 3, "name": "ab"}
    capacity = RecordDict({FACTS: ConfigRecord(facts)})
    found["capacity"] = Kind(lambda: _copied(capacity), _note)
    return found


def _array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """The same for a tensor."""
    found = Array.__new__(Array)
    found.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return found


def _nothing(_found: object) -> None:
    """What was read is let go."""


def _note(content: RecordDict) -> None:
    nodes = Nodes(Settings())
    nodes._note(5, content)
    if not nodes.usable:
        assert nodes.left_out
        raise InvalidMessage("a node left out", "a node that can be used", "None.")


def _model() -> Kind:
    """What a device is given at the end, as the file that it keeps."""
    settings = flat(solver="correlations", capacities="1x-4x", clients_per_round=None)
    world = World.of(settings, numbered(tiny_data(1, 6, ITEMS), settings))
    held = reduced_to(world.plan.capacities[1], world.plan, world.initial())
    tensors, told = contents(
        held, settings, world.initial(), {"name": "devices", "items": ITEMS}, ("ndcg@20", None, None)
    )
    given = given_model(sealed_bytes(tensors, told))
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    atexit.register(shutil.rmtree, folder)

    def device(content: RecordDict) -> None:
        keep_model(folder, content, "1MB")
        assert read_model(folder).items == ITEMS

    return Kind(lambda: _copied(given), device)


def _of_round(name: str, settings: Settings, half: bool) -> dict[str, Kind]:
    """An order and the answer to it."""
    images, rated = settings.model.reads_images, settings.predicts_ratings
    raw: Any = pictures(count=24, side=4) if images else tiny_data(1, 6, ITEMS, rated)
    world = World.of(settings, raw if images else numbered(raw, settings))
    plan = world.plan
    (sent,) = plan.algorithm.send(plan, world.initial(), [1])
    picture = (*raw.train.images.shape[1:], raw.num_classes) if images else None
    order = Order(sent, settings, 0 if images else ITEMS, 5, 6, 0, half, True, 0, picture)
    records, order = pack_order(order)
    data: Any = LocalData(raw.train, raw.test, clients=[2]) if not images else LocalImages(
        raw, Clients(torch.tensor([0, len(raw.train.labels)]))
    )  # fmt: skip

    def device(content: RecordDict) -> None:
        found = unpack_order(content)
        for key, vector in found.sent.vectors.items():
            held = found.sent.projections.get(key)
            assert held is None or vector.shape == (held.size,)
            assert bool(vector.isfinite().all())
        if found.settings.model.own:
            raise InvalidMessage("a model of one's own", "one of ours", "None.")  # as a device does
        DeviceWork(found, data, DeviceState(run=found.run), 1).reply(train=True, quality=True)

    reply, _ = DeviceWork(order, data, DeviceState(run=5), 1).reply(train=True, quality=True)
    sizes, values = plan.algorithm.answer_shapes(plan, order.sent), plan.algorithm.values

    def server(content: RecordDict) -> None:
        answer = unpack_reply(content, order, sizes, LARGEST_WEIGHT, values=values)
        assert answer.answer is not None
        problem = plan.algorithm.problem(plan, order.sent, answer.answer)
        if problem is not None:
            raise InvalidMessage(problem, "an answer", "None.")
        assert 0 < answer.answer.weight <= LARGEST_WEIGHT
        for key, vector in answer.answer.sums.items():
            assert vector.shape == (sizes[key],)
            assert bool(numbers_of(vector).isfinite().all())

    said = pack_reply(order, Reply(reply.answer, reply.quality), values=values)
    return {
        f"order {name}": Kind(lambda: _copied(records), device),
        f"answer {name}": Kind(lambda: _copied(said), server),
    }


def _copied(records: RecordDict) -> RecordDict:
    """The same to be spoiled; what is in it was checked when it was made, and is not looked at again."""
    found = records.copy()
    for name, record in records.items():
        _put(found, name, record.copy())
    return found


def _put(record: Any, name: str, value: Any) -> None:
    """Set a value as it would have come over a network, without Flower's checks of what is sent."""
    record.__dict__["_data"][name] = value


# -- how messages are spoiled ------------------------------------------------------------------------------------------

Mutation = Callable[[RecordDict, random.Random], None]
STRANGE: list[Any] = [
    0, -1, 1, 2**31, 2**62, -(2**63), 0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, "", "x",
    "0" * 70_000, "f" * 16, b"", b"\x80\x04K\x01.", True, False, [], [1], [1.0], [float("nan")] * 9, ["a"], [b"a"],
    [True], [0] * 100_000, "[" * 60_000, "{\"a\":" * 10_000, "9" * 5_000, "null", "[1e999]", "NaN",
]  # fmt: skip
STRANGE_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**31 - 1, 2**40, 2**62, 2**64, 10**400, 0.5, -0.5, 1e308, float("nan"),
    float("inf"), "", "x", "x" * 60_000, "ranked", "chunk", "element", "mlp", "lenet", "neumf", "os:system", "ratings",
    "correlations", [], ["x", 2147483648], [2147483648, 2147483648], [1] * 5_000, [[[[[[1]]]]]], {}, {"a": 1},
    {"kind": "hashed"}, {"kind": ["x"]},
]  # fmt: skip
TEXTS = ("settings", "projections", "context", "beside")


def strange_fact(content: RecordDict, chance: random.Random) -> None:
    facts = content.get(FACTS)
    if isinstance(facts, ConfigRecord):
        _put(facts, chance.choice([*facts, "more"]), chance.choice(STRANGE))


def lost_fact(content: RecordDict, chance: random.Random) -> None:
    facts = content.get(FACTS)
    if isinstance(facts, ConfigRecord) and facts:
        del facts[chance.choice(list(facts))]


def strange_value(content: RecordDict, chance: random.Random) -> None:
    """Another value, or one less or more, somewhere within settings, projections or lengths."""
    facts = content.get(FACTS)
    texts = [key for key in TEXTS if isinstance(facts, ConfigRecord) and isinstance(facts.get(key), str)]
    if not texts or not isinstance(facts, ConfigRecord):
        return
    key = chance.choice(texts)
    try:
        whole = json.loads(str(facts[key]))
    except (ValueError, RecursionError):
        return
    inner: Any = whole
    while isinstance(inner, dict | list) and inner:
        place: Any = chance.choice(list(inner)) if isinstance(inner, dict) else chance.randrange(len(inner))
        if not isinstance(inner[place], dict | list) or not inner[place] or chance.random() < 0.2:
            kind = chance.randrange(6)
            if kind == 0:
                del inner[place]
            elif kind == 1 and isinstance(inner, dict):
                inner[chance.choice(["more", "kind", "factors", "shape", "size"])] = chance.choice(STRANGE_VALUES)
            else:
                inner[place] = chance.choice(STRANGE_VALUES)
            break
        inner = inner[place]
    _put(facts, key, json.dumps(whole))


def other_record(content: RecordDict, chance: random.Random) -> None:
    records: list[Any] = [ArrayRecord(), ConfigRecord(), MetricRecord({"a": 1}), ConfigRecord({"version": VERSION})]
    content[chance.choice([ARRAYS, FACTS, "more"])] = chance.choice(records)


def lost_record(content: RecordDict, chance: random.Random) -> None:
    del content[chance.choice(list(content))]


def _arrays(content: RecordDict) -> ArrayRecord:
    arrays = content.get(ARRAYS)
    return arrays if isinstance(arrays, ArrayRecord) else ArrayRecord()


def other_tensor(content: RecordDict, chance: random.Random) -> None:
    arrays = _arrays(content)
    types: list[Any] = [numpy.float32, numpy.float64, numpy.float16, numpy.int32, numpy.complex64, numpy.bool_]
    shape = chance.choice([(), (0,), (3,), (3, 2), (30,), (1, 30)])
    name = chance.choice([*arrays, "../../etc/passwd"])
    arrays[name] = Array(numpy.zeros(shape, dtype=chance.choice(types)))


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
    _put(arrays, name, _array(array.dtype, array.shape, array.stype, bytes(data)))


def strange_number(content: RecordDict, chance: random.Random) -> None:
    arrays = _arrays(content)
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array = arrays[name]
    types = {"float16": numpy.float16, "float64": numpy.float64, "int64": numpy.int64}
    kind: Any = types.get(array.dtype, numpy.float32)
    size = numpy.dtype(kind).itemsize
    if len(array.data) < 128 + size:
        return
    value = chance.choice([float("nan"), float("inf"), -float("inf"), 6e4, 3e38])
    if kind is numpy.int64:
        value = chance.choice([-1, 2**62, 40])
    with numpy.errstate(over="ignore"):
        piece = numpy.array(value, dtype=kind).tobytes()
    _put(arrays, name, _array(array.dtype, array.shape, array.stype, array.data[:-size] + piece))


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
    _put(arrays, name, _array(*chance.choice(lies), array.data))


MUTATIONS: list[Mutation] = [
    strange_fact, lost_fact, strange_value, strange_value, strange_value, other_record, lost_record, other_tensor,
    damaged_bytes, strange_number, lying_description,
]  # fmt: skip


# -- runs --------------------------------------------------------------------------------------------------------------


def peak() -> int:
    """Bytes that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(
    count: int, seed: int, *, only: str = "", orders: float | None = None, worst: Counter[str] | None = None
) -> Counter[str]:
    """Spoil and read so many messages; what came of them. Whatever is no error with words is raised.

    ``orders`` is the share of orders; as many as of every other kind if not given. With ``worst`` allocations are
    counted: the most that a message of each kind took beyond twice what was agreed is written there, and more than
    ``BESIDE`` is an error. What is loaded once is not a message's: one that takes too much is read again.
    """
    chance, outcomes = random.Random(seed), Counter[str]()
    known = {name: kind for name, kind in kinds().items() if only in name}
    slow = [name for name in known if name.startswith("order")]
    fast = [name for name in known if name not in slow]
    share = len(slow) / len(known) if orders is None or not (slow and fast) else orders
    memory, agreed = Allocations() if worst is not None else None, dict[str, int]()
    for name, kind in known.items():
        kind.read(kind.make())  # a good one is read
        if memory is not None:
            taken = memory.around(partial(kind.read, kind.make()))
            agreed[_what(name)] = max(agreed.get(_what(name), 0), taken)
    for _ in range(count):
        name = chance.choice(slow if chance.random() < share else fast)
        content, done = known[name].make(), []
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            if content:
                mutation = chance.choice(MUTATIONS)
                mutation(content, chance)
                done.append(mutation.__name__)
        told = f"message {outcomes.total() + 1} of seed {seed}, {name} after {', '.join(done)}"
        work = partial(_outcome, known[name], content, told)
        if memory is None or worst is None:
            outcomes[work()] += 1
            continue
        most = agreed[_what(name)]
        limit = 2 * most + BESIDE
        taken = memory.around(lambda work=work: outcomes.update([work()]))  # type: ignore[misc]
        if taken > limit and (taken := memory.around(work)) > limit:
            raise AssertionError(f"{told}: {taken:,} bytes, where {most:,} were agreed")
        worst[name] = max(worst[name], taken - 2 * most)
    return outcomes


def _what(name: str) -> str:
    """What is asked for, or answered, by a kind of message: what its order says in which way is all one."""
    return name.removesuffix(" half").removesuffix(" prox")


def _outcome(kind: Kind, content: RecordDict, told: str) -> str:
    """What comes of a message."""
    try:
        kind.read(content)
    except FairfoldError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    return "harmless"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    parser.add_argument("--orders", type=float, help="share of orders; as many as of every other kind if not given")
    parser.add_argument("--allocations", action="store_true", help="count what each message allocates")
    given = parser.parse_args()
    if given.allocations and not counted():
        command = [sys.executable, "-m", "tests.flower.fuzz_messages", *sys.argv[1:]]
        with counting() as environment:
            sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    worst = Counter[str]() if given.allocations else None
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # messages are small
    fuzz(min(given.count, 2_000), given.seed + 1, only=given.only)  # everything is loaded
    before, started = peak(), time.monotonic()
    outcomes = fuzz(given.count, given.seed, only=given.only, orders=given.orders, worst=worst)
    seconds = time.monotonic() - started
    print(  # noqa: T201
        f"{given.count} messages, seed {given.seed}: {dict(outcomes)}, {seconds:.0f} s, {peak() - before:,} bytes more"
    )
    if worst:
        name, taken = worst.most_common(1)[0]
        print(f"each took at most twice what was agreed and {max(taken, 0):,} of {BESIDE:,} bytes ({name})")  # noqa: T201


if __name__ == "__main__":
    main()
