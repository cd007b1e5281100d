"""How long does it take to rank 359,014 items for 100 users?

Run: python -m benchmarks.evaluation [--device cuda] [--hardware "name of the machine"]

The data is the synthetic world at the size of Goodreads-100, about 4,900 training and 2,100 test items a
user. A time is the median of several evaluations: scores of the whole catalogue, training items taken out,
the 20 best found, compared. With --hardware the result is kept in benchmarks/results.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from experiments.central_baselines import PureSVD, UserNeighbors
from fairfold.data.synthetic import SyntheticDataset
from fairfold.metrics import evaluate_ranking
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.ranking_baselines import Popularity, Ridge
from fairfold.models import MF, NeuMF, scorer

USERS, ITEMS, PER_USER = 100, 359_014, 6_966


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hardware", help="name of the machine; keeps the result under it")
    options = parser.parse_args()
    device = torch.device(options.device)
    data = SyntheticDataset(users=USERS, items=ITEMS, interactions_per_user=PER_USER).dataset()
    scorers: dict[str, Scorer] = {
        "MF, 8 factors": scorer(MF(USERS, ITEMS).to(device)),
        "NeuMF, 8 factors": scorer(NeuMF(USERS, ITEMS).to(device)),
        "popularity (ties everywhere)": Popularity(data.train),
        "user-kNN": UserNeighbors(data.train),
        "PureSVD-16": PureSVD(data.train),
        "ridge": Ridge(data.train),
    }
    seconds = {}
    for name, score in scorers.items():
        times = []
        for _ in range(options.repeats):
            started = time.perf_counter()
            evaluate_ranking(score, data.train, data.test)
            times.append(time.perf_counter() - started)
        seconds[name] = round(statistics.median(times), 3)
        print(f"{name:30} {seconds[name]:8.3f} s")
    if options.hardware:
        result = {
            "question": __doc__.splitlines()[0] if __doc__ else "",
            "hardware": options.hardware,
            "device": options.device,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "seconds": seconds,
        }
        path = Path(__file__).parent / "results" / f"evaluation-{device.type}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
