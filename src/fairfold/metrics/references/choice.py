"""A setting of a reference recommender, chosen on training data held out from it: the test set is not looked at."""

from collections.abc import Callable, Sequence
from statistics import mean

import torch

from fairfold.data.holdout import hold_out
from fairfold.data.interactions import Interactions
from fairfold.data.seeds import generator
from fairfold.metrics.ranking import Scorer, evaluate_ranking

HELD_OUT = 0.2
JUDGES = 1000
"""Users by whom a choice is judged: drawn by chance from more, asked again on other splits if there are fewer."""
MOST_SPLITS = 3


def tried(
    build: Callable[[Interactions, float], Scorer], values: Sequence[float], train: Interactions, k: int = 20
) -> dict[float, float]:
    """NDCG@k of every value on held-out training data; empty where nobody has enough to hold any out.

    Args:
        build: Makes the recommender from a training set and a value.
        values: What to try.
        train: All that may be trained on.
        k: How many ranks count.
    """
    splits = min(max(JUDGES // max(train.num_users, 1), 1), MOST_SPLITS)
    found = [found for seed in range(splits) if (found := _of_split(build, values, train, k, seed))]
    return {value: mean(of_split[value] for of_split in found) for value in values} if found else {}


def _of_split(
    build: Callable[[Interactions, float], Scorer], values: Sequence[float], train: Interactions, k: int, seed: int
) -> dict[float, float]:
    kept, held = hold_out(train, HELD_OUT, seed)
    judges = held.counts_by_user.nonzero().flatten()
    users = judges[torch.randperm(len(judges), generator=generator(seed, 3))[:JUDGES]]
    if not len(users):
        return {}
    return {value: evaluate_ranking(build(kept, value), kept, held, k, users=users).ndcg for value in values}
