"""The private model beside the plain one and popularity, on fresh splits.

    FAIRFOLD_DATA=... python benchmarks/private.py ml-100k ml-1m --splits 3 [--epsilon 8 4 2] [--noise devices server]

Every split is drawn by chance (its seed is written down): 70 % of each user to train on, and noise of another seed. A
line per split and row: NDCG@20 of the server's model for all users, items that are correlated, and seconds.
"""

import argparse
import csv
import secrets
import sys
import time
from typing import Any

import torch

import fairfold.data
from fairfold.algorithms.cooccurrence.cooccurrence import SUM, triangle_items
from fairfold.config import read_settings
from fairfold.data import Dataset, Interactions
from fairfold.data.partition import hold_out
from fairfold.federation.federation import number_items
from fairfold.federation.simulation import simulate


def split_anew(data: Dataset, seed: int) -> Dataset:
    """All interactions, 70 % of each user to train on."""
    parts = [part for part in (data.train, data.valid, data.test) if part is not None]
    users, items = torch.cat([part.users for part in parts]), torch.cat([part.items for part in parts])
    whole = Interactions.from_pairs(users, items, data.num_users, data.num_items)
    train, test = hold_out(whole, 0.3, seed)
    return Dataset(data.name, train, test)


def row_of(data: Dataset, seed: int, tables: dict[str, Any]) -> tuple[float, float, int, float]:
    """Quality, that of popularity, items that are correlated, and seconds."""
    started = time.monotonic()
    settings = read_settings({"run": {"seed": seed}, "fleet": {"capacities": "1x-4x-16x"}} | tables)
    result = simulate(settings, data=number_items(data, settings))
    head = triangle_items(len(result.state.algorithm_state[SUM][SUM]))
    return result.quality, result.baselines["popularity"], head, time.monotonic() - started


def main() -> None:
    """Write a table to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[8.0, 4.0, 2.0])
    parser.add_argument("--noise", nargs="+", default=["devices", "server"])
    parser.add_argument(
        "--plain", action="store_true", help="also without noise: a run of one round, which tries nothing"
    )
    chosen = parser.parse_args()
    out = csv.writer(sys.stdout)
    out.writerow(["data", "seed", "users", "row", "ndcg", "head", "seconds"])
    for name in chosen.data:
        for _ in range(chosen.splits):
            seed = secrets.randbelow(2**31)
            data = split_anew(fairfold.data.load(name), seed)
            least = min(100, data.num_users)
            rows: dict[str, dict[str, Any]] = {"plain": {}} if chosen.plain else {}
            for epsilon in chosen.epsilon:
                for noise in chosen.noise:
                    level = {"level": "private", "epsilon": epsilon, "noise": noise, "min_cohort": least}
                    rows[f"epsilon {epsilon:g}, noise from {noise}"] = {"privacy": level}
            popularity = None
            for row, tables in rows.items():
                run = {"seed": seed} | ({"rounds": 1} if row == "plain" else {})
                quality, beside, head, seconds = row_of(data, seed, tables | {"run": run})
                if popularity is None:
                    popularity = beside
                    out.writerow([name, seed, data.num_users, "popularity", f"{popularity:.4f}", "", ""])
                out.writerow([name, seed, data.num_users, row, f"{quality:.4f}", head, f"{seconds:.1f}"])
                sys.stdout.flush()


if __name__ == "__main__":
    main()
