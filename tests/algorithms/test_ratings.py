"""Ratings: where it ends, what is spoken of, what it asks of its settings."""

from typing import Any

import numpy as np
import pytest
import torch

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.rating_rows import Beliefs, Raters, Window, beliefs_from, moved_to, solved_items
from fairfold.algorithms.rating_words import OF_USERS, units_of
from fairfold.algorithms.ratings import CACHE, DAMPING, LAST, RatingSquares
from fairfold.algorithms.remembering import chain_of, rows_of
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
    base = {"solver": "ratings", "tail_share": 0.5, "reference_factors": 3, "alike": False}
    return tiny_settings(**base | changes)


def dense(train: Interactions, full: dict[str, Any]) -> Any:
    """The posteriors of all users and what is left of the items' equations, user by user and item by item, in numpy."""
    size = full["spreads"].numel() // 2
    shapes = {"item.weight": (-1, size + 1), "centre": (3,), "metric": (size, size), "spreads": (2, size)}
    items, centre, metric, spreads = (full[name].double().numpy().reshape(shape) for name, shape in shapes.items())
    leaning, noise = full["leaning"].double().numpy().reshape(size, size + 2), centre[2]
    rows = items[:, :-1]
    doubt = [noise * np.linalg.inv(count * metric + np.diag(noise / spreads[1])) for count in items[:, -1]]
    inside = np.diag([0.0] + [1.0] * (size - 1))  # without the 1 of a code, which is certain
    assert train.ratings is not None
    users, rest = [], np.zeros((train.num_items, size))
    moments: dict[str, Any] = {"codes": np.zeros((size, size)), "squares": 0.0, "facts": [], "covariance": []}
    for user in range(train.num_users):
        mine, given = train.of(user).numpy(), (train.ratings_of(user).double().numpy() - centre[0]) / centre[1]
        inputs = np.column_stack([np.ones(len(mine)), rows[mine, 1:]])
        matrix = inputs.T @ inputs + sum(inside @ doubt[item] @ inside for item in mine) + np.diag(noise / spreads[0])
        facts = np.concatenate([[1.0, np.log(len(mine))], rows[mine].mean(0)])
        told = inputs.T @ (given - rows[mine, 0]) - sum(inside @ doubt[item][:, 0] for item in mine)
        solved = np.linalg.solve(matrix, told + noise / spreads[0] * (leaning @ facts))
        covariance, code = noise * np.linalg.inv(matrix), np.concatenate([[1.0], solved[1:]])
        squared = np.outer(code, code) + inside @ covariance @ inside
        for item, value, one in zip(mine, given, inputs, strict=True):
            error = value - solved[0] - code @ rows[item]
            rest[item] += error * code - inside @ covariance @ one
            moments["squares"] += error**2 + one @ covariance @ one + (squared * doubt[item]).sum()
        moments["codes"] += len(mine) * squared
        moments["facts"].append(facts)
        moments["covariance"].append(covariance)
        users.append(solved)
    return np.array(users), rest, moments


