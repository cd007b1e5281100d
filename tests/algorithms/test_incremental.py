"""Incremental sums, rows that are folded whole, and what clients of few bytes hold of them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.rating_model import ROWS
from fairfold.backends.batched import batched
from fairfold.errors import InvalidCapacity, InvalidSettings
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round, sequential
from fairfold.federation.simulation import simulate
from fairfold.subspace import Subspace, nested_subspaces
from tests.support.federations import make_federation, tiny_data, tiny_settings
from tests.support.settings import make_settings


def chosen(**changes: Any) -> Any:
    return tiny_settings(**{"algorithm": "ratings", "tail_share": 0.5, "reference_factors": 3} | changes)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(6, 60), factors=st.integers(1, 6))
def test_rows_folded_whole_commute_with_matrices(seed: int, rows: int, factors: int) -> None:
    source = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, factors, generator=source, dtype=torch.float64)
    matrix = torch.randn(factors, factors, generator=source, dtype=torch.float64)
    small = Subspace(rows * factors, 4 * factors, seed, "ranked", factors, 2 * factors, sign=False)
    first = small.reduce((table @ matrix).view(-1)).view(-1, factors)
    torch.testing.assert_close(first, small.reduce(table.view(-1)).view(-1, factors) @ matrix)


def test_signs_would_not_commute() -> None:
    table, matrix = torch.randn(50, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    small = Subspace(200, 16, 1, "ranked", 4, 8)
    first = small.reduce((table @ matrix).view(-1)).view(-1, 4)
    assert not torch.allclose(first, small.reduce(table.view(-1)).view(-1, 4) @ matrix)


def test_a_refused_update_leaves_no_local_state() -> None:
    world, state = make_federation(tiny_data(5, ratings=True), chosen(faults={"nan": 1.0}, capacities="1x-2x"))
    before = state.full[ROWS].clone()
    rejections = Rejections()
    for backend in (sequential, batched):
        state = run_round(state, world.sampler, world.clients, rejections, backend)
    assert sum(rejections.counts.values()) == 8
    assert not any(own.any() for own in world.clients.local_state.values())
    assert torch.equal(state.full[ROWS], before)


@pytest.mark.parametrize("changes", [{}, {"streamed": True}])
def test_an_unchanged_client_sends_zeros(changes: dict[str, Any]) -> None:
    """Updates are additive changes. Sent as a changed copy of the model, they would lose their last digits."""
    settings_ = chosen(capacities="1x-4x", clients_per_round=None, **changes)
    world, state = make_federation(tiny_data(7, 9, 40, ratings=True), settings_)
    plan, clients = world.plan, world.clients
    for scheduled_task in world.sampler.schedule(state, list(range(9))):
        first, own = plan.algorithm.client_update(plan, scheduled_task.task, clients.client(scheduled_task.client, 0))
        assert all(vector.any() for vector in first.sums.values())
        clients.save_local_state([scheduled_task.client], own)
        again, _ = plan.algorithm.client_update(plan, scheduled_task.task, clients.client(scheduled_task.client, 0))
        assert not any(vector.any() for vector in again.sums.values())


def test_support_limits_what_clients_hold() -> None:
    data = tiny_data(6, 30, 80)
    counts = data.train.counts_by_item
    wanted = int((counts >= 14).sum())
    assert 0 < wanted < 70
    own = {"algorithm": "closed_form", "support": 14, "tail_share": 0.2, "chunk": 3, "sign": False}
    world, _ = make_federation(data, tiny_settings(**own, capacities="1x-2x-8x"))
    held = [assignment.projections for assignment in world.plan.assignments(0)]
    heads = [subspace_of(projections["item.weight"]).head // 3 for projections in held if projections is not None]
    assert wanted - 1 <= heads[0] <= wanted + 1
    assert heads[-1] <= 80 // 8


def test_one_tail_for_all_sizes_leaves_no_memory_unused() -> None:
    found = nested_subspaces(10_000, ["1x", 0.37, 0.11, "64x"], mapping="ranked", chunk=10, sign=False, tail_share=0.25)
    assert [space.size for space in found] == [10_000, 3_700, 1_100, 150]
    assert {space.layout.tail for space in found[1:]} == {30}
    with pytest.raises(InvalidCapacity, match="one that is shared"):
        nested_subspaces(1_000, [0.01], mapping="ranked", chunk=10, tail_share=0.25)


@pytest.mark.parametrize(
    "changes",
    [{"sign": True}, {"chunk": 2}, {"mapping": "element"}, {"rehash": True}, {"aggregation": "paper"},
     {"model": "neumf"}, {"method": "fedhm"}, {"server_lr": 0.1}, {"local_epochs": 2}],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        make_settings(**{"algorithm": "ratings"} | changes)


@pytest.mark.parametrize("capacity", ["64x", "100x"])
def test_a_client_without_room_for_whole_rows_is_refused(capacity: str) -> None:
    tried = make_settings(algorithm="ratings", factors=3, reference_factors=3, tail_share=0.125, capacities=capacity)
    with pytest.raises(InvalidCapacity, match="at least 6"):
        simulate(tried, data=tiny_data(3, 60, 120, ratings=True))
