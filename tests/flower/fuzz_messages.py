"""Real messages, spoiled in every way, read by both sides: refused with an error, or harmless; never large.

    python -m tests.flower.fuzz_messages --count 200000 --seed 1                # as many of every kind
    python -m tests.flower.fuzz_messages --count 10000000 --seed 1 --tasks .02  # more of the kinds that are read fast
    python -m tests.flower.fuzz_messages --count 200000 --seed 1 --allocations  # what each of them allocates is counted

It prints the outcomes. A task is read a hundred times slower than a reply: it is carried out if it can be read.

With ``--allocations`` (Linux, with a C compiler) no message may take more than twice what was agreed and ``BESIDE``.
What was agreed is what a good message of the same kind takes in all: what a client does for a
task, what a server does with a reply. Settings that a task may have as well (``algorithm.prox``) are agreed by
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

from fairfold.config import Settings
from fairfold.data.partition import Partition
from fairfold.device.stored_model import read_model
from fairfold.errors import FairfoldError, InvalidMessage
from fairfold.federation.federation import Federation, number_items
from fairfold.federation.updates import nonzero_values
from fairfold.flower.client_store import ClientState
from fairfold.flower.client_tasks import TaskRunner
from fairfold.flower.device_model import model_message, store_model
from fairfold.flower.local_data import LocalData, LocalImages
from fairfold.flower.nodes import Nodes
from fairfold.flower.protocol import ARRAYS, FACTS, VERSION
from fairfold.flower.wire import (
    Reply,
    TaskRequest,
    pack_numbering,
    pack_reply,
    pack_request,
    pack_statistics,
    pack_statistics_request,
    unpack_numbering,
    unpack_reply,
    unpack_request,
    unpack_statistics,
    unpack_statistics_request,
)
from fairfold.runs.device_model import device_file_contents, reduce_model
from fairfold.runs.tensors import checked_tensor_bytes
from tests.flower.allocations import Allocations, counted, counting
from tests.support.federations import tiny_data
from tests.support.pictures import pictures
from tests.support.settings import make_settings

ITEMS, LARGEST_WEIGHT = 40, 100.0
BESIDE = 1 << 18
"""Bytes beside what was agreed: four times the longest text of a message, which is parsed, and quoted where refused."""

SETTINGS: dict[str, dict[str, Any]] = {
    "co_occurrence": {"algorithm": "co_occurrence"},
    "neumf": {"algorithm": "gradient", "model": "neumf", "factors": 4},
    "closed_form": {"algorithm": "closed_form", "factors": 4},
    "heterofl": {"algorithm": "gradient", "model": "mf", "method": "heterofl", "aggregation": "paper", "factors": 4},
    "fedhm": {
        "algorithm": "gradient",
        "model": "mf",
        "method": "fedhm",
        "aggregation": "paper",
        "factors": 4,
        "capacities": "1x-2x",
    },
    "closed_form by counts": {"algorithm": "closed_form", "support": 2, "popularity": "counts", "factors": 4},
    "ratings": {"algorithm": "ratings", "streamed": True, "factors": 4},
    "mlp": {"data": {"name": "pictures", "clients": 4}, "model": "mlp", "local_epochs": 1},
    "mlp prox": {"data": {"name": "pictures", "clients": 4}, "model": "mlp", "local_epochs": 1, "prox": 0.1},
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
                make_settings(**{"capacities": "1x-4x", "clients_per_round": None} | keys),
                half,
            )
    settings = make_settings(**SETTINGS["ratings"])
    mine, window = tiny_data(1, 6, ITEMS, ratings=True).train, range(ITEMS)
    statistics = settings.algorithm.client_statistics(settings, mine, window)
    asked, statistics_record = pack_statistics_request(settings, ITEMS, window), pack_statistics(statistics)
    found["task statistics"] = Kind(
        lambda: _copied(asked), lambda content: _nothing(unpack_statistics_request(content))
    )
    found["statistics"] = Kind(
        lambda: _copied(statistics_record),
        lambda content: _nothing(unpack_statistics(content, settings, ITEMS, window, 1e4)),
    )
    place = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(1))
    numbering = pack_numbering(7, place, window, ratings=True)
    found["numbering"] = Kind(lambda: _copied(numbering), lambda content: _nothing(unpack_numbering(content)))
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
    nodes._add_node(5, content)
    if not nodes.usable:
        assert nodes.left_out
        raise InvalidMessage("a node left out", "a node that can be used", "None.")


def _model() -> Kind:
    """What a device is given at the end, as the file that it keeps."""
    settings = make_settings(algorithm="co_occurrence", capacities="1x-4x", clients_per_round=None)
    world = Federation.of(settings, number_items(tiny_data(1, 6, ITEMS), settings))
    held = reduce_model(world.plan.capacities[1], world.plan, world.initial())
    tensors, metadata = device_file_contents(
        held, settings, world.initial(), {"name": "devices", "items": ITEMS}, ("ndcg@20", None, None)
    )
    given = model_message(checked_tensor_bytes(tensors, metadata))
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    atexit.register(shutil.rmtree, folder)

    def device(content: RecordDict) -> None:
        store_model(folder, content, "1MB")
        assert read_model(folder).items == ITEMS

    return Kind(lambda: _copied(given), device)


def _of_round(name: str, settings: Settings, half: bool) -> dict[str, Kind]:
    """A task and the reply to it."""
    images, rated = settings.model.reads_images, settings.predicts_ratings
    raw: Any = pictures(count=24, side=4) if images else tiny_data(1, 6, ITEMS, rated)
    world = Federation.of(settings, raw if images else number_items(raw, settings))
    plan = world.plan
    (task,) = plan.algorithm.tasks(plan, world.initial(), [1])
    image_shape = (*raw.train.images.shape[1:], raw.num_classes) if images else None
    request = TaskRequest(task, settings, 0 if images else ITEMS, 5, 6, 0, half, True, 0, image_shape)
    records, request = pack_request(request)
    data: Any = LocalData(raw.train, raw.test, client_ids=[2]) if not images else LocalImages(
        raw, Partition(torch.tensor([0, len(raw.train.labels)]))
    )  # fmt: skip

    def device(content: RecordDict) -> None:
        found = unpack_request(content)
        for key, vector in found.task.vectors.items():
            held = found.task.projections.get(key)
            assert held is None or vector.shape == (held.size,)
            assert bool(vector.isfinite().all())
        if found.settings.model.is_custom:
            raise InvalidMessage("a model of one's own", "one of ours", "None.")  # as a device does
        TaskRunner(found, data, ClientState(run=found.run), 1).reply(train=True, evaluate=True)

    reply, _ = TaskRunner(request, data, ClientState(run=5), 1).reply(train=True, evaluate=True)
    sizes, values = plan.algorithm.update_shapes(plan, request.task), plan.algorithm.sends_weights

    def server(content: RecordDict) -> None:
        found_reply = unpack_reply(content, request, sizes, LARGEST_WEIGHT, sends_weights=values)
        assert found_reply.update is not None
        problem = plan.algorithm.validate_update(plan, request.task, found_reply.update)
        if problem is not None:
            raise InvalidMessage(problem, "an update", "None.")
        assert 0 < found_reply.update.weight <= LARGEST_WEIGHT
        for key, vector in found_reply.update.sums.items():
            assert vector.shape == (sizes[key],)
            assert bool(nonzero_values(vector).isfinite().all())

    reply_record = pack_reply(request, Reply(reply.update, reply.quality), sends_weights=values)
    return {
        f"task {name}": Kind(lambda: _copied(records), device),
        f"reply {name}": Kind(lambda: _copied(reply_record), server),
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
    "co_occurrence", [], ["x", 2147483648], [2147483648, 2147483648], [1] * 5_000, [[[[[[1]]]]]], {}, {"a": 1},
    {"kind": "hashed"}, {"kind": ["x"]},
]  # fmt: skip
TEXTS = ("settings", "projections", "context", "unprojected")


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
    count: int, seed: int, *, only: str = "", tasks: float | None = None, worst: Counter[str] | None = None
) -> Counter[str]:
    """Spoil and read so many messages; what came of them. Whatever is no error with words is raised.

    ``tasks`` is the share of tasks; as many as of every other kind if not given. With ``worst`` allocations are
    counted: the most that a message of each kind took beyond twice what was agreed is written there, and more than
    ``BESIDE`` is an error. What is loaded once is not a message's: one that takes too much is read again.
    """
    chance, outcomes = random.Random(seed), Counter[str]()
    known = {name: kind for name, kind in kinds().items() if only in name}
    slow = [name for name in known if name.startswith("task")]
    fast = [name for name in known if name not in slow]
    share = len(slow) / len(known) if tasks is None or not (slow and fast) else tasks
    memory, reconcile = Allocations() if worst is not None else None, dict[str, int]()
    for name, kind in known.items():
        kind.read(kind.make())  # a good one is read
        if memory is not None:
            taken = memory.around(partial(kind.read, kind.make()))
            reconcile[_what(name)] = max(reconcile.get(_what(name), 0), taken)
    for _ in range(count):
        name = chance.choice(slow if chance.random() < share else fast)
        content, done = known[name].make(), []
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            if content:
                mutation = chance.choice(MUTATIONS)
                mutation(content, chance)
                done.append(mutation.__name__)
        case = f"message {outcomes.total() + 1} of seed {seed}, {name} after {', '.join(done)}"
        work = partial(_outcome, known[name], content, case)
        if memory is None or worst is None:
            outcomes[work()] += 1
            continue
        most = reconcile[_what(name)]
        limit = 2 * most + BESIDE
        taken = memory.around(lambda work=work: outcomes.update([work()]))  # type: ignore[misc]
        if taken > limit and (taken := memory.around(work)) > limit:
            raise AssertionError(f"{case}: {taken:,} bytes, where {most:,} were agreed")
        worst[name] = max(worst[name], taken - 2 * most)
    return outcomes


def _what(name: str) -> str:
    """The kind of a message, without the variants of its settings."""
    return name.removesuffix(" half").removesuffix(" prox")


def _outcome(kind: Kind, content: RecordDict, case: str) -> str:
    """What comes of a message."""
    try:
        kind.read(content)
    except FairfoldError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    return "harmless"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    parser.add_argument("--tasks", type=float, help="share of tasks; as many as of every other kind if not given")
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
    outcomes = fuzz(given.count, given.seed, only=given.only, tasks=given.tasks, worst=worst)
    seconds = time.monotonic() - started
    print(  # noqa: T201
        f"{given.count} messages, seed {given.seed}: {dict(outcomes)}, {seconds:.0f} s, {peak() - before:,} bytes more"
    )
    if worst:
        name, taken = worst.most_common(1)[0]
        print(f"each took at most twice what was agreed and {max(taken, 0):,} of {BESIDE:,} bytes ({name})")  # noqa: T201


if __name__ == "__main__":
    main()