def test_it_ends_where_the_equations_of_all_users_and_items_hold() -> None:
    wanted = chosen(capacities="1x", clients_per_round=None, factors=4, reference_factors=4)
    world, state = tiny_world(planted(1.0), wanted)
    state = after_rounds(world, state, 400, batched)
    train, known = world.people.train, Beliefs.of(state.full)
    users, rest, moments = dense(train, state.full)
    own = world.plan.algorithm.own_vectors(world.plan, sent_of(world, state), world.people, list(range(80)))
    np.testing.assert_allclose(own["users"], users, rtol=1e-3, atol=1e-4)
    table = state.full["item.weight"].view(120, 4).double().numpy()
    line = np.column_stack([np.ones(120), np.log(np.maximum(table[:, 3], 1))])
    expected = line @ np.linalg.lstsq(line, table[:, :3], rcond=None)[0]
    pull = (known.centre[2] / known.spreads[1]).double().numpy()
    np.testing.assert_allclose(rest, pull * (table[:, :3] - expected), rtol=5e-2, atol=5e-2)
    ratings = len(train)
    np.testing.assert_allclose(known.metric, moments["codes"] / ratings, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(float(known.centre[2]), moments["squares"] / ratings, rtol=1e-3)
    facts = np.array(moments["facts"])
    imagined = np.diag(np.square(facts).mean(0) + 1e-6)
    leaning = np.linalg.solve(facts.T @ facts + imagined, facts.T @ users).T
    np.testing.assert_allclose(known.leaning, leaning, rtol=5e-2, atol=5e-3)
    around = np.square(users - facts @ leaning.T).mean(0) + np.mean(moments["covariance"], 0).diagonal()
    np.testing.assert_allclose(float(known.spreads[0, 0]), around[0], rtol=1e-2)


@pytest.mark.parametrize("means", [0.05, 0.001])
def test_what_is_expected_of_users_is_found_from_rounded_sums(means: float) -> None:
    """From mean rows that are small, as in the first rounds; from next to nothing nothing follows."""
    source, users, size = torch.Generator().manual_seed(0), 2000, 3
    mean = means * (1 + torch.randn(users, size, generator=source).double())
    facts = torch.cat([torch.ones(users, 1).double(), 3 + torch.rand(users, 1, generator=source).double(), mean], dim=1)
    leaning = torch.randn(size, size + 2, generator=source).double()
    rows = facts @ leaning.T + 0.1 * torch.randn(users, size, generator=source).double()
    counts, codes = torch.full((users,), 50), torch.zeros(users, size, size).double()
    raters = Raters(rows, codes, facts, codes, counts)
    units = units_of(size).double()
    said = OF_USERS.said(raters.sums(torch.ones(users).double()) * units, torch.arange(users)) / units
    known = Beliefs(torch.ones(3), torch.eye(size), torch.ones(2, size), torch.zeros(size, size + 2))
    found = beliefs_from(said.sum(0), known, 1 / (OF_USERS.steps * units)).leaning
    exact = beliefs_from(raters.sums(torch.ones(users).double()).sum(0), known).leaning
    off = ((found - exact) @ facts.T).square().mean().sqrt()
    assert float(off) < 0.03
    if means == 0.05:
        np.testing.assert_allclose(found[:, 2:], exact[:, 2:], atol=0.1)
    assert float(found.abs().max()) < 2 * float(leaning.abs().max())


def sent_of(world: Any, state: Any) -> Any:
    return world.plan.algorithm.send(world.plan, state, [0])[0]


def test_a_row_has_the_pull_of_every_item_that_shares_it() -> None:
    """Row by row: (weights/2 + k·pull) w = sums + k·pull·m, with k items in the row."""
    source = torch.Generator().manual_seed(2)
    sums = torch.randn(9, 4, generator=source, dtype=torch.float64)
    sums[:, -1] = torch.tensor([0, 3, 5, 8, 8, 20, 30, 40, 70])
    sharing = torch.tensor([1, 1, 2, 2, 3, 1, 4, 1, 1]).double()
    before = torch.randn(9, 3, generator=source, dtype=torch.float64)
    centre, diagonal, *spread = torch.tensor([[3, 1, 0.6], [1, 2, 1], [1, 1, 1], [0.2, 0.05, 0.02]]).double()
    spreads = torch.stack(spread)
    known = Beliefs(centre, torch.diag(diagonal), spreads, torch.zeros(3, 5).double())
    table, found = solved_items(sums, sharing, known, before)
    counts = (sums[:, -1] / sharing / 4).numpy()  # a code has the mean square 4
    np.testing.assert_allclose(table[:, -1], counts)
    line = np.column_stack([np.ones(9), np.log(np.maximum(counts, 1))])
    weight = np.sqrt(np.where(counts > 0, sharing.numpy(), 0))[:, None]
    expected = line @ np.linalg.lstsq(weight * line, weight * before.numpy(), rcond=None)[0]
    pull = np.diag((centre[2] / spreads[1]).numpy())
    for row, many in enumerate(sharing.tolist()):
        matrix = float(sums[row, -1]) / 2 * np.eye(3) + many * pull
        solution = np.linalg.solve(matrix, sums[row, :3].numpy() + many * pull @ expected[row])
        np.testing.assert_allclose(table[row, :3], solution, rtol=1e-9)
    rows, variance = table[:, :3].numpy(), spreads[1].numpy()
    off = (rows - line @ np.linalg.lstsq(weight * line, weight * rows, rcond=None)[0]) ** 2
    doubt = 1 / (counts[:, None] * diagonal.numpy() / float(centre[2]) + 1 / variance)
    slow, quick = (np.average(of, axis=0, weights=weight[:, 0] ** 2) for of in (off + doubt, 1 - doubt / variance))
    quick = np.average(off, axis=0, weights=weight[:, 0] ** 2) / quick
    np.testing.assert_allclose(found, np.clip(np.where([1, 0, 0], quick, slow**0.8 * quick**0.2), 1e-3, 1))


def test_a_user_without_ratings_says_nothing() -> None:
    known = Beliefs(torch.tensor([0.0, 1.0, 0.5]), torch.eye(3), torch.ones(2, 3), torch.ones(3, 5))
    raters = Raters.solved(torch.ones(2, 4), torch.ones(2), torch.tensor([0, 0]), 2, known)
    sums = raters.sums(torch.ones(2))
    assert sums[0].all()
    assert not sums[1].any()


def test_words_about_other_rows_are_moved_to_those_of_the_largest_devices() -> None:
    """Of items that everybody has rated, and users of as many ratings each, K is the mean of all raters' codes."""
    source, users, items = torch.Generator().manual_seed(3), 40, 5
    rows, doubts, table, others = (
        torch.randn(*shape, generator=source, dtype=torch.float64)
        for shape in ((users, 3), (users, 3, 3), (items, 4), (items, 4))
    )
    doubts = doubts @ doubts.mT
    raters = Raters(rows, doubts, rows, torch.zeros_like(doubts), torch.full((users,), items))
    owner, item = torch.arange(users * items) // items, torch.arange(users * items) % items
    targets = torch.randn(users * items, generator=source, dtype=torch.float64)
    at_table, at_others = (
        torch.zeros(items, 4).double().index_add_(0, item, raters.words(of[item], targets, owner)[0])
        for of in (table, others)
    )
    codes = raters.sums(torch.zeros(users).double())[:, :9].sum(0).view(3, 3)
    lacking = moved_to(others[:, :3], table[:, :3], at_others[:, 3], codes / (users * items))
    assert not torch.allclose(at_others, at_table, atol=1)
    torch.testing.assert_close(at_others[:, :3] + lacking, at_table[:, :3])
    torch.testing.assert_close(at_others[:, 3], at_table[:, 3])


def test_the_server_moves_words_of_small_devices_alone() -> None:
    data = tiny_data(7, 20, 40, ratings=True)
    for changes, moves in (({"capacities": "1x-4x"}, True), ({"capacities": "4x"}, False), ({"streamed": True}, False)):
        world, state = tiny_world(data, chosen(**{"capacities": "1x-4x", "clients_per_round": None} | changes))
        state = after_rounds(world, state, 3, batched)
        plan, algorithm = world.plan, world.plan.algorithm
        assert isinstance(algorithm, RatingSquares)
        largest = algorithm.spoken_space(chain_of(plan, 0)[-1])
        full, weights = state.full["item.weight"], state.moments["weights"]
        total = state.moments["sums"]["item.weight"].view(-1, 3)[:, -1]
        torch.testing.assert_close(sum(weights.values()), total)
        lacking = algorithm._lacking(plan, largest, full, weights, Beliefs.of(state.full).metric.double())
        assert bool(lacking.any()) == moves
        assert not lacking[:, -1].any()


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
    wanted: dict[str, Any] = {"solver": "ratings", "factors": 4, "rounds": 120, "alike": False}
    wanted |= {"clients_per_round": None, "capacities": "8x-16x", "reference_factors": 3}
    folded, streamed = (simulate(flat(**wanted | {"streamed": way}), data=data) for way in (False, True))
    assert streamed.quality < 0.5 * folded.quality
    assert streamed.groups[0].bytes_held == folded.groups[0].bytes_held
    assert streamed.groups[0].bytes_up == folded.groups[0].bytes_up
    assert streamed.groups[0].bytes_down == folded.groups[0].bytes_down + 4 * (folded.groups[0].bytes_held // 4 - 33)


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
        means, tail = mean_ratings(part, DAMPING), torch.arange(heads[-1], 60)
        row = rows_of(spaces[-1], tail, 3)
        return sum(float(means[tail[row == shared]].var(correction=0)) for shared in set(row.tolist()))

    assert spread(found.train) < 0.5 * spread(data.train)


def mean_ratings(part: Interactions, damping: float) -> torch.Tensor:
    """What an item's ratings are above their users' means, drawn to 0."""
    assert part.ratings is not None
    means = torch.zeros(part.num_users).index_add_(0, part.users, part.ratings) / part.counts_by_user.clamp(min=1)
    above = torch.zeros(part.num_items).index_add_(0, part.items, part.ratings - means[part.users])
    return above / (part.counts_by_item + damping)


def planted(noise: float = 0.1) -> Dataset:
    """Ratings that two tastes explain, and noise."""
    source = torch.Generator().manual_seed(0)
    users, items = torch.randn(80, 2, generator=source), torch.randn(120, 2, generator=source)
    pairs = (torch.rand(80, 120, generator=source) < 0.5).nonzero()
    scores = 3 + (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) + noise * torch.randn(len(pairs), generator=source)
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
        "factors": 4,
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
    [{"model": "neumf"}, {"weighting": "equal"}, {"factors": 2}, {"ridge": 1.0}, {"mapping": "chunk", "alike": True},
     {"solver": "closed_form", "alike": True}, {"solver": "closed_form", "streamed": True}, {"top": 5}],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        flat(**{"solver": "ratings"} | changes)
