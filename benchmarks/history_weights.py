"""Search for defaults of the default recipe, on held-out training data of several data sets.

For each set a tenth of every user's *training* items is held out; test items are never read. The model is the exact
inverse over the items with support (the most popular ones where there are more), scored as the server scores. A line of
JSON per combination: ``python benchmarks/history_weights.py ml-100k gowalla@8000 ml-1m@20 > found.jsonl``; NAME@N takes
N users drawn at random. ``--table found.jsonl`` shows the best and the regret of every combination.
"""

import argparse
import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch

from fairfold.algorithms.cooccurrence import cooccurrence, solver
from fairfold.data import Interactions, load
from fairfold.data.partition import hold_out
from fairfold.metrics.ranking import evaluate_ranking

SUPPORT, MOST_ITEMS, HELD_OUT, MOST_JUDGES = 3, 2_000, 0.1, 1_000
EXPONENTS, RIDGES, BETAS = (1.0, 0.5, 0.25), (1.0, 2.0, 4.0, 8.0, 16.0), (0.15,)


def sample(source: str) -> Interactions:
    """The training interactions of a set, of some users, items by popularity."""
    name, _, users = source.partition("@")
    train = load(name, resplit=name == "ml-1m").with_validation().train
    if users:
        chosen = torch.randperm(train.num_users, generator=torch.Generator().manual_seed(0))[: int(users)].sort().values
        lengths = train.counts_by_user[chosen]
        items = torch.cat([train.of(user) for user in chosen.tolist()])
        train = Interactions.from_pairs(cooccurrence.owners_of(lengths), items, len(chosen), train.num_items)
    place = train.counts_by_item.argsort(descending=True, stable=True).argsort()
    return train.renumbered(place)


def gram(train: Interactions, items: int, exponent: float) -> torch.Tensor:
    """The matrix of pairs of the leading items."""
    lengths = train.counts_by_user
    upload = cooccurrence.CoOccurrenceUpload.of(train.items, lengths, int(lengths.max()), exponent)
    return cooccurrence.unpack_triangle(upload.dense(items, torch.float32))


def search(source: str, popularity_weights: list[float], neighbor_weights: list[float]) -> None:
    """Print the quality of all combinations on one set."""
    train, held = hold_out(sample(source), HELD_OUT, 1)
    counts, users = train.counts_by_item, train.num_users
    items = min(MOST_ITEMS, cooccurrence.num_supported(counts, SUPPORT))
    judges = held.counts_by_user.nonzero().flatten()
    judges = judges[torch.randperm(len(judges), generator=torch.Generator().manual_seed(0))[:MOST_JUDGES]]
    known = counts[:items].double().clamp(min=1)
    popular = float(
        evaluate_ranking(lambda asked: counts.float().expand(len(asked), -1), train, held, 20, users=judges).ndcg
    )
    about = {"set": source, "users": users, "items": items, "popularity": popular}
    matrices = {exponent: gram(train, items, exponent) for exponent in EXPONENTS}
    nearest = solver.nearest_neighbors(next(iter(matrices.values())).clone(), counts[:items], 5).float()
    for exponent, ridge, beta in itertools.product(EXPONENTS, RIDGES, BETAS):
        penalty = solver.scaled_ridge(ridge, exponent)
        precision = solver.Precision.of(matrices[exponent].clone(), counts[:items], beta, penalty)
        weights = precision.correlations().double() * (precision.scales * precision.roots)[:, None] / precision.roots
        for neighbor, shrink in itertools.product(neighbor_weights, popularity_weights):
            full = weights.float().index_put(
                (nearest[:, 1].long(), nearest[:, 0].long()),
                neighbor * nearest[:, 2] * (nearest[:, 0] != nearest[:, 1]), accumulate=True,
            ) if neighbor else weights.float()  # fmt: skip
            extra = (shrink * (known / known.mean()) ** -beta * known / users).float()

            def score(asked: torch.Tensor, full: torch.Tensor = full, extra: torch.Tensor = extra) -> torch.Tensor:
                found = -1e6 + counts.float().expand(len(asked), -1).contiguous()
                history = torch.zeros(len(asked), items)
                for row, user in enumerate(asked.tolist()):
                    mine = train.of(user)
                    history[row, mine[mine < items]] = 1
                found[:, :items] = history @ full + extra / (1 + history.sum(1, keepdim=True))
                return found

            value = evaluate_ranking(score, train, held, 20, users=judges).ndcg
            row = {"exponent": exponent, "ridge": ridge, "beta": beta, "neighbor": neighbor, "shrink": shrink}
            print(json.dumps(about | row | {"ndcg": round(float(value), 5)}), flush=True)


def table(path: Path, keys: list[str]) -> None:
    """Print, for every combination of some keys, the quality on each set against its best, and the mean of all."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    best: dict[str, float] = defaultdict(float)
    found: dict[tuple[float, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        best[row["set"]] = max(best[row["set"]], row["ndcg"])
        combination = tuple(row[key] for key in keys)
        found[combination][row["set"]] = max(found[combination][row["set"]], row["ndcg"])
    sets = sorted(best)
    print(" ".join(f"{name[:14]:>14}" for name in (*keys, *sets, "mean regret", "worst")))
    print(" ".join(f"{cell:>14}" for cell in (*("" for _ in keys), *(f"{best[name]:.4f}" for name in sets))))
    regrets = {one: [1 - values[name] / best[name] for name in sets] for one, values in found.items()}
    for one in sorted(regrets, key=lambda one: mean(regrets[one]))[:30]:
        cells = [f"{value:.3%}" for value in (*regrets[one], mean(regrets[one]), max(regrets[one]))]
        print(" ".join(f"{cell:>14}" for cell in (*map(str, one), *cells)))


def main() -> None:
    """Search, or show what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--keys", default="exponent,ridge,beta")
    parser.add_argument("--popularity", type=float, nargs="*", default=[1.0])
    parser.add_argument("--neighbors", type=float, nargs="*", default=[0.05])
    given = parser.parse_args()
    for source in given.sets:
        search(source, given.popularity, given.neighbors)
        print(f"{source}: done", file=sys.stderr)
    if given.table:
        table(given.table, given.keys.split(","))


if __name__ == "__main__":
    main()
