"""One shape of correlations at several sizes, without trials, beside EASE: a quick look.

    python benchmarks/recommender_shape.py gowalla --rows DIR --columns 0 --share 0.5 --sizes 16x,64x

DIR is a folder that ``benchmarks/recommender.py`` wrote: its splits are taken, and what EASE reached on them for each
user, so that differences are paired over users. λ, β and the weight of pairs are the defaults.
"""

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fairfold.algorithms.cooccurrence.cooccurrence import history_weights, unpack_triangle
from fairfold.algorithms.cooccurrence.scorer import (
    NEIGHBORS,
    PAIRS,
    ROWS,
    CoOccurrenceArchitecture,
    CoOccurrenceScorer,
)
from fairfold.algorithms.cooccurrence.solver import SolverSettings, scaled_ridge, solve_model
from fairfold.data import Dataset
from fairfold.federation.federation import Federation, number_items
from fairfold.kernels import ops
from fairfold.methods.truncated import BudgetSplit, fit_to_budget
from fairfold.subspace.packed import FACTORS, QuantizedPairs, QuantizedRows
from fairfold.typing import FLOAT_BYTES, Weights

beside: Any = import_module("recommender")  # the file beside this one
USUAL, REFERENCE = beside.AllPairs(), 32


def made_of(data: Dataset, columns: int) -> tuple[CoOccurrenceArchitecture, Weights]:
    """The server's tensors from everybody's training data."""
    held = Federation.of(beside.settings_of("1x", USUAL), data).plan.architecture
    assert isinstance(held, CoOccurrenceArchitecture)
    train, mine = data.train, data.train.items < held.head
    lengths = torch.bincount(train.users[mine], minlength=train.num_users)
    ends = lengths.cumsum(0)
    weights = history_weights(lengths, USUAL.history_exponent)
    sums = ops.pair_sums(train.items[mine], ends - lengths, ends, weights, held.head)
    ridge = scaled_ridge(USUAL.ridge, USUAL.history_exponent)
    made = SolverSettings(ridge, columns, USUAL.beta, USUAL.neighbor_weight, held.head)
    return held, solve_model(unpack_triangle(sums.float()), train.counts_by_item[: held.head], made, held)


def cut(
    held: CoOccurrenceArchitecture, model: Weights, budget: int, shape: BudgetSplit
) -> tuple[CoOccurrenceScorer, int]:
    """What a device holds of them, and its bytes."""
    found = fit_to_budget(budget, held.head, held.columns, shape)
    assert found is not None
    rows = QuantizedRows(held.tables[ROWS], (found.rows, FACTORS + found.columns), found.bits)
    lists = {
        name: QuantizedPairs(held.dense[name], (min(many, held.dense[name][0]), 3), held.head, name == NEIGHBORS)
        for name, many in ((PAIRS, found.pairs), (NEIGHBORS, found.neighbors))
    }
    listed, near = (of.reduce(model[name].float().view(-1)).view(-1, 3) for name, of in lists.items())
    table = rows.reduce(model[ROWS].float().view(-1)).view(rows.kept)
    return CoOccurrenceScorer(table, listed, USUAL.pair_weight, near), rows.bytes + sum(
        of.bytes for of in lists.values()
    )


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="A name, or name:2000 for the users with most.")
    parser.add_argument("--rows", type=Path, required=True, help="Of benchmarks/recommender.py.")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--columns", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--near", type=int, default=0)
    parser.add_argument("--sizes", default="16x,64x")
    chosen = parser.parse_args()
    shape = BudgetSplit(chosen.columns, chosen.share, chosen.near)
    for seed in beside.seeds_of(chosen.rows, chosen.data, chosen.splits):
        data = number_items(beside.Unit(chosen.data, seed, "", 0, chosen.rows).load(), beside.settings_of("1x", USUAL))
        held, model = made_of(data, chosen.columns)
        users = (data.test.counts_by_user > 0).nonzero().flatten().tolist()
        kept = json.loads(beside.Shelf(chosen.rows, chosen.data, seed).path("EASE").read_text())
        ease = torch.tensor(kept["by_user"], dtype=torch.float64)
        given, wanted = ([part.of(user) for user in users] for part in (data.train, data.test))
        for size in chosen.sizes.split(","):
            whole = data.num_items * REFERENCE * FLOAT_BYTES
            served, many = cut(held, model, int(whole / float(size.removesuffix("x"))), shape)
            quality = served.held_out_ndcg(given, wanted, data.num_items, 20)
            left = quality - ease
            share, error = float(left.mean() / ease.mean()), float(left.std() / len(left) ** 0.5)
            mine = f"NDCG@20 {float(quality.mean()):.4f}, EASE {float(ease.mean()):.4f}"
            print(
                f"{seed} {size}, {many:,} bytes: {mine}, {float(left.mean()):+.4f} ± {error:.4f} ({share:+.1%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
