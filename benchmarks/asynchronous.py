"""Quality over time where some devices are slow: rounds that wait, rounds with a deadline, and rounds that do not wait.

    python benchmarks/asynchronous.py --data ml-100k --seeds 3 --csv benchmarks/results/asynchronous.csv
    python benchmarks/asynchronous.py --algorithms gradient --sides "wait for all" --times 20000 40000 60000 80000

Time is that of a simulated clock (``fleet.latency``): what a device takes for an update, downloads and all. Nothing
else takes time, on any side. All sides have as many devices at work, the same speeds and the same draws.
"""

import argparse
import csv
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairfold import Settings
from fairfold.backends.batched import batched
from fairfold.data import Dataset
from fairfold.federation.algorithm import Tunable
from fairfold.federation.evaluation import Evaluator
from fairfold.federation.federation import Federation, load_interactions
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.federation.scheduling import CLOCK
from fairfold.federation.updates import State

ALGORITHMS: dict[str, dict[str, Any]] = {
    "co_occurrence": {"algorithm": {"kind": "co_occurrence", "tune": False}},
    "gradient": {"algorithm": {"kind": "gradient"}},
}
SAMPLES = {
    "co_occurrence": (0.1, 0.2, 0.5, 1, 2, 3),
    "gradient": (1, 2, 5, 10, 20, 30),
}
"""When quality is looked at, in units of what a slow device takes."""


@dataclass(frozen=True)
class Side:
    """A way to take steps."""

    name: str
    asynchronous: dict[str, Any]


def sides(at_work: int, seconds: float) -> list[Side]:
    """Rounds that wait for all; for twice the usual time; not at all: a step per quarter of those at work."""
    return [
        Side("wait for all", {}),
        Side("deadline", {"step_seconds": 2 * seconds, "max_staleness": 0}),
        Side("do not wait", {"buffer_size": max(1, at_work // 4), "max_staleness": 50}),
        Side("do not wait, staleness 8", {"buffer_size": max(1, at_work // 4), "max_staleness": 8}),
    ]


def states(world: Federation, state: State) -> Iterator[tuple[float, State, Rejections]]:
    """After every step, when it was taken."""
    rejections = Rejections()
    while True:
        state = run_round(state, world.sampler, world.clients, rejections, batched)
        yield float(state.algorithm_state[CLOCK]["now"]), state, rejections


def measured(settings: Settings, data: Dataset, until: list[float]) -> tuple[list[float], int, dict[str, int], float]:
    """Quality at some times, and of the last: steps, who was refused, and processor seconds."""
    world = Federation.of(settings, data)
    evaluator, found, began = Evaluator(world, {}), list[float](), time.process_time()
    first, waiting = world.initial(), list(until)
    before = first.copy()

    def quality(state: State) -> float:
        held = Tunable.of(world.plan.algorithm).resolve(world.plan, state).assignments(max(state.round_number - 1, 0))
        return evaluator.value(state.full, evaluator.all_users, held)

    for now, state, rejections in states(world, first):
        while waiting and now > waiting[0]:  # the model that was there at that time
            found.append(quality(before))
            waiting.pop(0)
        if not waiting:
            return found, state.round_number, dict(rejections.counts), time.process_time() - began
        before = state.copy()
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--at-work", type=int, default=60, help="devices at work at a time; correlations ask everybody")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--spread", type=float, default=0.3)
    parser.add_argument("--slow", type=float, default=0.1, help="share of slow devices")
    parser.add_argument("--slower", type=float, default=20.0, help="how many times as long they take")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", help="some of the ways to take steps, by name")
    parser.add_argument("--times", type=float, nargs="+", help="seconds of the clock after which quality is looked at")
    parser.add_argument("--csv", type=Path)
    chosen = parser.parse_args()
    logging.getLogger("fairfold").setLevel(logging.ERROR)  # who is refused is counted here
    unit = chosen.seconds * chosen.slower
    rows = list[list[Any]]()
    latency = {
        "median_seconds": chosen.seconds, "log_std": chosen.spread,
        "slow_share": chosen.slow, "slow_factor": chosen.slower,
    }  # fmt: skip
    print(f"{chosen.data}: {chosen.at_work} devices at work, {chosen.seconds:g} s each, {chosen.slow:.0%} of them "
          f"{chosen.slower:g} times as long")  # fmt: skip
    for kind in chosen.algorithms:
        everybody, times = kind == "co_occurrence", chosen.times or [unit * sample for sample in SAMPLES[kind]]
        print(f"{kind:42}" + "".join(f"{at:>9,.0f} s" for at in times) + "   steps  refused")
        for side in sides(900 if everybody else chosen.at_work, chosen.seconds):
            if chosen.sides and side.name not in chosen.sides:
                continue
            runs = []
            for seed in range(chosen.seeds):
                fleet = {
                    "latency": latency,
                    "asynchronous": side.asynchronous,
                    "clients_per_round": "none" if everybody else chosen.at_work,
                }
                run = {"rounds": 10_000, "evaluate_every": 10_000, "seed": seed}
                settings = Settings(**ALGORITHMS[kind], data={"name": chosen.data}, fleet=fleet, run=run)
                runs.append(measured(settings, load_interactions(settings)[0], times))
            means = [statistics.mean(of) for of in zip(*(one[0] for one in runs), strict=True)]
            spreads = [
                statistics.stdev(of) if len(of) > 1 else 0.0 for of in zip(*(one[0] for one in runs), strict=True)
            ]
            steps, refused = runs[-1][1], sum(runs[-1][2].values())
            print(
                f"    {side.name:38}" + "".join(f"{mean:11.4f}" for mean in means) + f"{steps:8}{refused:9}", flush=True
            )
            rows += [
                [chosen.data, kind, side.name, at, f"{mean:.5f}", f"{spread:.5f}", chosen.seeds, steps, refused]
                for at, mean, spread in zip(times, means, spreads, strict=True)
            ]
        if chosen.csv is not None:
            with chosen.csv.open("w", newline="") as file:
                heading = ["data", "algorithm", "rounds", "seconds", "ndcg", "spread", "seeds", "steps", "refused"]
                csv.writer(file).writerows([heading, *rows])


if __name__ == "__main__":
    main()
