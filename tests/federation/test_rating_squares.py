"""Ratings by federated least squares: where it ends, what is spoken of, what it asks of its settings."""

from typing import Any

import pytest
import torch

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings
from fairfold.federation.least_squares import rows_of, subspace_of
from fairfold.federation.rating_squares import Window, centred, code_of, rating_predictor
from fairfold.federation.replies import Rejections
from fairfold.federation.settings import read_settings
from fairfold.federation.task import CAUGHT, CENTRE, SAID
from fairfold.simulate import batched, simulate
from fairfold.simulate.alike import mean_ratings, numbered_alike
from fairfold.subspace import nested_subspaces
from tests.federations import tiny_data, tiny_federation, tiny_settings


def chosen(**changes: Any) -> Any:
    base = {"model": "mf-ratings", "solver": "least_squares", "aggregation": "delta", "chunk": 3, "ridge": 2.0}
    return tiny_settings(**base | {"tail_share": 0.5, "reference_factors": 3, "alike": False} | changes)


def test_it_ends_where_the_equations_of_all_users_and_items_hold() -> None:
    wanted = chosen(capacities="1x", clients_per_round=None)
    federation, state, private = tiny_federation(tiny_data(3, 30, 12, ratings=True), wanted)
    for _ in range(400):
        state = batched.run_round(state, private, federation, Rejections())
    train, items = federation.task.data.train, state.full["item.weight"].view(12, 3)
    own = private["user.weight"]
    assert train.ratings is not None
    code = code_of(own)[train.users]
    errors = centred(train.ratings, state.full[CENTRE]) - own[train.users, 0] - (code * items[train.items]).sum(1)
    pull = torch.tensor([wanted.damping, wanted.ridge, wanted.ridge])
    by_item = torch.zeros(12, 3).index_add_(0, train.items, errors[:, None] * code)
    torch.testing.assert_close(by_item, pull * items, rtol=1e-2, atol=1e-2)
    inputs = torch.cat([torch.ones(len(errors), 1), items[train.items, 1:]], dim=1)
    by_user = torch.zeros(30, 3).index_add_(0, train.users, errors[:, None] * inputs)
    pull = torch.tensor([wanted.damping, 1.0, 1.0])
    torch.testing.assert_close(by_user, pull * own, rtol=1e-2, atol=1e-2)


def test_devices_of_every_size_speak_of_every_row_in_turn() -> None:
    small, large = sorted(
        nested_subspaces(300, ["2x", "10x"], mapping="ranked", chunk=3, sign=False, tail_share=0.5),
        key=lambda subspace: subspace.size,
    )
    rounds = -(-large.size // small.size)
    spoken = torch.cat([Window(large, small, number, chosen()).rows for number in range(rounds)])
    assert set(spoken.tolist()) == set(range(large.size // 3))
    items = torch.arange(100)
    window = Window(large, small, 1, chosen())
    place = window.places(items)
    inside = place >= 0
    assert torch.equal(window.rows[place[inside]], rows_of(large, items[inside], 3))


def test_a_device_keeps_the_full_rows_of_its_own_items_as_they_pass() -> None:
    wanted = chosen(capacities="4x", clients_per_round=None, streamed=True)
    federation, state, private = tiny_federation(tiny_data(7, 20, 40, ratings=True), wanted)
    items = federation.task.data.train.items
    passed = torch.full((len(items), 4), 0.0)
    for _ in range(6):
        before, number = state.full["item.weight"].view(40, 3), state.round_number
        (held,) = federation.assignments(number)
        assert held.projections is not None
        subspace = subspace_of(held.projections["item.weight"])
        assert subspace.size < 120
        here = Window(subspace, subspace, number, wanted).places(items) >= 0
        passed[here] = torch.cat([before[items[here]], torch.ones(int(here.sum()), 1)], dim=1)
        state = batched.run_round(state, private, federation, Rejections())
        torch.testing.assert_close(private[CAUGHT], passed)
    assert passed[:, -1].all()  # in six rounds all rows have passed a device that holds a quarter of them


def test_streamed_rows_free_the_server_of_what_devices_hold() -> None:
    data, wanted = planted(), {"model": "mf-ratings", "factors": 3, "ridge": 0.5, "rounds": 120, "alike": False}
    wanted |= {"clients_per_round": 20, "capacities": "8x-16x", "reference_factors": 3}
    folded, streamed = (simulate(read_settings(wanted | {"streamed": way}), data=data) for way in (False, True))
    assert streamed.quality < 0.3 * folded.quality
    assert streamed.groups[0].bytes_held == folded.groups[0].bytes_held
    assert streamed.groups[0].bytes_up == folded.groups[0].bytes_up
    assert streamed.groups[0].bytes_down == 2 * folded.groups[0].bytes_down


def test_a_refused_reply_was_never_said() -> None:
    data = tiny_data(5, ratings=True)
    federation, state, private = tiny_federation(data, chosen(faults={"nan": 1.0}, capacities="1x-2x"))
    after = batched.run_round(state, private, federation, Rejections())
    assert not private[SAID].any()
    assert torch.equal(after.full["item.weight"], state.full["item.weight"])


def test_alike_items_share_rows_and_nothing_else_changes() -> None:
    data = tiny_data(6, 40, 60, ratings=True)
    wanted = chosen(capacities="2x-6x", alike=True)
    found = numbered_alike(data, wanted)
    federation, _, _ = tiny_federation(data, wanted)
    spaces = sorted(
        (subspace_of(held.projections["item.weight"]) for held in federation.assignments(0) if held.projections),
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
        means, tail = mean_ratings(part, wanted.damping), torch.arange(heads[-1], 60)
        row = rows_of(spaces[-1], tail, 3)
        return sum(float(means[tail[row == shared]].var(correction=0)) for shared in set(row.tolist()))

    assert spread(found.train) < 0.5 * spread(data.train)


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
    wanted = {"model": "mf-ratings", "factors": 3, "ridge": 0.5, "rounds": 80, "clients_per_round": 20, "alike": False}
    result = simulate(read_settings(wanted | {"capacities": "8x-16x"}), data=data)
    assert result.metric == "MSE"
    assert result.quality < 0.1 * float(scores.var())
    federation, _, _ = tiny_federation(data, result.settings)
    predict = rating_predictor(result.state.full, federation.task, result.settings, train)
    assert predict(torch.tensor([0, 1]), torch.tensor([2, 3])).shape == (2,)


@pytest.mark.parametrize(
    "changes",
    [{"solver": "gradient"}, {"weighting": "equal"}, {"factors": 1}, {"ridge": 0.0}, {"mapping": "chunk"},
     {"model": "mf", "alike": True}, {"model": "mf", "streamed": True}],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        read_settings({"model": "mf-ratings"} | changes)
