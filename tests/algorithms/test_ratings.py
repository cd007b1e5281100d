"""Ratings by federated least squares: where it ends, what is spoken of, what it asks of its settings."""

from typing import Any

import pytest
import torch

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.least_squares import GRAM, rows_of
from fairfold.algorithms.rating_rows import Window, centred, code_of
from fairfold.algorithms.ratings import CACHE, CENTRE, LAST
from fairfold.backends.batched import batched
from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings
from fairfold.protocol.people import People
from fairfold.simulate import simulate
from fairfold.simulate.numbering import numbered
from fairfold.subspace import Subspace, nested_subspaces
from tests.federations import after_rounds, copied, tiny_data, tiny_settings, tiny_world
from tests.flat import flat


def chosen(**changes: Any) -> Any:
    base = {"solver": "ratings", "ridge": 2.0, "tail_share": 0.5, "reference_factors": 3, "alike": False}
    return tiny_settings(**base | changes)


def test_it_ends_where_the_equations_of_all_users_and_items_hold() -> None:
    wanted = chosen(capacities="1x", clients_per_round=None)
    world, state = tiny_world(tiny_data(3, 30, 12, ratings=True), wanted)
    state = after_rounds(world, state, 400, batched)
    train, items = world.people.train, state.full["item.weight"].view(12, 3)
    own = world.people.private["user.weight"]
    assert train.ratings is not None
    code = code_of(own)[train.users]
    errors = centred(train.ratings, state.full[CENTRE]) - own[train.users, 0] - (code * items[train.items]).sum(1)
    pull = torch.tensor([wanted.algorithm.damping, wanted.algorithm.ridge, wanted.algorithm.ridge])
    by_item = torch.zeros(12, 3).index_add_(0, train.items, errors[:, None] * code)
    torch.testing.assert_close(by_item, pull * items, rtol=1e-2, atol=1e-2)
    inputs = torch.cat([torch.ones(len(errors), 1), items[train.items, 1:]], dim=1)
    by_user = torch.zeros(30, 3).index_add_(0, train.users, errors[:, None] * inputs)
    pull = torch.tensor([wanted.algorithm.damping, 1.0, 1.0])
    torch.testing.assert_close(by_user, pull * own, rtol=1e-2, atol=1e-2)


def test_a_row_has_the_ridge_of_every_item_that_shares_it() -> None:
    """Row by row: (n·K + k·pull) w = sums, with k items in the row."""
    world, state = tiny_world(tiny_data(5, 20, 40, ratings=True), chosen(capacities="4x", clients_per_round=None))
    state = after_rounds(world, state, 3, batched)
    (held,) = world.plan.assignments(0)
    space = subspace_of((held.projections or {})["item.weight"])
    row, counts = rows_of(space, torch.arange(40), 3), world.people.train.counts_by_item.double()
    codes = state.full[GRAM].view(3, 3).double()
    mean, spoken = codes / codes[0, 0], state.full[CENTRE][2].double() / counts.sum()
    pull = torch.diag(torch.tensor([5.0, 2.0, 2.0]).double())  # damping, and twice the ridge
    sums = state.moments["sums"]["item.weight"].view(-1, 3).double()
    table = state.full["item.weight"].view(40, 3).double()
    shared = [int((row == number).sum()) for number in range(len(sums))]
    assert max(shared) > 3
    for number, many in enumerate(shared):
        heard = spoken * counts[row == number].sum()
        expected = torch.linalg.solve(heard * mean + many * pull, sums[number])
        (first, *_) = (row == number).nonzero().flatten().tolist()
        torch.testing.assert_close(table[first], expected, rtol=1e-4, atol=1e-5)


