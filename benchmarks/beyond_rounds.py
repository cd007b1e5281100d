"""Milliseconds a round of the recipes of `fairfold reproduce beyond`, Goodreads-100, on an idle machine.

The row of docs/beyond.md comes from

    python benchmarks/beyond_rounds.py --out benchmarks/results/beyond_rounds.csv      # a minute
"""

import argparse
import csv
import statistics
from pathlib import Path

import torch

from fairfold.reproduce.experiment import read_experiment
from fairfold.reproduce.machine import machine
from fairfold.settings import merged, read_settings
from fairfold.simulate import simulate
from fairfold.simulate.world import load_data

ROWS = ("1x", "1x-16x", "64x")
HEADINGS = ["table", "column", "capacities", "threads", "median_ms", "hardware"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the CSV goes")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    cells = [c for c in read_experiment("beyond").cells if c.seed == 0 and c.row in ROWS and c.kind == "federated"]
    cells = [cell for cell in cells if cell.table == "goodreads"]
    data, _ = load_data(read_settings(cells[0].values))
    lines = []
    for cell in cells:
        run = {"rounds": options.rounds, "evaluate_every": options.rounds}
        settings = read_settings(merged(cell.values, {"run": run}))
        history = simulate(settings, data=data).history
        median = 1e3 * statistics.median(report.seconds for report in history)
        lines.append([cell.table, cell.column, cell.row, torch.get_num_threads(), f"{median:.1f}", machine()])
        print(*lines[-1][:-1], flush=True)
    if options.out:
        with options.out.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADINGS, *lines])


if __name__ == "__main__":
    main()
