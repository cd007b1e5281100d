"""Search for the settings of federated least squares, on validation data alone: a share of each user's *training* set.

The test set is not read. Items are numbered anew by their popularity in what is kept, as a user of the validation
split would know it. Every trial is a line of the CSV; the choice is the best mean over folds (docs/beyond.md).

    python benchmarks/beyond_search.py gowalla --folds 1 --jobs 15 --out benchmarks/results/beyond_search.csv
"""

import argparse
import csv
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fairfold.data import Dataset, Interactions, load
from fairfold.data.holdout import hold_out
from fairfold.settings import nested, read_settings
from fairfold.simulate import simulate
from fairfold.simulate.numbering import numbered

HEADINGS = ["data", "fold", "settings", "metric", "value", "sizes", "seconds_a_round", "bytes"]


@dataclass(frozen=True)
class Search:
    """One data set: how it is loaded, what all trials share, what is tried."""

    data: str
    base: dict[str, Any]
    grid: dict[str, list[Any]]
    options: dict[str, Any] = field(default_factory=dict)


RATINGS = {"algorithm.kind": "ratings", "subspace.reference_factors": 32}
SEARCHES = {
    "goodreads-100": Search(
        "goodreads-100",
        {
            "algorithm.kind": "least_squares",
            "fleet.clients_per_round": 20,
            "run.rounds": 40,
            "fleet.capacities": "64x",
            "subspace.reference_factors": 8,
        },
        {
            "model.factors": [8, 16, 32],
            "algorithm.ridge": [0.5, 1.0],
            "subspace.support": [5, 8, 12],
            "algorithm.weighting": ["equal"],
        },
    ),
    "ml-1m": Search(
        "ml-1m",
        {"algorithm.kind": "least_squares", "fleet.clients_per_round": 200, "run.rounds": 60, "subspace.support": 10},
        {
            "fleet.capacities": ["1x", "1x-16x"],
            "model.factors": [16, 32],
            "algorithm.ridge": [0.3, 1.0],
            "algorithm.weighting": ["equal", 0.5, "data"],
        },
        {"resplit": True},
    ),
    "gowalla": Search(
        "gowalla",
        {"algorithm.kind": "least_squares", "fleet.clients_per_round": 1000, "run.rounds": 60},
        {
            "fleet.capacities": ["1x", "1x-16x"],
            "model.factors": [64, 128],
            "algorithm.ridge": [0.1, 0.3, 1.0],
            "subspace.support": [3, 5],
            "algorithm.weighting": ["equal", 0.5],
        },
    ),
    "book-crossing": Search(
        "book-crossing",
        {"algorithm.kind": "least_squares", "fleet.clients_per_round": 200, "run.rounds": 60},
        {
            "fleet.capacities": ["1x", "1x-16x"],
            "model.factors": [16, 32, 64],
            "algorithm.ridge": [0.3, 1.0, 3.0],
            "subspace.support": [5, 10],
            "algorithm.weighting": ["equal", 0.5],
        },
        {"top_users": 2000},
    ),
    "goodreads-ratings": Search(
        "goodreads-interactions-200k",
        RATINGS | {"fleet.clients_per_round": 20, "run.rounds": 60},
        {
            "fleet.capacities": ["1x", "8x-16x", "16x-32x-64x"],
            "model.factors": [4, 8],
            "subspace.tail_share": [0.125],
        },
        {"top_users": 100, "ratings": True},
    ),
    "ml-1m-ratings": Search(
        "ml-1m",
        RATINGS | {"fleet.clients_per_round": 200, "run.rounds": 400},
        {
            "fleet.capacities": ["1x", "8x-16x", "16x-32x-64x"],
            "model.factors": [4, 5, 6, 7, 9, 11],
            "subspace.tail_share": [0.0625, 0.125],
        },
        {"resplit": True, "ratings": True},
    ),
    "ml-1m-ratings-streamed": Search(
        "ml-1m",
        RATINGS
        | {
            "fleet.clients_per_round": 200,
            "run.rounds": 1500,
            "subspace.tail_share": 0.0625,
        },
        {
            "fleet.capacities": ["1x", "8x-16x", "16x-32x-64x"],
            "model.factors": [5, 7, 9, 11],
            "algorithm.streamed": [False, True],
        },
        {"resplit": True, "ratings": True},
    ),
}


@cache
def validation(name: str, fold: int, share: float) -> Dataset:
    """What is kept and what is held out of the training set, numbered by the popularity of what is kept."""
    search = SEARCHES[name]
    kept, held = hold_out(load(search.data, **search.options).train, share, fold)
    order = torch.argsort(kept.counts_by_item, descending=True, stable=True)
    number = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    kept, held = (
        Interactions.from_pairs(part.users, number[part.items], part.num_users, part.num_items, part.ratings)
        for part in (kept, held)
    )
    return Dataset(f"{name}-validation-{fold}", kept, held)


def trials(search: Search, narrowed: list[str]) -> Iterator[dict[str, Any]]:
    """All combinations; rows as long as the reference at 1x have no tail, whose share then makes no difference."""
    grid = dict(search.grid)
    for change in narrowed:
        key, _, given = change.partition("=")
        grid[key] = [_number(value) for value in given.split(",")]
    for values in itertools.product(*grid.values()):
        trial = dict(zip(grid, values, strict=True))
        whole = trial.get("fleet.capacities") == "1x" and not (search.base | trial).get("subspace.support")
        if not whole or trial.get("subspace.tail_share") == grid.get("subspace.tail_share", [None])[0]:
            yield trial


def run(name: str, fold: int, share: float, trial: dict[str, Any]) -> list[Any]:
    """One line of the record."""
    torch.set_num_threads(1)
    base = SEARCHES[name].base | {"run.seed": fold}
    settings = read_settings(nested(base | {"run.evaluate_every": base["run.rounds"]} | trial))
    result = simulate(settings, data=numbered(validation(name, fold, share), settings), references={})
    each = sum(report.seconds for report in result.history) / settings.run.rounds
    sizes = " ".join(f"{group.capacity}:{group.quality:.4f}" for group in result.groups)
    largest = max(group.bytes_held for group in result.groups)
    return [name, fold, words(trial), result.metric, f"{result.quality:.5f}", sizes, f"{each:.4f}", largest]


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=sorted(SEARCHES))
    parser.add_argument("--folds", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--jobs", type=int, default=1, help="Trials at a time, one thread each.")
    parser.add_argument("--out", type=Path, required=True, help="CSV; lines are added, what is there is not run again.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TABLE.KEY=V1,V2", help="Narrow or add a dimension."
    )
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    done, new = set[tuple[str, ...]](), not chosen.out.exists()
    if not new:
        with chosen.out.open(newline="") as file:
            done = {tuple(line[:3]) for line in csv.reader(file)}
    started = time.perf_counter()
    with chosen.out.open("a", newline="") as file, ProcessPoolExecutor(chosen.jobs) as workers:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(HEADINGS)
        waiting = []
        for fold in range(chosen.folds):
            for trial in trials(SEARCHES[chosen.data], chosen.only):
                if (chosen.data, str(fold), words(trial)) not in done:
                    waiting.append(workers.submit(run, chosen.data, fold, chosen.share, trial))
        for count, found in enumerate(as_completed(waiting), 1):
            line = found.result()
            writer.writerow(line)
            file.flush()
            print(
                f"{count}/{len(waiting)} {time.perf_counter() - started:.0f} s  {' '.join(map(str, line))}", flush=True
            )


def words(trial: dict[str, Any]) -> str:
    """A trial as the record has it, keys without their tables."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in trial.items())


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    main()