def test_devices_of_every_size_speak_of_every_row_in_turn() -> None:
    small, large = sorted(
        nested_subspaces(300, ["2x", "10x"], mapping="ranked", chunk=3, sign=False, tail_share=0.5),
        key=lambda subspace: subspace.size,
    )
    rounds = -(-large.size // small.size)
    spoken = torch.cat([Window(large, small, number, 3).rows for number in range(rounds)])
    assert set(spoken.tolist()) == set(range(large.size // 3))
    items = torch.arange(100)
    window = Window(large, small, 1, 3)
    place = window.places(items)
    inside = place >= 0
    assert torch.equal(window.rows[place[inside]], rows_of(large, items[inside], 3))


def test_a_device_keeps_the_full_rows_of_its_own_items_as_they_pass() -> None:
    wanted = chosen(capacities="4x", clients_per_round=None, streamed=True)
    world, state = tiny_world(tiny_data(7, 20, 40, ratings=True), wanted)
    items = world.people.train.items
    passed = torch.full((len(items), 4), 0.0)
    for _ in range(6):
        before, number = state.full["item.weight"].view(40, 3), state.round_number
        (held,) = world.plan.assignments(number)
        assert held.projections is not None
        subspace = subspace_of(held.projections["item.weight"])
        assert subspace.size < 120
        whole = Subspace(120, 120)
        here = Window(whole, subspace, number, 3).places(items) >= 0
        passed[here] = torch.cat([before[items[here]], torch.ones(int(here.sum()), 1)], dim=1)
        state = after_rounds(world, state, backend=batched)
        torch.testing.assert_close(world.people.private[CACHE], passed)
    assert passed[:, -1].all()  # in six rounds all rows have passed a device that holds a quarter of them


def test_streamed_rows_free_the_server_of_what_devices_hold() -> None:
    data = planted()
    wanted: dict[str, Any] = {"solver": "ratings", "factors": 3, "ridge": 0.5, "rounds": 120, "alike": False}
    wanted |= {"clients_per_round": 20, "capacities": "8x-16x", "reference_factors": 3}
    folded, streamed = (simulate(flat(**wanted | {"streamed": way}), data=data) for way in (False, True))
    assert streamed.quality < 0.3 * folded.quality
    assert streamed.groups[0].bytes_held == folded.groups[0].bytes_held
    assert streamed.groups[0].bytes_up == folded.groups[0].bytes_up
    assert streamed.groups[0].bytes_down == 2 * folded.groups[0].bytes_down


def test_a_refused_reply_was_never_said() -> None:
    data = tiny_data(5, ratings=True)
    world, state = tiny_world(data, chosen(faults={"nan": 1.0}, capacities="1x-2x"))
    before = copied(state.full)
    after = after_rounds(world, state, backend=batched)
    assert not world.people.private[LAST].any()
    assert torch.equal(after.full["item.weight"], before["item.weight"])


def test_alike_items_share_rows_and_nothing_else_changes() -> None:
    data = tiny_data(6, 40, 60, ratings=True)
    wanted = chosen(capacities="2x-6x", alike=True)
    found = numbered(data, wanted)
    world, _ = tiny_world(data, wanted)
    spaces = sorted(
        (subspace_of(held.projections["item.weight"]) for held in world.plan.assignments(0) if held.projections),
        key=lambda subspace: subspace.size,
    )
    heads = [subspace.head // 3 for subspace in spaces]
    assert found.train.ratings is not None
    assert data.train.ratings is not None
    assert sorted(found.train.ratings.tolist()) == sorted(data.train.ratings.tolist())
    for start, stop in zip([0, *heads], [*heads, 60], strict=True):  # those that the same devices own change places
        same = [part.train.counts_by_item[start:stop].sort().values for part in (found, data)]
        assert torch.equal(*same)

    def spread(part: Interactions) -> float:
        means, tail = mean_ratings(part, wanted.algorithm.damping), torch.arange(heads[-1], 60)
        row = rows_of(spaces[-1], tail, 3)
        return sum(float(means[tail[row == shared]].var(correction=0)) for shared in set(row.tolist()))

    assert spread(found.train) < 0.5 * spread(data.train)


def mean_ratings(part: Interactions, damping: float) -> torch.Tensor:
    """What an item's ratings are above their users' means, drawn to 0."""
    assert part.ratings is not None
    means = torch.zeros(part.num_users).index_add_(0, part.users, part.ratings) / part.counts_by_user.clamp(min=1)
    above = torch.zeros(part.num_items).index_add_(0, part.items, part.ratings - means[part.users])
    return above / (part.counts_by_item + damping)


def planted() -> Dataset:
    """Ratings that two tastes explain."""
    source = torch.Generator().manual_seed(0)
    users, items = torch.randn(80, 2, generator=source), torch.randn(120, 2, generator=source)
    pairs = (torch.rand(80, 120, generator=source) < 0.5).nonzero()
    scores = 3 + (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) + 0.1 * torch.randn(len(pairs), generator=source)
    kept = torch.rand(len(pairs), generator=source) < 0.8
    train, test = (
        Interactions.from_pairs(pairs[part, 0], pairs[part, 1], 80, 120, scores[part]) for part in (kept, ~kept)
    )
    return Dataset("planted", train, test)


def test_it_learns_tastes_at_every_size() -> None:
    data = planted()
    train, scores = data.train, data.train.ratings
    assert scores is not None
    wanted: dict[str, Any] = {
        "solver": "ratings",
        "factors": 3,
        "ridge": 0.5,
        "rounds": 80,
        "clients_per_round": 20,
        "alike": False,
    }
    result = simulate(flat(**wanted | {"capacities": "8x-16x"}), data=data)
    assert result.metric == "MSE"
    assert result.quality < 0.1 * float(scores.var())
    world, _ = tiny_world(data, result.settings)
    plan = world.plan
    predict = plan.algorithm.predictor(plan, result.state.full, plan.assignments(0), People(plan, train, {}))
    assert predict(torch.tensor([0, 1]), torch.tensor([2, 3])).shape == (2,)


@pytest.mark.parametrize(
    "changes",
    [{"model": "neumf"}, {"weighting": "equal"}, {"factors": 1}, {"ridge": 0.0}, {"mapping": "chunk", "alike": True},
     {"solver": "least_squares", "alike": True}, {"solver": "least_squares", "streamed": True}, {"top": 5}],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        flat(**{"solver": "ratings"} | changes)
