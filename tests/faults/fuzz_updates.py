"""Updates that are well formed and hostile: none of them ends a run, and every model is finite.

    python -m tests.faults.fuzz_updates --count 10000 --seed 1

In plain runs half of the nodes send them, through all checks of the server, in every round again; in secure ones a
sum has numbers of one device's choice. What an algorithm refuses is refused; what no model follows from is dropped.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from flwr.app import Array, ArrayRecord, Message

from fairfold.federation.aggregation import (
    fixed_point_encoding,
    from_weighted_change,
    make_aggregate,
    weighted_change,
)
from fairfold.federation.federation import Federation
from fairfold.federation.round import StepFailed, checked_server_update
from fairfold.federation.updates import State
from fairfold.flower.protocol import ARRAYS
from fairfold.flower.vectors import INDICES
from fairfold.privacy.fixed_point import HEADER_LENGTH, MeasuredUpdate
from tests.flower.test_strategy import facts
from tests.support.federations import tiny_data
from tests.support.nodes import in_process
from tests.support.settings import make_settings

NODES, HOSTILE, USERS, ITEMS = 20, 10, 40, 24
ALGORITHMS = ("co_occurrence", "gradient", "closed_form", "ratings")
Numbers = numpy.ndarray[Any, Any]
WEIGHTS = (0.0, 5e-324, 1e-30, 0.5, 1.0, 2.0, 3.0, 1e2, 1e4, 1e9)
SCALES = (0.0, 1e-30, 1e-3, 0.1, 0.5, 1.0, 1.24, 2.0, 99.0, 1e4, 1e9, 1e30)
SHAPES = ("turned", "one", "constant", "normal", "signs", "low rank", "ramp")


def settings(algorithm: str, rounds: int, **keys: Any) -> Any:
    """Those of a small fleet of two sizes."""
    chosen = {"kind": algorithm} | ({"support": 1, "tune": False} if algorithm == "co_occurrence" else {})
    base: dict[str, Any] = {"rounds": rounds, "capacities": "1x-2x", "clients_per_round": None}
    return make_settings(**base | {"evaluate_every": rounds, "algorithm": chosen} | keys)


def numbers(source: numpy.random.Generator, honest: Numbers, weight: float = 1.0) -> Numbers:
    """Numbers for a tensor: a shape, as large as its honest numbers times a scale, or times a share of its weight."""
    size, shape = honest.size, str(source.choice(SHAPES))
    scale = float(source.choice(SCALES)) if source.random() < 0.5 else weight * float(source.uniform(0.1, 1.0))
    shapes: dict[str, Callable[[], Numbers]] = {
        "turned": lambda: -honest.astype(float),
        "one": lambda: numpy.eye(1, size, int(source.integers(max(size, 1))))[0],
        "constant": lambda: numpy.full(size, -1.0),
        "normal": lambda: source.standard_normal(size),
        "signs": lambda: source.choice([-1.0, 1.0], size),
        "low rank": lambda: numpy.outer(*source.standard_normal((2, int(size**0.5) + 1))).ravel()[:size],
        "ramp": lambda: numpy.linspace(-1.0, 1.0, size),
    }
    found = shapes[shape]()
    norm, usual = float(numpy.linalg.norm(found)), max(float(numpy.linalg.norm(honest.astype(float))), 1e-3)
    return numpy.asarray(found * (scale * usual / norm if norm else 0.0))


def spoil(source: numpy.random.Generator, reply: Message, first: dict[str, Numbers]) -> None:
    """Change a reply into another one of its form, with the numbers' places and sizes of the device's first one."""
    arrays, given = reply.content[ARRAYS], facts(reply)
    assert isinstance(arrays, ArrayRecord)
    first.update(first or {name: array.numpy().copy() for name, array in arrays.items()})
    weight = float(source.choice(WEIGHTS))
    if source.random() < 0.8:
        given["weight"] = weight
    for name, values in first.items():
        own = values if name.endswith(INDICES) or source.random() < 0.1 else numbers(source, values, weight)
        limits = numpy.finfo(values.dtype) if values.dtype.kind == "f" else numpy.iinfo(values.dtype)
        arrays[name] = Array(numpy.clip(own, limits.min, limits.max).astype(values.dtype))


def finite(state: State) -> bool:
    """Whether all tensors of a model are."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.full.values())


