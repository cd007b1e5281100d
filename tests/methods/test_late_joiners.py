"""Clients that come after the sizes were chosen: whether what they hold nests with what the others train."""

import pytest
import torch

from fairfold.federation.algorithm import COUNTS
from fairfold.federation.plan import Plan
from fairfold.federation.updates import PublicStatistics
from fairfold.subspace import Capacity
from tests.support.settings import make_settings

ITEMS = 200


def joins(capacities: str, capacity: str, mapping: str) -> tuple[bool, bool]:
    """Whether clients of a capacity took part, and whether they could."""
    settings = make_settings(capacities=capacities, method="fair", mapping=mapping, factors=8)
    counts = {COUNTS: torch.arange(ITEMS, 0, -1).double()}
    plan = Plan.of(settings, PublicStatistics(ITEMS, statistics=counts))
    return plan.assignment_for(Capacity.parse(capacity), 0)[1:]


@pytest.mark.parametrize(("mapping", "too_small"), [("chunk", "150x"), ("ranked", "64x")])
def test_a_client_smaller_than_all_cannot_train_along(mapping: str, too_small: str) -> None:
    """Chunks can be folded until a slot is one; who holds less than that has a subspace of its own."""
    assert joins("4x-16x", too_small, mapping) == (False, False)
    assert joins("4x-16x", "8x", mapping)[1]
    assert joins("4x-16x", "16x", mapping) == (True, True)


@pytest.mark.parametrize("mapping", ["chunk", "ranked"])
def test_where_all_hold_the_whole_table_any_client_nests(mapping: str) -> None:
    assert joins("1x", "8x", mapping)[1]
