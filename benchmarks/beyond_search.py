"""Search for the settings of federated least squares, on validation data alone: a share of each user's *training* set.

The test set is not read. Items are numbered anew by their popularity in what is kept, as a user of the validation
split would know it. Every trial is a line of the CSV; the choice is the best mean over folds (docs/beyond.md).

    python benchmarks/beyond_search.py goodreads-100 --folds 3 --out benchmarks/results/beyond_search.csv
"""

import argparse
import csv
import itertools
import time
from pathlib import Path
from typing import Any

import torch

from fairfold.data import Dataset, Interactions, load
from fairfold.data.holdout import hold_out
from fairfold.federation.settings import read_settings
from fairfold.simulate import simulate

GRIDS: dict[str, dict[str, list[Any]]] = {
    "goodreads-100": {
        "capacities": ["64x"],
        "reference_factors": [8],
        "factors": [8, 16, 32],
        "ridge": [0.5, 1.0],
        "support": [5, 8, 12],
        "weighting": ["equal"],
    },
    "ml-1m": {
        "capacities": ["1x-16x"],
        "reference_factors": [16],
        "factors": [16, 32],
        "ridge": [0.3, 1.0],
        "support": [10],
        "weighting": ["equal", 0.5, "data"],
    },
    "gowalla": {
        "capacities": ["1x-16x"],
        "reference_factors": [32],
        "factors": [32, 64],
        "ridge": [0.3, 1.0],
        "support": [5],
        "weighting": ["equal", 0.5],
    },
    "book-crossing": {
        "capacities": ["1x-16x"],
        "reference_factors": [16],
        "factors": [16, 32],
        "ridge": [0.3, 1.0],
        "support": [5, 10],
        "weighting": ["equal", 0.5],
    },
}
ROUNDS = {"goodreads-100": (20, 40), "ml-1m": (200, 60), "gowalla": (1000, 60), "book-crossing": (200, 40)}
OPTIONS: dict[str, dict[str, Any]] = {"ml-1m": {"resplit": True}, "book-crossing": {"top_users": 2000}}


def validation(name: str, fold: int, share: float) -> Dataset:
    """What is kept and what is held out of the training set, numbered by the popularity of what is kept."""
    kept, held = hold_out(load(name, **OPTIONS.get(name, {})).train, share, fold)
    order = torch.argsort(kept.counts_by_item, descending=True, stable=True)
    number = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    kept, held = (
        Interactions.from_pairs(part.users, number[part.items], part.num_users, part.num_items) for part in (kept, held)
    )
    return Dataset(f"{name}-validation-{fold}", kept, held)


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=sorted(GRIDS))
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[], metavar="KEY=V1,V2", help="Narrow or add a dimension.")
    chosen = parser.parse_args()
    grid = dict(GRIDS[chosen.data])
    for narrowed in chosen.only:
        key, values = narrowed.split("=")
        grid[key] = [_number(value) for value in values.split(",")]
    clients, rounds = ROUNDS[chosen.data]
    new = not chosen.out.exists()
    with chosen.out.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["data", "fold", "settings", "ndcg", "sizes_ndcg", "seconds_a_round", "bytes"])
        for fold in range(chosen.folds):
            data = validation(chosen.data, fold, chosen.share)
            for values in itertools.product(*grid.values()):
                trial = dict(zip(grid, values, strict=True))
                base = {"solver": "least_squares", "clients_per_round": clients, "rounds": rounds, "seed": fold}
                settings = read_settings(base | {"evaluate_every": rounds} | trial)
                started = time.perf_counter()
                result = simulate(settings, data=data, references={})
                each = sum(report.seconds for report in result.history) / rounds
                sizes = " ".join(f"{group.capacity}:{group.quality:.4f}" for group in result.groups)
                words = " ".join(f"{key}={value}" for key, value in trial.items())
                largest = max(group.bytes_held for group in result.groups)
                writer.writerow([chosen.data, fold, words, f"{result.quality:.5f}", sizes, f"{each:.4f}", largest])
                file.flush()
                print(f"{words}  fold {fold}  {result.quality:.4f}  {sizes}  {each * 1e3:.0f} ms a round, "
                      f"{largest} bytes, {time.perf_counter() - started:.0f} s in all", flush=True)  # fmt: skip


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    main()