def plain(algorithm: str, count: int, seed: int) -> Counter[str]:
    """Send at least so many updates to a run of a fleet; how many of what was refused, dropped or left out."""
    source, sent, first = numpy.random.default_rng(seed), Counter[str](), dict[int, dict[str, Numbers]]()
    rounds = -(-count // HOSTILE)
    with tempfile.TemporaryDirectory() as place:
        data = tiny_data(seed % 7, USERS, ITEMS, algorithm == "ratings")
        nodes = in_process(data, settings(algorithm, rounds), NODES, Path(place))
        true = nodes.grid.app

        def app(message: Message, context: Any) -> Message:
            nodes.strategy.nodes.left_out.clear()  # else it would be the end of them
            reply = true(message, context)
            if context.node_id > NODES - HOSTILE and message.metadata.message_type == "train":
                spoil(source, reply, first.setdefault(context.node_id, {}))
                sent["updates"] += 1
            return reply

        nodes.grid.app = app  # type: ignore[assignment]
        state = nodes.run()
        assert state.round_number == rounds, f"the run ended in round {state.round_number} of {rounds}"
        assert finite(state), "numbers that are not finite"
        return sent + nodes.strategy.progress.rejections.counts


def secure(algorithm: str, count: int, seed: int) -> Counter[str]:
    """Add words of one device's choice to so many sums; how many of these a model follows from."""
    source, found = numpy.random.default_rng(seed), Counter[str]()
    chosen = settings(algorithm, 3, capacities="1x", privacy={"level": "secure", "min_cohort": 2})
    federation = Federation.of(chosen, tiny_data(seed % 7, USERS, ITEMS, algorithm == "ratings"))
    plan, state = federation.plan, federation.initial()
    scheduled = list(federation.sampler.schedule(state, list(range(USERS))))
    task = scheduled[0].task
    encoding = fixed_point_encoding(plan, {task.size: task}, USERS)
    honest = numpy.zeros(encoding.layout.length(task.size), dtype=numpy.uint32)
    for each in scheduled[1:]:
        client = federation.clients.client(each.client, 0)
        update, _ = plan.algorithm.client_update(plan, each.task, client)
        honest += encoding.encode(MeasuredUpdate(weighted_change(plan, each.task, update)), task.size)
    (segment,) = encoding.layout.segments
    for _ in range(count):
        words = source.integers(0, 2**32, honest.size, dtype=numpy.uint32)
        if source.random() < 0.8:
            signed = numpy.clip(numbers(source, honest.astype(numpy.int32)), -(2**31), 2**31 - 1)
            words[HEADER_LENGTH:] = signed.astype(numpy.int64).astype(numpy.uint32)[HEADER_LENGTH:]
            words[:HEADER_LENGTH:2] = source.choice([0, 1, 2, 100, 2**31], HEADER_LENGTH // 2)
        update = encoding.decode({segment: honest + words})[task.size].update
        aggregate = make_aggregate(plan.settings, bounded=True)
        aggregate.add(task, from_weighted_change(plan, task, update))
        try:
            assert finite(checked_server_update(plan, state.copy(), aggregate))
            found["a model follows"] += 1
        except StepFailed:
            found["dropped"] += 1
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="of each algorithm, plain and secure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    given = parser.parse_args()
    for name in given.algorithms:
        for kind in (plain, secure):
            began = time.process_time()
            counts = dict(kind(name, given.count, given.seed))
            seconds = time.process_time() - began
            sys.stdout.write(f"{name}, {kind.__name__}: {counts}, {seconds:.0f} s of processor time\n")
            sys.stdout.flush()
