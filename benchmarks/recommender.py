"""Correlations cut to bytes beside EASE, iALS and item-kNN, on fresh splits.

    python benchmarks/recommender.py ml-100k ml-1m gowalla book-crossing:2000 --splits 3 --mixed --out DIR

Every split is drawn by chance (its seed is written down): 70 % of each user to train on; ``name:2000`` takes the 2,000
users with most interactions. References are trained on the same items and tuned on held-out training data
(docs/runs.md). At every size all users hold a model of that size, choose its shape and λ by trials on a tenth of their
training data, and send all of their pairs; with ``--mixed`` fleets of several sizes are run as well, which send what
their capacity allows.

Every row is a file in DIR as soon as it is there, with the quality of every user; the same command goes on where it
was interrupted; ``--processes`` makes several at a time. At the end, or at once with ``--table``, a table per data set
is shown and written to DIR: means over splits, and the mean over users of the difference to the better one of EASE and
iALS, and of mixed fleets to all-1x, with their standard errors.
"""

import argparse
import json
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import fairfold.data
from fairfold.algorithms.cooccurrence.algorithm import CoOccurrence
from fairfold.algorithms.cooccurrence.scorer import ROWS
from fairfold.algorithms.cooccurrence.solver import SolverSettings
from fairfold.config import Settings, read_settings
from fairfold.data import Dataset, Interactions
from fairfold.data.partition import hold_out
from fairfold.federation.algorithm import Tunable
from fairfold.federation.evaluation import Result
from fairfold.federation.federation import Federation, number_items
from fairfold.federation.plan import Plan
from fairfold.federation.simulation import simulate
from fairfold.federation.updates import PublicStatistics
from fairfold.metrics.ranking import RankingResult, evaluate_ranking
from fairfold.metrics.tuned_baselines import STRONG_BASELINES, tuned_strong_baselines
from fairfold.subspace import Capacity
from fairfold.subspace.projection import Assignment
from fairfold.typing import Weights

SIZES = ("1x", "4x", "16x", "64x")
MIXED = ("1x-4x-16x", "1x-2x-4x-8x-16x-32x-64x")
REFERENCES = ("EASE", "iALS", "item-kNN")


class AllPairs(CoOccurrence):
    """Devices of all sizes say all of their pairs; a model with fewer columns than another like it is that one."""

    def block(self, settings: Settings, public: PublicStatistics, capacity: Capacity, whole: int) -> int:  # noqa: ARG002
        """All of them."""
        return whole

    def solve(self, plan: Plan, sums: torch.Tensor, chosen: SolverSettings, draft: bool = False) -> Weights:  # noqa: ARG002
        key = (float(sums.sum()), float(sums.square().sum()), *chosen._replace(columns=0))
        if key not in SOLVED or SOLVED[key][0] < chosen.columns:
            SOLVED[key] = chosen.columns, super().solve(plan, sums, chosen)
        return SOLVED[key][1]


SOLVED: dict[tuple[float, ...], tuple[float, Weights]] = {}


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


def settings_of(capacities: str, algorithm: CoOccurrence) -> Settings:
    """Of one fleet."""
    return read_settings({"algorithm": algorithm, "fleet": {"capacities": capacities}})


def by_user(result: Result, world: Federation, size: int) -> RankingResult:
    """How well the model of a size serves everybody."""
    plan = Tunable.of(result.settings.algorithm).resolve(world.plan, result.state)
    held = plan.assignments(0)[size].projections or {}
    full = {name: of.recover(of.reduce(result.state.full[name])) for name, of in held.items()}
    score = plan.algorithm.scorer(plan, full, [Assignment(held)], world.clients)
    return evaluate_ranking(score, world.interactions.train, world.interactions.test)


