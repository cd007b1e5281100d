"""What a count by devices costs, and whether it replaces a public order of the catalogue.

    FAIRFOLD_DATA=... python benchmarks/popularity.py [--out benchmarks/results/popularity.csv]

The recipe `least-squares` as it is, 1x-4x-16x, three seeds, on the test set; nothing is chosen by it. Prepared data are
numbered by popularity, so that order is destroyed first: items get numbers by chance, others for every seed.
"""

import argparse
import csv
import logging
import statistics
from pathlib import Path
from typing import Any

import torch

from fairfold import simulate
from fairfold.data import Dataset
from fairfold.settings.files import load_settings
from fairfold.simulate.world import load_interactions

SEEDS = (0, 1, 2)
SETS: dict[str, dict[str, Any]] = {
    "goodreads-100": {"run.rounds": 40},
    "ml-1m": {"run.rounds": 60, "data.resplit": True},
}
COUNTS = {"subspace.popularity": "counts"}
ROWS: dict[str, tuple[float | None, dict[str, Any]]] = {  # the share of the users whose counts are the order; changes
    "order from 100 % of the users": (1.0, {}),
    "order from 50 % of the users": (0.5, {}),
    "order from 25 % of the users": (0.25, {}),
    "order from 10 % of the users": (0.1, {}),
    "numbers by chance, counted": (None, COUNTS),
    "the same, 10 % of devices silent": (None, COUNTS | {"fleet.faults.drop": 0.1}),
    "the same, 30 % of devices silent": (None, COUNTS | {"fleet.faults.drop": 0.3}),
    "numbers by chance, taken for an order": (None, {}),
    "none": (None, {"subspace.popularity": "none"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", choices=SETS, action="append", help="these sets alone")
    parser.add_argument("--rows", default="", help="only rows whose names hold this")
    arguments = parser.parse_args()
    logging.getLogger("fairfold").addHandler(logging.NullHandler())  # silent devices are counted only
    asked = arguments.data or list(SETS)
    rows = [row for name in asked for row in compared(name, SETS[name], arguments.rows)]
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def compared(name: str, own: dict[str, Any], asked: str = "") -> list[dict[str, object]]:
    """All rows of one data set, or those whose names hold a word."""
    common = own | {"data.name": name, "run.evaluate_every": 1000}
    data, _ = load_interactions(load_settings(None, common, "least-squares"))
    rows: list[dict[str, object]] = []
    for label, (share, changes) in ROWS.items():
        if asked not in label:
            continue
        quality, told = [], None
        for seed in SEEDS:
            settings = load_settings(None, common | changes | {"run.seed": seed}, "least-squares")
            given = data if share == 1 else by_some(by_chance(data, seed), share or 0.0, seed)
            result = simulate(settings, data=given)
            quality.append(result.quality)
            told = result.counted
        row: dict[str, object] = {
            "data": name,
            "popularity": label,
            "ndcg": f"{statistics.mean(quality):.4f}",
            "spread": f"{statistics.stdev(quality):.4f}",
            "counted": "" if told is None else f"{told.devices} of {told.asked}",
            "leading": "" if told is None else len(told.leading),
            "bytes_down_a_device": "" if told is None else told.bytes_down // told.asked,
            "bytes_up_a_device": "" if told is None else told.bytes_up // told.asked,
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def by_chance(data: Dataset, seed: int) -> Dataset:
    return data.renumbered(torch.randperm(data.num_items, generator=torch.Generator().manual_seed(seed)))


def by_some(data: Dataset, share: float, seed: int) -> Dataset:
    """The same data numbered by the counts of a share of the users, drawn by chance; ties keep their order."""
    drawn = torch.randperm(data.num_users, generator=torch.Generator().manual_seed(seed))
    asked = torch.isin(data.train.users, drawn[: round(share * data.num_users)])
    counts = torch.bincount(data.train.items[asked], minlength=data.num_items)
    place = torch.empty(data.num_items, dtype=torch.int64)
    place[counts.argsort(descending=True, stable=True)] = torch.arange(data.num_items)
    return data.renumbered(place)


if __name__ == "__main__":
    main()
