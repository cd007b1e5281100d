"""Correlations cut to bytes beside EASE, on fresh splits: ``python benchmarks/recommender.py ml-1m --splits 3``.

Every split is drawn by chance (its seed is written down): 70 % of each user to train on. EASE is correlated over the
same items, its penalty chosen on a fifth of the training data. A line per split: NDCG@20 of EASE and of every size, and
the mean over users of each size's difference to EASE with its standard error.
"""

import argparse
import csv
import secrets
import sys
import time

import torch

import fairfold.data
from fairfold.algorithms.pair_architecture import ROWS
from fairfold.data import Dataset, Interactions
from fairfold.data.holdout import hold_out
from fairfold.metrics.ranking import Scorer, evaluate_ranking, items_of
from fairfold.metrics.references import BinaryMatrix
from fairfold.projections import Assignment
from fairfold.protocol.faults import Rejections
from fairfold.protocol.round import run_round
from fairfold.settings import Settings, read_settings
from fairfold.simulate.numbering import numbered
from fairfold.simulate.run import choose_backend
from fairfold.simulate.world import World
from fairfold.subspace import Capacity

SIZES = ("1x", "4x", "16x", "64x")
PENALTIES = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


def split_anew(data: Dataset, seed: int) -> Dataset:
    """All interactions, 70 % of each user to train on."""
    parts = [part for part in (data.train, data.valid, data.test) if part is not None]
    users, items = torch.cat([part.users for part in parts]), torch.cat([part.items for part in parts])
    whole = Interactions.from_pairs(users, items, data.num_users, data.num_items)
    train, test = hold_out(whole, 0.3, seed)
    return Dataset(data.name, train, test)


class Ease:
    """EASE over the leading items: x (I − P / diag P)."""

    def __init__(self, train: Interactions, head: int) -> None:
        mine = train.items < head
        self.train = Interactions.from_pairs(train.users[mine], train.items[mine], train.num_users, head)
        self.items, self.gram = train.num_items, BinaryMatrix(self.train).gram(of_users=False)

    def at(self, penalty: float) -> Scorer:
        """Scores under a penalty; other items behind."""
        matrix = self.gram.clone()
        matrix.diagonal().add_(penalty)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        weights = (-inverse / inverse.diagonal()).fill_diagonal_(0)

        def score(users: torch.Tensor) -> torch.Tensor:
            found = torch.full((len(users), self.items), -1e9)
            x = torch.zeros(len(users), len(weights))
            x[items_of(self.train, users)] = 1
            found[:, : len(weights)] = x @ weights
            return found

        return score


def measured(name: str, seed: int, settings: Settings) -> dict[str, object]:
    """One split."""
    data = numbered(split_anew(fairfold.data.load(name), seed), settings)
    world, started = World.of(settings, data), time.monotonic()
    people = world.people
    state = run_round(world.initial(), world.fleet, people, Rejections(), choose_backend(world, torch.device("cpu")))
    row: dict[str, object] = {"data": name, "seed": seed, "users": data.num_users, "items": data.num_items}
    head = world.plan.architecture.tables[ROWS][0]
    row |= {"head": head, "seconds": round(time.monotonic() - started, 1)}
    kept, held = hold_out(data.train, 0.2, seed % 2**31)
    part = Ease(kept, head)
    judged = {penalty: evaluate_ranking(part.at(penalty), kept, held).ndcg for penalty in PENALTIES}
    penalty = max(judged, key=judged.__getitem__)
    del part
    ease = evaluate_ranking(Ease(data.train, head).at(penalty), data.train, data.test)
    row |= {"penalty": penalty, "EASE": round(ease.ndcg, 5)}
    for size in SIZES:
        projections, _, _ = world.plan.at(Capacity.parse(size), 0)
        full = {name: of.recover(of.reduce(state.full[name])) for name, of in projections.items()}
        score = settings.algorithm.scorer(world.plan, full, [Assignment(projections)], people)
        found = evaluate_ranking(score, data.train, data.test)
        apart = found.ndcg_by_user - ease.ndcg_by_user
        row |= {size: round(found.ndcg, 5), f"{size} bytes": Assignment(projections).bytes()}
        row |= {f"{size} − EASE": round(float(apart.mean()), 5)}
        row |= {f"{size} error": round(float(apart.std() / len(apart) ** 0.5), 5)}
    return row


def main() -> None:
    """Print a table as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--head", type=int, default=8_000)
    chosen = parser.parse_args()
    tables = {"fleet": {"capacities": "1x"}, "algorithm": {"kind": "correlations", "head": chosen.head}}
    writer = None
    for name in chosen.data:
        for _ in range(chosen.splits):
            row = measured(name, secrets.randbelow(2**31), read_settings(tables))
            if writer is None:
                writer = csv.DictWriter(sys.stdout, list(row))
                writer.writeheader()
            writer.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
