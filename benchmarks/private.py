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

from recommender import split_anew

import fairfold.data
from fairfold.data import Dataset
from fairfold.settings import read_settings
from fairfold.simulate import simulate
from fairfold.simulate.numbering import numbered


def row_of(data: Dataset, seed: int, tables: dict[str, Any]) -> tuple[float, float, int, float]:
    """Quality, that of popularity, items that are correlated, and seconds."""
    started = time.monotonic()
    settings = read_settings({"run": {"seed": seed}, "fleet": {"capacities": "1x-4x-16x"}} | tables)
    result = simulate(settings, data=numbered(data, settings))
    head = result.state.full["rows"].numel() // (settings.model.factors + 2)
    return result.quality, result.references["popularity"], head, time.monotonic() - started


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
            data = split_anew(fairfold.data.load(name), seed, None)
            least = min(100, data.num_users)
            rows: dict[str, dict[str, Any]] = {"plain": {}} if chosen.plain else {}
            for epsilon in chosen.epsilon:
                for noise in chosen.noise:
                    level = {"level": "private", "epsilon": epsilon, "noise": noise, "smallest_cohort": least}
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
