"""Correlations cut to bytes beside EASE, iALS and item-kNN, on fresh splits.

    FAIRFOLD_DATA=... python benchmarks/recommender.py ml-100k ml-1m --splits 3 [--mixed] [--top-users 2000]

Every split is drawn by chance (its seed is written down): 70 % of each user to train on. References are trained on the
same items and tuned on held-out training data (docs/runs.md). At every size all users hold a model of that size, choose
its shape and λ by trials on a tenth of their training data, and send all of their pairs; with ``--mixed`` fleets of
several sizes are run as well, which send what their capacity allows. A line per split and row: NDCG@20, bytes, and the
mean over users of the difference to the better one of EASE and iALS, with its standard error.
"""

import argparse
import csv
import secrets
import sys
import time
from itertools import islice
from typing import Any

import torch

import fairfold.data
from fairfold.algorithms.correlations import Correlations
from fairfold.algorithms.pair_architecture import ROWS
from fairfold.algorithms.pairs import size_of
from fairfold.data import Dataset, Interactions
from fairfold.data.holdout import hold_out
from fairfold.metrics.ranking import RankingResult, evaluate_ranking
from fairfold.metrics.reference_rows import strong_rows
from fairfold.projections import Assignment, LeadingBlock
from fairfold.protocol.plan import Plan
from fairfold.settings import Settings, read_settings
from fairfold.simulate import simulate
from fairfold.simulate.numbering import numbered
from fairfold.simulate.result import Result
from fairfold.simulate.world import World
from fairfold.values import Weights

SIZES = ("1x", "4x", "16x", "64x")
MIXED = ("1x-4x-16x", "1x-2x-4x-8x-16x-32x-64x")


class AllPairs(Correlations):
    """Devices of all sizes say all of their pairs, and models that differ in nothing are made once."""

    def spoken(self, plan: Plan, size: int) -> LeadingBlock:  # noqa: ARG002
        """All of them."""
        whole = size_of(plan.architecture.tables[ROWS][0])
        return LeadingBlock((whole,), (whole,))

    def model(self, plan: Plan, sums: torch.Tensor, ridge: float, columns: float) -> Weights:
        """See the base class."""
        key = (float(sums.sum()), float(sums.square().sum()), ridge, columns)
        if key not in MADE:
            MADE[key] = super().model(plan, sums, ridge, columns)
        return MADE[key]


MADE: dict[tuple[float, ...], Weights] = {}


def split_anew(data: Dataset, seed: int, top_users: int | None) -> Dataset:
    """All interactions, of the users with most of them if asked for, 70 % of each user to train on."""
    parts = [part for part in (data.train, data.valid, data.test) if part is not None]
    users, items = torch.cat([part.users for part in parts]), torch.cat([part.items for part in parts])
    many = data.num_users
    if top_users is not None and top_users < many:
        order = torch.bincount(users, minlength=many).argsort(descending=True, stable=True)
        number = torch.full((many,), -1)
        number[order[:top_users]] = torch.arange(top_users)
        users, items, many = number[users][number[users] >= 0], items[number[users] >= 0], top_users
    whole = Interactions.from_pairs(users, items, many, data.num_items)
    train, test = hold_out(whole, 0.3, seed)
    return Dataset(data.name, train, test)


def settings_of(capacities: str, algorithm: Correlations) -> Settings:
    """Of one fleet."""
    return read_settings({"algorithm": algorithm, "fleet": {"capacities": capacities}})


def by_user(result: Result, world: World, size: int) -> RankingResult:
    """How well the model of a size serves everybody."""
    plan = result.settings.algorithm.settled(world.plan, result.state)
    held = plan.assignments(0)[size].projections or {}
    full = {name: of.recover(of.reduce(result.state.full[name])) for name, of in held.items()}
    score = plan.algorithm.scorer(plan, full, [Assignment(held)], world.people)
    return evaluate_ranking(score, world.interactions.train, world.interactions.test)


def rows_of(name: str, seed: int, data: Dataset, mixed: bool, head: int) -> list[dict[str, Any]]:
    """One split: references, every size, and mixed fleets."""
    first = settings_of("1x", AllPairs(head=head))
    data = numbered(data, first)
    plan = World.of(first, data).plan
    known = torch.arange(data.num_items) < plan.architecture.tables[ROWS][0]
    about = {"data": name, "seed": seed, "users": data.num_users, "items": data.num_items, "head": int(known.sum())}
    started, found = time.monotonic(), dict[str, RankingResult]()
    for row, result in islice(strong_rows(data, known), 3):  # those on the same items come first
        found[row.split()[0]] = result
    best = max((found[row] for row in ("EASE", "iALS") if row in found), key=lambda result: result.ndcg)
    lines = [about | _line(row, result, best, 0, started, "") for row, result in found.items()]
    fleets: list[tuple[str, Correlations]] = [(size, AllPairs(head=head)) for size in SIZES]
    fleets += [(scheme, Correlations(head=head)) for scheme in MIXED] if mixed else []
    for capacities, algorithm in fleets:
        settings, started = settings_of(capacities, algorithm), time.monotonic()
        world = World.of(settings, data)
        ended = simulate(settings, data=data)
        for size, group in enumerate(ended.groups):
            label = capacities if capacities == group.capacity else f"{capacities}: {group.capacity}"
            judged = by_user(ended, world, size)
            lines.append(about | _line(label, judged, best, group.bytes_held, started, " ".join(ended.told)))
    MADE.clear()
    return lines


def _line(row: str, result: RankingResult, best: RankingResult, held: int, started: float, told: str) -> dict[str, Any]:
    apart = result.ndcg_by_user - best.ndcg_by_user
    error = float(apart.std() / len(apart) ** 0.5)
    return {
        "row": row, "NDCG@20": round(result.ndcg, 5), "bytes": held, "apart": round(float(apart.mean()), 5),
        "error": round(error, 5), "seconds": round(time.monotonic() - started, 1), "chosen": told,
    }  # fmt: skip


def main() -> None:
    """Print a table as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--head", type=int, default=8_000)
    parser.add_argument("--top-users", type=int)
    parser.add_argument("--mixed", action="store_true")
    chosen = parser.parse_args()
    writer = None
    for name in chosen.data:
        for _ in range(chosen.splits):
            seed = secrets.randbelow(2**31)
            data = split_anew(fairfold.data.load(name), seed, chosen.top_users)
            for row in rows_of(name, seed, data, chosen.mixed, chosen.head):
                if writer is None:
                    writer = csv.DictWriter(sys.stdout, list(row))
                    writer.writeheader()
                writer.writerow(row)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
