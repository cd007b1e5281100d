"""Federations, data and references for tests of the co-occurrence algorithm."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairfold.config import read_settings
from fairfold.data import Dataset, Interactions
from fairfold.federation.federation import Federation, number_items
from fairfold.federation.updates import State
from fairfold.kernels import ops

SECURE = {"level": "secure", "min_cohort": 2}


def co_occurrence_federation(data: Dataset, **keys: Any) -> Federation:
    """A federation of the default algorithm without tuning; keys are tables, or keys of the algorithm."""
    tables = {key: keys.pop(key) for key in ("model", "subspace", "fleet", "run", "data", "privacy") if key in keys}
    algorithm = {"kind": "co_occurrence", "support": 1, "tune": False} | keys
    given = {"model": {"factors": 4}, "fleet": {"capacities": "1x"}, "algorithm": algorithm} | tables
    settings = read_settings(given)
    return Federation.of(settings, number_items(data, settings))


def dataset_of(histories: list[list[int]], items: int) -> Dataset:
    """Training data of some histories; the test data are the same."""
    users = torch.tensor([user for user, history in enumerate(histories) for _ in history])
    flat = torch.tensor([item for history in histories for item in history])
    train = Interactions.from_pairs(users, flat, len(histories), items)
    return Dataset("few", train, train)


def dense_matrix(train: Interactions) -> np.ndarray:
    """Users × items, 1 where a user has an item."""
    found = np.zeros((train.num_users, train.num_items))
    found[train.users.numpy(), train.items.numpy()] = 1
    return found


def scores_of(federation: Federation, state: State) -> Tensor:
    """Scores of all items by the server's model, for all users."""
    plan = federation.plan
    score = plan.algorithm.scorer(plan, state.full, plan.assignments(0), federation.clients)
    return score(torch.arange(federation.clients.num_clients))


def pair_sums(histories: list[Tensor], weights: Tensor, items: int) -> Tensor:
    """The packed sum over users of weight · x xᵀ over the leading items; histories ascend."""
    lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
    ends = lengths.cumsum(0)
    flat = torch.cat([torch.empty(0, dtype=torch.int64), *histories])
    return ops.pair_sums(flat, ends - lengths, ends, weights, items)
