"""What a count by devices costs, and whether it replaces a public order of the catalogue.

    FAIRFOLD_DATA=... python benchmarks/popularity.py [--out benchmarks/results/popularity.csv]

The recipe `best` as it is, 1x-4x-16x, three seeds, on the test set; nothing is chosen by it. Prepared data sets are
numbered by popularity, so that order is destroyed first: items get numbers by chance, others for every seed. The count
is then carried out once as devices and server would (`backend="loop"`), and must give the numbers that the fast way
gives. CPU seconds of a device are those of all its windows with all its masks, on one core.
"""

import argparse
import csv
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fairfold import simulate
from fairfold.data import Dataset
from fairfold.protocol.counting import neighbours, pair_key, said, windows, word_for
from fairfold.settings.files import load_settings
from fairfold.simulate.numbering import numbered_by_counts
from fairfold.simulate.world import load_interactions

SEEDS = (0, 1, 2)
SETS: dict[str, dict[str, Any]] = {
    "goodreads-100": {"run.rounds": 40},
    "ml-1m": {"run.rounds": 60, "data.resplit": True},
}
COUNTS = {"subspace.popularity": "counts"}
ROWS: dict[str, tuple[bool, dict[str, Any]]] = {
    "public order": (False, {}),
    "numbers by chance, counted": (True, COUNTS),
    "the same, 10 % of devices silent": (True, COUNTS | {"fleet.faults.drop": 0.1}),
    "the same, 30 % of devices silent": (True, COUNTS | {"fleet.faults.drop": 0.3}),
    "numbers by chance, taken for an order": (True, {}),
    "none": (True, {"subspace.popularity": "none"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("fairfold").addHandler(logging.NullHandler())  # silent devices are counted only
    rows = [row for name, own in SETS.items() for row in compared(name, own)]
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def compared(name: str, own: dict[str, Any]) -> list[dict[str, object]]:
    """All rows of one data set."""
    common = own | {"data.name": name, "run.evaluate_every": 1000}
    data, _ = load_interactions(load_settings(None, common, "best"))
    rows: list[dict[str, object]] = []
    for label, (shuffled, changes) in ROWS.items():
        quality, told = [], None
        for seed in SEEDS:
            settings = load_settings(None, common | changes | {"run.seed": seed}, "best")
            given = by_chance(data, seed) if shuffled else data
            if changes == COUNTS and seed == 0:
                masked = numbered_by_counts(given, settings.with_changes({"run.backend": "loop"})).counted
                plain = numbered_by_counts(given, settings).counted
                assert masked is not None
                assert plain is not None
                assert torch.equal(masked.counts, plain.counts)
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
            "cpu_seconds_a_device": "" if told is None else f"{seconds_of_a_device(data, told.asked):.4f}",
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def by_chance(data: Dataset, seed: int) -> Dataset:
    return data.renumbered(torch.randperm(data.num_items, generator=torch.Generator().manual_seed(seed)))


def seconds_of_a_device(data: Dataset, devices: int) -> float:
    keys = {int(other): pair_key(0, 0, int(other)) for other in neighbours(devices)[0]}
    mine, started = data.train.of(0).numpy(), time.process_time()
    for start, length in windows(data.num_items):
        said(mine, start, length, 0, keys, word_for(devices))
    return time.process_time() - started


if __name__ == "__main__":
    main()
