"""Ratings: where it ends, what is rows of, what it asks of its settings."""

from typing import Any

import numpy as np
import pytest
import torch

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.incremental import chain_of, rows_of
from fairfold.algorithms.rating_model import (
    RatingHyperparameters,
    UserPosteriors,
    estimate_hyperparameters,
    row_correction,
    solve_items,
)
from fairfold.algorithms.rating_updates import USER_FIXED_POINT, Window, statistic_units
from fairfold.algorithms.ratings import CACHE, DAMPING, BayesianRatings
from fairfold.backends.batched import batched
from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings
from fairfold.federation.algorithm import DeviceScoring, PredictsRatings
from fairfold.federation.clients import Clients
from fairfold.federation.federation import number_items
from fairfold.federation.simulation import simulate
from fairfold.subspace import Subspace, nested_subspaces
from tests.support.federations import after_rounds, make_federation, tiny_data, tiny_settings
from tests.support.settings import make_settings


def chosen(**changes: Any) -> Any:
    base = {"algorithm": "ratings", "tail_share": 0.5, "reference_factors": 3, "group_similar": False}
    return tiny_settings(**base | changes)


def dense(train: Interactions, full: dict[str, Any]) -> Any:
    """The posteriors of all users and what is left of the items' equations, user by user and item by item, in numpy."""
    size = full["variances"].numel() // 2
    shapes = {"item.weight": (-1, size + 1), "center": (3,), "metric": (size, size), "variances": (2, size)}
    items, center, metric, variances = (full[name].double().numpy().reshape(shape) for name, shape in shapes.items())
    regression, noise = full["regression"].double().numpy().reshape(size, size + 2), center[2]
    rows = items[:, :-1]
    covariance_of_items = [
        noise * np.linalg.inv(count * metric + np.diag(noise / variances[1])) for count in items[:, -1]
    ]
    inside = np.diag([0.0] + [1.0] * (size - 1))  # without the 1 of a code, which is certain
    assert train.ratings is not None
    users, rest = [], np.zeros((train.num_items, size))
    algorithm_state: dict[str, Any] = {
        "codes": np.zeros((size, size)),
        "squares": 0.0,
        "features": [],
        "covariance": [],
    }
    for user in range(train.num_users):
        mine, given = train.of(user).numpy(), (train.ratings_of(user).double().numpy() - center[0]) / center[1]
        inputs = np.column_stack([np.ones(len(mine)), rows[mine, 1:]])
        matrix = (
            inputs.T @ inputs
            + sum(inside @ covariance_of_items[item] @ inside for item in mine)
            + np.diag(noise / variances[0])
        )
        features = np.concatenate([[1.0, np.log(len(mine))], rows[mine].mean(0)])
        right_side = inputs.T @ (given - rows[mine, 0]) - sum(inside @ covariance_of_items[item][:, 0] for item in mine)
        solved = np.linalg.solve(matrix, right_side + noise / variances[0] * (regression @ features))
        covariance, code = noise * np.linalg.inv(matrix), np.concatenate([[1.0], solved[1:]])
        squared = np.outer(code, code) + inside @ covariance @ inside
        for item, value, one in zip(mine, given, inputs, strict=True):
            error = value - solved[0] - code @ rows[item]
            rest[item] += error * code - inside @ covariance @ one
            algorithm_state["squares"] += (
                error**2 + one @ covariance @ one + (squared * covariance_of_items[item]).sum()
            )
        algorithm_state["codes"] += len(mine) * squared
        algorithm_state["features"].append(features)
        algorithm_state["covariance"].append(covariance)
        users.append(solved)
    return np.array(users), rest, algorithm_state


