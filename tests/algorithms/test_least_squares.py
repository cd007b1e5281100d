"""Federated least squares: what its sums come to, and what it asks of its settings."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.least_squares import GRAM
from fairfold.backends.batched import batched
from fairfold.errors import InvalidCapacity, InvalidSettings
from fairfold.protocol.faults import Rejections
from fairfold.protocol.round import Backend, in_turn, run_round
from fairfold.simulate import simulate
from fairfold.subspace import Subspace, nested_subspaces
from tests.federations import after_rounds, tiny_data, tiny_settings, tiny_world
from tests.flat import flat


def chosen(**changes: Any) -> Any:
    base = {"solver": "least_squares", "weighting": "equal", "support": 0, "tail_share": 0.5}
    return tiny_settings(**base | changes)


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


def assert_close_but_for_scale(found: Tensor, expected: Tensor) -> None:
    """The objective does not say how long rows are; the algorithm does, for the whole table."""
    torch.testing.assert_close(found / found.norm(), expected / expected.norm(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", [in_turn, batched])
def test_the_server_holds_the_least_squares_of_everybodys_latest_vectors(backend: Backend) -> None:
    world, state = tiny_world(tiny_data(3, 9, 40), chosen(capacities="1x", clients_per_round=4))
    state = after_rounds(world, state, 12, backend)  # until all have been drawn
    data, users = world.people.train, world.people.private["user.weight"]
    assert bool((users.abs().sum(1) > 0).all())
    weights = 1 / data.counts_by_user.float()
    sums, outer = torch.zeros(40, 3), users.T @ (weights[:, None] * users)
    sums.index_add_(0, data.items, (weights[:, None] * users)[data.users])
    ridge = chosen().algorithm.ridge * outer.diagonal().mean() * torch.eye(3)
    expected = torch.linalg.solve(outer + ridge, sums.T).T
    found = state.full["item.weight"].view(40, 3)
    assert_close_but_for_scale(found, expected)
    metric = state.full[GRAM].view(3, 3)
    torch.testing.assert_close(metric, found.T @ found, rtol=1e-3, atol=1e-4)
    assert float(metric.diagonal().mean()) == pytest.approx(1, rel=1e-4)  # nothing else would hold the scale


def test_rows_that_all_devices_own_hold_the_sums_of_every_size() -> None:
    settings_ = chosen(capacities="1x-2x-4x", clients_per_round=None)
    world, state = tiny_world(tiny_data(4, 12, 40), settings_)
    state = after_rounds(world, state, backend=batched)
    data, users = world.people.train, world.people.private["user.weight"]
    spaces = [subspace_of((held.projections or {})["item.weight"]) for held in world.plan.assignments(0)]
    heads = torch.tensor([space.head // 3 or 40 for space in spaces])  # of the full space: all
    owned = data.items < heads[world.fleet.size[data.users]]
    counts = torch.bincount(data.users[owned], minlength=12)
    weights = torch.where(counts > 0, 1 / counts.clamp(min=1), 0)
    assert bool((weights[world.fleet.size == 2] > 0).any())  # or the smallest would say nothing
    sums, outer = torch.zeros(40, 3), users.T @ (weights[:, None] * users)
    sums.index_add_(0, data.items, (weights[:, None] * users)[data.users])
    ridge = settings_.algorithm.ridge * outer.diagonal().mean() * torch.eye(3)
    expected = torch.linalg.solve(outer + ridge, sums.T).T
    last = int(heads.min())
    assert last > 2
    assert_close_but_for_scale(state.full["item.weight"].view(40, 3)[:last], expected[:last])


def test_rows_that_small_devices_lack_are_divided_by_those_who_own_them() -> None:
    settings_ = chosen(capacities="1x-4x", clients_per_round=None)
    world, state = tiny_world(tiny_data(4, 10, 40), settings_)
    state = after_rounds(world, state, backend=batched)
    large = world.fleet.size == 0
    data, users = world.people.train, world.people.private["user.weight"]
    weights = torch.where(large, 1 / data.counts_by_user.float(), 0)  # 1x devices own every item
    sums, outer = torch.zeros(40, 3), users.T @ (weights[:, None] * users)
    sums.index_add_(0, data.items, (weights[:, None] * users)[data.users])
    ridge = settings_.algorithm.ridge * outer.diagonal().mean() * torch.eye(3)
    expected = torch.linalg.solve(outer + ridge, sums.T).T
    last = 20  # owned by 1x devices alone
    assert_close_but_for_scale(state.full["item.weight"].view(40, 3)[last:], expected[last:])


def test_a_refused_reply_was_never_said() -> None:
    world, state = tiny_world(tiny_data(5), chosen(faults={"nan": 1.0}, capacities="1x-2x"))
    before = state.full["item.weight"].clone()
    rejections = Rejections()
    for backend in (in_turn, batched):
        state = run_round(state, world.fleet, world.people, rejections, backend)
    assert sum(rejections.counts.values()) == 8
    assert not world.people.private["user.weight"].any()
    assert torch.equal(state.full["item.weight"], before)


@pytest.mark.parametrize(
    "changes", [{"solver": "least_squares"}, {"solver": "ratings"}, {"solver": "ratings", "streamed": True}]
)
def test_who_has_nothing_new_to_say_sends_zeros(changes: dict[str, Any]) -> None:
    """All that is sent are summands. Sent as a changed copy of the model, they would have lost their last digits."""
    settings_ = tiny_settings(capacities="1x-4x", clients_per_round=None, support=0, tail_share=0.5, **changes)
    world, state = tiny_world(tiny_data(7, 9, 40, ratings=changes["solver"] == "ratings"), settings_)
    plan, people = world.plan, world.people
    for visit in world.fleet.visits(state, list(range(9))):
        first, own = plan.algorithm.answer(plan, visit.sent, people.client(visit.client, 0))
        assert all(vector.any() for vector in first.sums.values())
        people.keep([visit.client], own)
        again, _ = plan.algorithm.answer(plan, visit.sent, people.client(visit.client, 0))
        assert not any(vector.any() for vector in again.sums.values())


def test_support_limits_what_devices_hold() -> None:
    data = tiny_data(6, 30, 80)
    counts = data.train.counts_by_item
    wanted = int((counts >= 14).sum())
    assert 0 < wanted < 70
    world, _ = tiny_world(data, chosen(support=14, tail_share=0.2, capacities="1x-2x-8x"))
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
     {"model": "neumf"}, {"method": "fedhm"}, {"server_step": 0.1}, {"local_epochs": 2}, {"ridge": 0.0}],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        flat(**{"solver": "least_squares"} | changes)


def test_it_learns_more_than_popularity_at_every_size() -> None:
    world = {"users": 120, "items": 400, "interactions_per_user": 60}
    result = simulate(
        flat(solver="least_squares", world=world, capacities="1x-4x-8x", rounds=15, clients_per_round=40, factors=8,
             support=5)
    )  # fmt: skip
    assert result.quality > 1.1 * result.references["popularity"]
    for group in result.groups:
        assert group.quality is not None
        assert group.quality > group.references["popularity"]


@pytest.mark.parametrize("capacity", ["64x", "100x"])
def test_a_device_without_room_for_whole_rows_is_refused(capacity: str) -> None:
    world = {"users": 60, "items": 120, "interactions_per_user": 10}
    tried = flat(world=world, solver="least_squares", factors=3, capacities=capacity)
    with pytest.raises(InvalidCapacity, match="at least 6"):
        simulate(tried)
