"""What the approximate Hessian of a Newton step costs, and the weight of unobserved items: everybody is 1x.

    FAIRFOLD_DATA=... python benchmarks/newton_hessian.py --data gowalla --weight .2 --item-ridge .86 [--exact]

``--item-ridge`` is the ridge itself, not divided by what the data has. The recipe ``fair`` divides an item's gradient
by w·Σ u uᵀ + (1 − w)·c·Σ u uᵀ (fairfold.algorithms.closed_form), since a matrix for every item would be too much to
send. ``--exact`` solves each item's row instead, as iALS does, which no device could take part in: it bounds what a
better Hessian can gain. As in ``fair_recipe.py`` a fifth of each user's training items is held out, so that the test
set plays no part. One seed, NDCG@20 of at most 3,000 users.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fairfold.algorithms.newton import newton_step
from fairfold.data import load
from fairfold.data.partition import hold_out
from fairfold.metrics.ranking import evaluate_ranking

OUT = Path(__file__).parent / "results" / "newton_hessian.csv"
FIELDS = ("data", "weight", "ridge", "item_ridge", "factors", "exact", "step", "momentum", "round", "ndcg")
USERS, HELD_OUT, AT_ONCE = 3_000, 0.2, 20_000


def outer_sums(rows: Tensor, owners: Tensor, count: int) -> Tensor:
    """Σ row rowᵀ by owner."""
    factors = rows.shape[1]
    sums = torch.zeros(count, factors * factors)
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        sums.index_add_(0, owners[start : start + AT_ONCE], (part[:, :, None] * part[:, None]).flatten(1))
    return sums.view(count, factors, factors)


def solve(others: Tensor, members: Tensor, owners: Tensor, count: int, weight: float, ridge: float) -> Tensor:
    """The least-squares rows of owners who have some of the others; ``owners`` ascend."""
    factors, found = others.shape[1], torch.empty(count, others.shape[1])
    everybody = weight * others.T @ others + ridge * torch.eye(factors)
    for first in range(0, count, 2_000):
        last = min(first + 2_000, count)
        low, high = torch.searchsorted(owners, torch.tensor([first, last])).tolist()
        rows, own = others[members[low:high]], owners[low:high] - first
        matrix = everybody + (1 - weight) * outer_sums(rows, own, last - first)
        found[first:last] = torch.linalg.solve(matrix, torch.zeros(last - first, factors).index_add_(0, own, rows))
    return found


def qualities(given: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """NDCG@20 every few rounds."""
    train = load(given.data, resplit=given.data == "ml-1m").with_validation().train
    train, held = hold_out(train, HELD_OUT, 0)
    num_users, num_items, weight = train.num_users, train.num_items, given.weight
    users, items = train.users.long(), train.items.long()
    by_item = items.argsort(stable=True)
    ridge = given.item_ridge
    shares = train.counts_by_item / num_users
    some = held.counts_by_user.nonzero().flatten()
    some = some[:: max(1, len(some) // USERS)]
    torch.manual_seed(0)
    table = torch.randn(num_items, given.factors) * 0.1
    last = table
    for number in range(1, given.rounds + 1):
        vectors = solve(table, items, users, num_users, weight, given.ridge)
        if given.exact:
            table = last = solve(vectors, users[by_item], items[by_item], num_items, weight, ridge)
        else:
            outer = vectors.T @ vectors
            slope = weight * (table @ outer)
            errors = (1 - weight) * (table[items] * vectors[users]).sum(1) - 1
            slope.index_add_(0, items, errors[:, None] * vectors[users])
            change, outer = -slope / num_users, outer / num_users
            reached = table + given.step * newton_step(table, change, outer, shares.float(), weight, ridge / num_users)
            table, last = reached + given.momentum * (reached - last), reached
        if number % given.every == 0 or number == given.rounds:
            rows, columns = solve(last, items, users, num_users, weight, given.ridge), last.T
            yield number, evaluate_ranking(lambda of: rows[of] @ columns, train, held, 20, users=some).ndcg  # noqa: B023


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="ml-100k")
    for name, value in (("weight", 0.5), ("ridge", 10.0), ("item-ridge", 5.0), ("step", 1.0), ("momentum", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    for name, number in (("factors", 32), ("rounds", 8), ("every", 4)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = [given.data, given.weight, given.ridge, given.item_ridge, given.factors, given.exact, given.step]
    facts.append(given.momentum)
    for number, quality in qualities(given):
        is_new = not given.out.exists()
        with given.out.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(FIELDS)
            writer.writerow([*facts, number, f"{quality:.4f}"])
        print(*facts, number, f"{quality:.4f}", flush=True)


if __name__ == "__main__":
    main()