class Shelf:
    """The rows of one split, each in a file: what is there is not made again."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        self.folder, self.stem = folder, f"{name.replace(':', '-')}.{seed}"

    def path(self, row: str) -> Path:
        """Of a row."""
        return self.folder / f"{self.stem}.{row.replace(': ', '_')}.json"

    def keep(self, row: str, result: RankingResult, **facts: Any) -> None:
        """Write one, whole or not at all."""
        by_user = [round(value, 6) for value in result.ndcg_by_user.tolist()]
        known = {"row": row, "NDCG@20": result.ndcg} | facts | {"by_user": by_user}
        beside = self.path(row).with_suffix(".new")
        beside.write_text(json.dumps(known))
        beside.replace(self.path(row))
        print(f"{self.stem} {row}: {result.ndcg:.4f} {facts}", flush=True)


@dataclass(frozen=True)
class Unit:
    """What one process makes at a time: a reference, a fleet, or fleets of one size each (1x,4x), of one split."""

    name: str
    seed: int
    what: str
    head: int
    folder: Path

    @property
    def shelf(self) -> Shelf:
        """Where its rows are kept."""
        return Shelf(self.folder, self.name, self.seed)

    @property
    def made(self) -> bool:
        """Whether they are there."""
        return all(self.shelf.path(row).exists() for fleet in self.what.split(",") for row in labels(fleet))

    def load(self) -> Dataset:
        """The split."""
        known, _, most = self.name.partition(":")
        return split_anew(fairfold.data.load(known), self.seed, int(most) if most else None)


def make(unit: Unit) -> None:
    """The rows of a unit."""
    first = settings_of("1x", AllPairs(max_items=unit.head))
    data, started = number_items(unit.load(), first), time.monotonic()
    known = torch.arange(data.num_items) < Federation.of(first, data).plan.architecture.tables[ROWS][0]
    about = {"users": data.num_users, "items": data.num_items, "head": int(known.sum())}
    if unit.what in REFERENCES:
        kinds = [kind for kind in STRONG_BASELINES if kind.name == unit.what]
        name, result = next(tuned_strong_baselines(data, kinds=kinds))
        unit.shelf.keep(unit.what, result, **about, seconds=round(time.monotonic() - started, 1), chosen=name)
        return
    for fleet in unit.what.split(","):
        algorithm, started = (CoOccurrence if "-" in fleet else AllPairs)(max_items=unit.head), time.monotonic()
        if all(unit.shelf.path(row).exists() for row in labels(fleet)):
            continue
        settings = settings_of(fleet, algorithm)
        world, ended = Federation.of(settings, data), simulate(settings, data=data)
        for size, (row, group) in enumerate(zip(labels(fleet), ended.groups, strict=True)):
            result, chosen = by_user(ended, world, size), " ".join(ended.notes)
            seconds = round(time.monotonic() - started, 1)
            held = {"bytes": group.bytes_held, "sent": group.bytes_up, "seconds": seconds, "chosen": chosen}
            unit.shelf.keep(row, result, **about, **held)
    SOLVED.clear()


def labels(capacities: str) -> list[str]:
    """The rows of a fleet."""
    sizes = capacities.split("-")
    return [f"{capacities}: {size}" for size in sizes] if len(sizes) > 1 else sizes


def table(shelves: list[Shelf], rows: list[str]) -> Iterator[str]:
    """Means over the splits that have a row, in Markdown."""
    yield "| row | splits | NDCG@20 | bytes | to the better of EASE and iALS | to all-1x |\n|---|---|---|---|---|---|"
    kept = [
        {row: json.loads(shelf.path(row).read_text()) for row in rows if shelf.path(row).exists()} for shelf in shelves
    ]
    for row in rows:
        found = [split for split in kept if row in split]
        if not found:
            continue
        strong = [[split[name] for name in REFERENCES[:2] if name in split] for split in found]
        best = [max(of, key=lambda one: one["NDCG@20"], default=None) for of in strong]
        whole = [split.get("1x") for split in found]
        mine = [split[row] for split in found]
        held = mean(one.get("bytes", 0) for one in mine)
        quality = mean(one["NDCG@20"] for one in mine)
        yield (
            f"| {row} | {len(found)} | {quality:.4f} | {held:,.0f} | {apart(mine, best)} | "
            f"{apart(mine, whole) if ':' in row else ''} |"
        )


def apart(mine: list[dict[str, Any]], others: list[dict[str, Any] | None]) -> str:
    """The mean difference over users and splits, in per cent as well, and its standard error."""
    both = [(one, other) for one, other in zip(mine, others, strict=True) if other is not None]
    if not both:
        return ""
    left = [torch.tensor(one["by_user"]) - torch.tensor(other["by_user"]) for one, other in both]
    size = mean(float(of.mean()) for of in left)
    error = sum(float(of.var() / len(of)) for of in left) ** 0.5 / len(left)
    share = size / mean(other["NDCG@20"] for _, other in both)
    return f"{size:+.4f} ± {error:.4f} ({share:+.1%})"


def seeds_of(folder: Path, name: str, splits: int) -> list[int]:
    """Of the splits of a data set: drawn by chance when they are first asked for, and written down."""
    drawn = folder / f"{name.replace(':', '-')}.seeds.json"
    seeds: list[int] = json.loads(drawn.read_text()) if drawn.exists() else []
    seeds += [secrets.randbelow(2**31) for _ in range(splits - len(seeds))]
    drawn.write_text(json.dumps(seeds))
    return seeds[:splits]


def one_thread() -> None:
    """As many processes as there are cores need no more."""
    torch.set_num_threads(1)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="A name, or name:2000 for the users with most.")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--head", type=int, default=8_000)
    parser.add_argument("--sizes", default="1x,4x,16x,64x", help="That all users hold.")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--processes", type=int, default=1, help="Each of one thread, where there are several.")
    parser.add_argument("--out", type=Path, default=Path("recommender-rows"))
    parser.add_argument("--table", action="store_true", help="Show what there is, and make nothing.")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    seeds = {name: seeds_of(chosen.out, name, chosen.splits) for name in chosen.data}
    whats = [chosen.sizes, *REFERENCES, *(MIXED if chosen.mixed else ())]  # what takes longest, and matters most, first
    splits = [(name, seed) for name in chosen.data for seed in seeds[name]]
    units = [Unit(name, seed, what, chosen.head, chosen.out) for what in whats for name, seed in splits]
    missing = [] if chosen.table else [unit for unit in units if not unit.made]
    if chosen.processes > 1 and missing:
        for name in {unit.name.partition(":")[0] for unit in missing}:
            fairfold.data.load(name)  # prepared once, before all
        with ProcessPoolExecutor(chosen.processes, get_context("spawn"), one_thread) as pool:
            for done in as_completed([pool.submit(make, unit) for unit in missing]):
                done.result()
    else:
        for unit in missing:
            make(unit)
    sizes = dict.fromkeys([*SIZES, *chosen.sizes.split(",")])
    ordered = sorted(sizes, key=lambda size: float(size.removesuffix("x")))
    rows = [*REFERENCES, *ordered, *(row for scheme in MIXED for row in labels(scheme))]
    for name in chosen.data:
        shelves = [Shelf(chosen.out, name, seed) for seed in seeds[name]]
        text = f"\n{name}\n\n" + "\n".join(table(shelves, rows)) + "\n"
        print(text, flush=True)
        (chosen.out / f"{name.replace(':', '-')}.md").write_text(text)


if __name__ == "__main__":
    main()
