"""What longer chunks cost in quality, on real data: the reason for the default chunk.

    FAIRFOLD_DATA=... python benchmarks/chunk_quality.py [--out benchmarks/results/chunk_quality.csv]

All devices at 16x, closed-form users, element-wise hashed and ranked tables, chunks of 1 to 32 coordinates. NDCG@20 on
items held out of the *training* set (10 % of each user's), so that the test set plays no part in the choice.
"""

import argparse
import csv
import statistics
from pathlib import Path

from fairfold import simulate
from fairfold.config import nested, read_settings
from fairfold.data import Dataset, load
from fairfold.data.partition import hold_out

SEEDS = (0, 1, 2)
CHUNKS = (1, 2, 4, 8, 16, 32)
SETS = {
    "goodreads-100": ({}, {"model.factors": 8, "fleet.clients_per_round": 20, "run.rounds": 100}),
    "ml-1m": (
        {"resplit": True, "split": 0.7},
        {"model.factors": 16, "fleet.clients_per_round": 200, "run.rounds": 100},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name, (options, changes) in SETS.items():
        loaded = load(name, **options)  # type: ignore[arg-type]
        train, held_out = hold_out(loaded.train, 0.1, 0)
        data = Dataset(name, train, held_out)
        for mapping in ("hashed", "ranked"):
            for chunk in CHUNKS:
                kind = "ranked" if mapping == "ranked" else "chunk"
                found = []
                for seed in SEEDS:
                    settings = {
                        "algorithm.kind": "closed_form",
                        "subspace.mapping": kind,
                        "subspace.chunk": chunk,
                        "fleet.capacities": "16x",
                        "run.seed": seed,
                        "run.evaluate_every": 1000,
                    }
                    found.append(simulate(read_settings(nested(settings | changes)), data=data).quality)
                row = {
                    "data": name,
                    "mapping": mapping,
                    "chunk": chunk,
                    "ndcg": round(statistics.mean(found), 4),
                    "spread": round(statistics.stdev(found), 4),
                }
                rows.append(row)
                print(row, flush=True)
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