def test_it_ends_where_the_equations_of_all_users_and_items_hold() -> None:
    wanted = chosen(capacities="1x", clients_per_round=None, factors=4, reference_factors=4)
    federation, state = make_federation(planted(1.0), wanted)
    state = after_rounds(federation, state, 400, batched)
    train, known = federation.clients.train, RatingHyperparameters.of(state.full)
    users, rest, algorithm_state = dense(train, state.full)
    own = DeviceScoring.of(federation.plan.algorithm).scoring_vectors(
        federation.plan, task_of(federation, state), federation.clients, list(range(80))
    )
    np.testing.assert_allclose(own["users"], users, rtol=1e-3, atol=1e-4)
    table = state.full["item.weight"].view(120, 4).double().numpy()
    line = np.column_stack([np.ones(120), np.log(np.maximum(table[:, 3], 1))])
    expected = line @ np.linalg.lstsq(line, table[:, :3], rcond=None)[0]
    shrinkage = (known.center[2] / known.variances[1]).double().numpy()
    np.testing.assert_allclose(rest, shrinkage * (table[:, :3] - expected), rtol=5e-2, atol=5e-2)
    ratings = len(train)
    np.testing.assert_allclose(known.metric, algorithm_state["codes"] / ratings, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(float(known.center[2]), algorithm_state["squares"] / ratings, rtol=1e-3)
    features = np.array(algorithm_state["features"])
    imagined = np.diag(np.square(features).mean(0) + 1e-6)
    regression = np.linalg.solve(features.T @ features + imagined, features.T @ users).T
    np.testing.assert_allclose(known.regression, regression, rtol=5e-2, atol=5e-3)
    around = np.square(users - features @ regression.T).mean(0) + np.mean(algorithm_state["covariance"], 0).diagonal()
    np.testing.assert_allclose(float(known.variances[0, 0]), around[0], rtol=1e-2)


@pytest.mark.parametrize("means", [0.05, 0.001])
def test_what_is_expected_of_users_is_found_from_rounded_sums(means: float) -> None:
    """From mean rows that are small, as in the first rounds; from next to nothing nothing follows."""
    source, users, size = torch.Generator().manual_seed(0), 2000, 3
    mean = means * (1 + torch.randn(users, size, generator=source).double())
    features = torch.cat(
        [torch.ones(users, 1).double(), 3 + torch.rand(users, 1, generator=source).double(), mean], dim=1
    )
    regression = torch.randn(size, size + 2, generator=source).double()
    rows = features @ regression.T + 0.1 * torch.randn(users, size, generator=source).double()
    counts, codes = torch.full((users,), 50), torch.zeros(users, size, size).double()
    posteriors = UserPosteriors(rows, codes, features, codes, counts)
    units = statistic_units(size).double()
    sent = USER_FIXED_POINT.quantize(posteriors.sums(torch.ones(users).double()) * units, torch.arange(users)) / units
    known = RatingHyperparameters(torch.ones(3), torch.eye(size), torch.ones(2, size), torch.zeros(size, size + 2))
    found = estimate_hyperparameters(sent.sum(0), known, 1 / (USER_FIXED_POINT.steps * units)).regression
    exact = estimate_hyperparameters(posteriors.sums(torch.ones(users).double()).sum(0), known).regression
    off = ((found - exact) @ features.T).square().mean().sqrt()
    assert float(off) < 0.03
    if means == 0.05:
        np.testing.assert_allclose(found[:, 2:], exact[:, 2:], atol=0.1)
    assert float(found.abs().max()) < 2 * float(regression.abs().max())


def task_of(federation: Any, state: Any) -> Any:
    return federation.plan.algorithm.tasks(federation.plan, state, [0])[0]


def test_a_row_has_the_shrinkage_of_every_item_that_shares_it() -> None:
    """Row by row: (weights/2 + k·shrinkage) w = sums + k·shrinkage·m, with k items in the row."""
    source = torch.Generator().manual_seed(2)
    sums = torch.randn(9, 4, generator=source, dtype=torch.float64)
    sums[:, -1] = torch.tensor([0, 3, 5, 8, 8, 20, 30, 40, 70])
    sharing = torch.tensor([1, 1, 2, 2, 3, 1, 4, 1, 1]).double()
    before = torch.randn(9, 3, generator=source, dtype=torch.float64)
    center, diagonal, *spread = torch.tensor([[3, 1, 0.6], [1, 2, 1], [1, 1, 1], [0.2, 0.05, 0.02]]).double()
    variances = torch.stack(spread)
    known = RatingHyperparameters(center, torch.diag(diagonal), variances, torch.zeros(3, 5).double())
    table, found = solve_items(sums, sharing, known, before)
    counts = (sums[:, -1] / sharing / 4).numpy()  # a code has the mean square 4
    np.testing.assert_allclose(table[:, -1], counts)
    line = np.column_stack([np.ones(9), np.log(np.maximum(counts, 1))])
    weight = np.sqrt(np.where(counts > 0, sharing.numpy(), 0))[:, None]
    expected = line @ np.linalg.lstsq(weight * line, weight * before.numpy(), rcond=None)[0]
    shrinkage = np.diag((center[2] / variances[1]).numpy())
    for row, many in enumerate(sharing.tolist()):
        matrix = float(sums[row, -1]) / 2 * np.eye(3) + many * shrinkage
        solution = np.linalg.solve(matrix, sums[row, :3].numpy() + many * shrinkage @ expected[row])
        np.testing.assert_allclose(table[row, :3], solution, rtol=1e-9)
    rows, variance = table[:, :3].numpy(), variances[1].numpy()
    off = (rows - line @ np.linalg.lstsq(weight * line, weight * rows, rcond=None)[0]) ** 2
    covariance_of_items = 1 / (counts[:, None] * diagonal.numpy() / float(center[2]) + 1 / variance)
    slow, quick = (
        np.average(of, axis=0, weights=weight[:, 0] ** 2)
        for of in (off + covariance_of_items, 1 - covariance_of_items / variance)
    )
    quick = np.average(off, axis=0, weights=weight[:, 0] ** 2) / quick
    np.testing.assert_allclose(found, np.clip(np.where([1, 0, 0], quick, slow**0.8 * quick**0.2), 1e-3, 1))


def test_a_user_without_ratings_adds_nothing() -> None:
    known = RatingHyperparameters(torch.tensor([0.0, 1.0, 0.5]), torch.eye(3), torch.ones(2, 3), torch.ones(3, 5))
    posteriors = UserPosteriors.of(torch.ones(2, 4), torch.ones(2), torch.tensor([0, 0]), 2, known)
    sums = posteriors.sums(torch.ones(2))
    assert sums[0].all()
    assert not sums[1].any()


def test_sums_at_other_rows_are_corrected_to_those_of_the_largest_clients() -> None:
    """Of items that everybody has rated, and users of as many ratings each, K is the mean of all posteriors' codes."""
    source, users, items = torch.Generator().manual_seed(3), 40, 5
    rows, covariances, table, others = (
        torch.randn(*shape, generator=source, dtype=torch.float64)
        for shape in ((users, 3), (users, 3, 3), (items, 4), (items, 4))
    )
    covariances = covariances @ covariances.mT
    posteriors = UserPosteriors(rows, covariances, rows, torch.zeros_like(covariances), torch.full((users,), items))
    owner, item = torch.arange(users * items) // items, torch.arange(users * items) % items
    targets = torch.randn(users * items, generator=source, dtype=torch.float64)
    at_table, at_others = (
        torch.zeros(items, 4).double().index_add_(0, item, posteriors.row_sums(of[item], targets, owner)[0])
        for of in (table, others)
    )
    codes = posteriors.sums(torch.zeros(users).double())[:, :9].sum(0).view(3, 3)
    corrections = row_correction(others[:, :3], table[:, :3], at_others[:, 3], codes / (users * items))
    assert not torch.allclose(at_others, at_table, atol=1)
    torch.testing.assert_close(at_others[:, :3] + corrections, at_table[:, :3])
    torch.testing.assert_close(at_others[:, 3], at_table[:, 3])


def test_the_server_corrects_sums_of_small_clients_alone() -> None:
    data = tiny_data(7, 20, 40, ratings=True)
    for changes, moves in (({"capacities": "1x-4x"}, True), ({"capacities": "4x"}, False), ({"streamed": True}, False)):
        federation, state = make_federation(
            data, chosen(**{"capacities": "1x-4x", "clients_per_round": None} | changes)
        )
        state = after_rounds(federation, state, 3, batched)
        plan, algorithm = federation.plan, federation.plan.algorithm
        assert isinstance(algorithm, BayesianRatings)
        largest = algorithm.update_space(chain_of(plan, 0)[-1])
        full, weights = state.full["item.weight"], state.algorithm_state["weights"]
        total = state.algorithm_state["sums"]["item.weight"].view(-1, 3)[:, -1]
        torch.testing.assert_close(sum(weights.values()), total)
        corrections = algorithm._corrections(
            plan, largest, full, weights, RatingHyperparameters.of(state.full).metric.double()
        )
        assert bool(corrections.any()) == moves
        assert not corrections[:, -1].any()


def test_clients_of_every_size_update_every_row_in_turn() -> None:
    small, large = sorted(
        nested_subspaces(300, ["2x", "10x"], mapping="ranked", chunk=3, sign=False, tail_share=0.5),
        key=lambda subspace: subspace.size,
    )
    rounds = -(-large.size // small.size)
    rows = torch.cat([Window(large, small, number, 3).rows for number in range(rounds)])
    assert set(rows.tolist()) == set(range(large.size // 3))
    items = torch.arange(100)
    window = Window(large, small, 1, 3)
    place = window.places(items)
    inside = place >= 0
    assert torch.equal(window.rows[place[inside]], rows_of(large, items[inside], 3))


def test_a_client_caches_the_full_rows_of_its_own_items_as_they_are_streamed() -> None:
    wanted = chosen(capacities="4x", clients_per_round=None, streamed=True)
    federation, state = make_federation(tiny_data(7, 20, 40, ratings=True), wanted)
    items = federation.clients.train.items
    passed = torch.full((len(items), 4), 0.0)
    for _ in range(6):
        before, number = state.full["item.weight"].view(40, 3), state.round_number
        (held,) = federation.plan.assignments(number)
        assert held.projections is not None
        subspace = subspace_of(held.projections["item.weight"])
        assert subspace.size < 120
        whole = Subspace(120, 120)
        here = Window(whole, subspace, number, 3).places(items) >= 0
        passed[here] = torch.cat([before[items[here]], torch.ones(int(here.sum()), 1)], dim=1)
        state = after_rounds(federation, state, backend=batched)
        torch.testing.assert_close(federation.clients.local_state[CACHE], passed)
    assert passed[:, -1].all()  # in six rounds all rows have passed a device that holds a quarter of them


def test_streamed_rows_free_the_server_of_what_clients_hold() -> None:
    data = planted()
    wanted: dict[str, Any] = {"algorithm": "ratings", "factors": 4, "rounds": 120, "group_similar": False}
    wanted |= {"clients_per_round": None, "capacities": "8x-16x", "reference_factors": 3}
    folded, streamed = (simulate(make_settings(**wanted | {"streamed": way}), data=data) for way in (False, True))
    assert streamed.quality < 0.5 * folded.quality
    assert streamed.groups[0].bytes_held == folded.groups[0].bytes_held
    assert streamed.groups[0].bytes_up == folded.groups[0].bytes_up
    assert streamed.groups[0].bytes_down == folded.groups[0].bytes_down + 4 * (folded.groups[0].bytes_held // 4 - 33)


def test_similar_items_share_rows_and_nothing_else_changes() -> None:
    data = tiny_data(6, 40, 60, ratings=True)
    wanted = chosen(capacities="2x-6x", group_similar=True)
    found = number_items(data, wanted)
    federation, _ = make_federation(data, wanted)
    spaces = sorted(
        (subspace_of(held.projections["item.weight"]) for held in federation.plan.assignments(0) if held.projections),
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
        "algorithm": "ratings",
        "factors": 4,
        "rounds": 80,
        "clients_per_round": 20,
        "group_similar": False,
    }
    result = simulate(make_settings(**wanted | {"capacities": "8x-16x"}), data=data)
    assert result.metric == "MSE"
    assert result.quality < 0.1 * float(scores.var())
    federation, _ = make_federation(data, result.settings)
    plan = federation.plan
    predict = PredictsRatings.of(plan.algorithm).predictor(
        plan, result.state.full, plan.assignments(0), Clients(plan, train, {})
    )
    assert predict(torch.tensor([0, 1]), torch.tensor([2, 3])).shape == (2,)


@pytest.mark.parametrize(
    "changes",
    [{"model": "neumf"}, {"weighting": "equal"}, {"factors": 2}, {"ridge": 1.0}, {"top": 5},
     {"mapping": "chunk", "group_similar": True}, {"algorithm": "closed_form", "group_similar": True},
     {"algorithm": "closed_form", "streamed": True}],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        make_settings(**{"algorithm": "ratings"} | changes)
