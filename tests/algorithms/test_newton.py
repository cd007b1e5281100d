"""The server's Newton step is alternating least squares where its Hessian is exact, in every subspace."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fairfold
from fairfold.algorithms.closed_form import POPULATION
from fairfold.algorithms.newton import GRAM, newton_step
from fairfold.backends.batched import batched
from fairfold.config import Settings
from fairfold.config.files import load_settings
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidSettings
from fairfold.federation.algorithm import COUNTS
from fairfold.federation.federation import Federation
from fairfold.federation.plan import Plan
from fairfold.federation.round import sequential
from fairfold.federation.updates import Aggregate, PublicStatistics, State
from fairfold.subspace.projection import Hashed
from tests.support.federations import after_rounds, make_federation, tiny_data, tiny_settings
from tests.support.parity import precision

ITEMS = "item.weight"
ITEM_RIDGE = 0.3
USERS, FACTORS = 9, 3


def newton(**changes: Any) -> Settings:
    """Settings of Newton steps; whole rows share a slot."""
    given = {
        "algorithm": "closed_form", "aggregation": "delta", "server_optimizer": "newton", "server_lr": 1.0,
        "item_ridge": ITEM_RIDGE, "unobserved_weight": 1.0, "weighting": "equal", "clients_per_round": None,
        "chunk": FACTORS, "sign": False, "factors": FACTORS, "capacities": "1x", "local_lr": 0.5,
    }  # fmt: skip
    return tiny_settings(**given | changes)


def dense(federation: Federation) -> Tensor:
    """Users × items, 1 where a user has an item."""
    train = federation.interactions.train
    found = torch.zeros(train.num_users, train.num_items)
    found[train.users, train.items] = 1
    return found


def users_of(federation: Federation) -> Tensor:
    """The users' vectors after a round."""
    (vectors,) = federation.clients.local_state.values()
    return vectors


def ridge_of(federation: Federation) -> float:
    """The ridge of an item's row where everything weighs 1."""
    found = dense(federation)
    some = found[:, found.sum(0) > 0]
    users, items = some.shape
    return float(ITEM_RIDGE * some.mean() * (users**0.5 + items**0.5) ** 2)


def least_squares(federation: Federation) -> Tensor:
    """Rows of items that fit all users' histories best, with a ridge."""
    users, targets = users_of(federation), dense(federation)
    matrix = users.T @ users + ridge_of(federation) * torch.eye(users.shape[1])
    found: Tensor = torch.linalg.solve(matrix, users.T @ targets).T
    return found


@pytest.mark.parametrize(("density", "weight"), [(0.05, 1.0), (0.05, 0.1), (0.03, 0.5)])
def test_the_ridge_of_items_is_the_squared_norm_of_noise(density: float, weight: float) -> None:
    """Weighted residuals of interactions without a pattern, of the constant that fits them best."""
    users, items, support = 600, 400, 3
    source = torch.Generator().manual_seed(0)
    has = (torch.rand(users, items, generator=source) < density).double()
    weights = weight + (1 - weight) * has
    residuals = weights * (has - (weights * has).sum() / weights.sum())
    rare = torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64)  # these have no row of their own
    settings = newton(unobserved_weight=weight, item_ridge=0.7, mapping="ranked", popularity="counts", support=support)
    known = {COUNTS: torch.cat([has.sum(0), rare]), POPULATION: torch.tensor([users, 0.0, 0.0])}
    plan = Plan.of(settings, PublicStatistics(items + len(rare), users, known))
    noise = float(torch.linalg.matrix_norm(residuals, 2)) ** 2
    assert plan.algorithm.row_ridge(plan) == pytest.approx(0.7 * noise, rel=0.12)  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", ["newton", "adam"])
def test_the_weight_of_other_items_is_the_root_of_the_density_or_the_number_given(optimizer: str) -> None:
    data, changes = (
        tiny_data(2, USERS),
        {"clients_per_round": None, "aggregation": "delta", "server_optimizer": optimizer},
    )
    derived, state = make_federation(data, tiny_settings(algorithm="closed_form", unobserved_weight=None, **changes))
    found = dense(derived)
    weight = derived.plan.algorithm.others  # type: ignore[attr-defined]
    assert weight == pytest.approx(float(found[:, found.sum(0) > 0].mean() ** 0.5))
    number, same = make_federation(data, tiny_settings(algorithm="closed_form", unobserved_weight=weight, **changes))
    assert after_rounds(derived, state, 2).full[ITEMS].equal(after_rounds(number, same, 2).full[ITEMS])
    sent, known = derived.plan.resolved_settings.plain(), number.plan.resolved_settings.plain()
    assert sent == known  # what devices and exported models have
    assert derived.plan.settings.plain()["algorithm"]["unobserved_weight"] is None  # a run is resumed as it was given


def test_the_weight_of_other_items_is_at_least_a_tenth() -> None:
    known = {COUNTS: torch.full((50,), 1.0), POPULATION: torch.tensor([1000.0, 0.0, 0.0])}
    plan = Plan.of(newton(unobserved_weight=None), PublicStatistics(50, 1000, known))  # a density of 0.001
    assert plan.algorithm.others == 0.1  # type: ignore[attr-defined]


def test_one_step_of_everybody_is_the_least_squares_solution() -> None:
    with precision():
        federation, state = make_federation(tiny_data(2, USERS), newton())
        after = after_rounds(federation, state)
        expected = least_squares(federation)
        torch.testing.assert_close(after.full[ITEMS].view_as(expected), expected, rtol=1e-6, atol=1e-8)


def test_rounds_lower_the_loss_until_it_stays() -> None:
    """Alternating least squares: users, then items, each exact."""
    with precision():
        federation, state = make_federation(tiny_data(2, USERS), newton())
        ridge, losses = 1.0, list[float]()  # the default ridge of users
        for _ in range(60):
            state = after_rounds(federation, state)
            rows, users = state.full[ITEMS].view(-1, FACTORS), users_of(federation)
            error = (dense(federation) - users @ rows.T).square().sum()
            losses.append(float(error + ridge * users.square().sum() + ridge_of(federation) * rows.square().sum()))
        assert all(later <= earlier + 1e-6 for earlier, later in pairwise(losses))
        assert losses[-2] - losses[-1] < 1e-3 * losses[0]


@pytest.mark.parametrize("mapping", ["chunk", "ranked"])
def test_a_step_in_a_subspace_is_the_solution_for_its_slots(mapping: str) -> None:
    """Of whole rows in a slot: their mean."""
    with precision():
        federation, state = make_federation(tiny_data(2, USERS, 16), newton(mapping=mapping, capacities="4x"))
        (assignment,) = federation.plan.assignments(0)
        held = (assignment.projections or {})[ITEMS]
        assert isinstance(held, Hashed)
        assert not held.subspace.is_full
        after = held.subspace.reduce(after_rounds(federation, state).full[ITEMS])
        whole = least_squares(federation).reshape(-1)
        torch.testing.assert_close(after, held.subspace.reduce(whole), rtol=1e-6, atol=1e-8)


def test_the_hessian_of_items_that_some_users_have() -> None:
    """Where users with and without an item are alike, w + (1 − w)·c is exact for any w."""
    with precision():
        source = torch.Generator().manual_seed(1)
        users = torch.randn(5, FACTORS, generator=source).repeat(2, 1)  # five have every item, five like them none
        has = torch.cat([torch.ones(5, 4), torch.zeros(5, 4)])
        rows, weight = torch.randn(4, FACTORS, generator=source), 0.3
        weights = weight + (1 - weight) * has
        change = (weights * (has - users @ rows.T)).T @ users / 10
        step = newton_step(rows, change, users.T @ users / 10, has.mean(0), weight, ITEM_RIDGE / 10)
        for item in range(4):
            matrix = (users * weights[:, item : item + 1]).T @ users + ITEM_RIDGE * torch.eye(FACTORS)
            expected = torch.linalg.solve(matrix, users.T @ (weights * has)[:, item])
            torch.testing.assert_close((rows + step)[item], expected, rtol=1e-6, atol=1e-8)


def test_a_step_of_some_clients_is_about_all() -> None:
    """The ridge is a part of every client's loss, in any cohort."""
    with precision():
        federation, state = make_federation(tiny_data(2, USERS), newton(clients_per_round=4))
        cohort = federation.sampler.cohort(0).tolist()
        after = after_rounds(federation, state).full[ITEMS]
        users, targets = users_of(federation)[cohort], dense(federation)[cohort]
        matrix = users.T @ users + ridge_of(federation) * len(cohort) / USERS * torch.eye(FACTORS)
        expected = torch.linalg.solve(matrix, users.T @ targets).T
        torch.testing.assert_close(after.view_as(expected), expected, rtol=1e-6, atol=1e-8)


def test_rounds_of_few_clients_are_the_least_squares_of_what_all_of_them_sent() -> None:
    """Gram matrices and right sides of the rounds, each fading by the share of clients of the rounds after it."""
    share, rounds = 4 / USERS, 5
    with precision():
        federation, state = make_federation(tiny_data(2, USERS), newton(clients_per_round=4))
        gram, right, seen = torch.zeros(FACTORS, FACTORS), torch.zeros(federation.interactions.num_items, FACTORS), 0.0
        for number in range(rounds):
            cohort = federation.sampler.cohort(number).tolist()
            state = after_rounds(federation, state)
            users, targets = users_of(federation)[cohort], dense(federation)[cohort]
            gram = (1 - share) * gram + users.T @ users / USERS
            right = (1 - share) * right + targets.T @ users / USERS
            seen = (1 - share) * seen + share
        matrix = gram / seen + ridge_of(federation) / USERS * torch.eye(FACTORS)
        expected = torch.linalg.solve(matrix, (right / seen).T).T
        torch.testing.assert_close(state.full[ITEMS].view_as(expected), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("weighting", ["equal", "data"])
def test_all_clients_in_name_or_number_are_the_same_bit_for_bit(weighting: str) -> None:
    found = []
    for clients in (None, USERS):
        federation, state = make_federation(tiny_data(2, USERS), newton(clients_per_round=clients, weighting=weighting))
        found.append(after_rounds(federation, state, 3).full[ITEMS])
    assert found[0].equal(found[1])


@pytest.mark.parametrize("clients", [5, 20])
def test_few_clients_of_the_recipe_learn_far_more_than_popularity(clients: int) -> None:
    """Five in each of 30 rounds are 150 answers of 200 users."""
    data = SyntheticDataset(users=200, items=400).dataset()
    settings = load_settings(None, {"data.name": "x", "fleet.clients_per_round": clients, "run.rounds": 30}, "fair")
    result = fairfold.simulate(settings, data=data)
    assert result.quality > 1.25 * result.baselines["popularity"]


def test_a_client_of_large_weight_counts_for_more_of_all() -> None:
    federation, state = make_federation(tiny_data(2, USERS), newton(clients_per_round=4, weighting="data"))
    cohort = federation.sampler.cohort(0).tolist()
    after = after_rounds(federation, state)
    seen = float(after.algorithm_state["newton"]["seen"])
    assert seen == pytest.approx(float(dense(federation)[cohort].sum() / dense(federation).sum()))


def test_momentum_goes_on_from_where_each_step_ends() -> None:
    """Nesterov's: a step from y ends at v, and the next one begins at v + m·(v − the end of the step before)."""
    with precision():
        momentum, data = 0.6, tiny_data(2, USERS)
        federation, state = make_federation(data, newton(server_momentum=momentum, server_lr=0.4))
        plain, _ = make_federation(data, newton(server_lr=0.4))
        ends = [state.full[ITEMS]]
        for _ in range(3):
            ends.append(after_rounds(plain, state).full[ITEMS])
            state = after_rounds(federation, state)
            torch.testing.assert_close(state.full[ITEMS], ends[-1] + momentum * (ends[-1] - ends[-2]))


def test_few_clients_take_at_once_the_step_that_momentum_would_come_to() -> None:
    found = []
    for momentum, server_lr in ((0.0, 1.0), (0.75, 0.25)):
        changes = {"clients_per_round": 4, "server_momentum": momentum, "server_lr": server_lr}
        federation, state = make_federation(tiny_data(2, USERS), newton(**changes))
        found.append(after_rounds(federation, state, 3).full[ITEMS])
    assert found[0].equal(found[1])


def test_no_updates_leave_the_model() -> None:
    federation, state = make_federation(tiny_data(2, USERS), newton())
    after = federation.plan.algorithm.server_update(federation.plan, state, Aggregate())
    assert after.round_number == state.round_number + 1
    assert after.full[ITEMS].equal(state.full[ITEMS])


@pytest.mark.parametrize("capacities", ["1x", "1x-4x"])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_many_clients_at_once_are_one_by_one(capacities: str, weight: float) -> None:
    with precision():
        found: list[State] = []
        for backend in (sequential, batched):
            settings = newton(capacities=capacities, unobserved_weight=weight)
            federation, state = make_federation(tiny_data(2, USERS, 16), settings)
            found.append(after_rounds(federation, state, 3, backend))
        torch.testing.assert_close(found[0].full[ITEMS], found[1].full[ITEMS], rtol=1e-9, atol=1e-11)


def test_what_clients_send_beside_the_change() -> None:
    federation, state = make_federation(tiny_data(2, USERS), newton())
    plan, (task,) = federation.plan, federation.plan.algorithm.tasks(federation.plan, state, [0])
    update, _ = plan.algorithm.client_update(plan, task, federation.clients.client(0, 0))
    assert {name: len(total) for name, total in update.sums.items()} == plan.algorithm.update_shapes(plan, task)
    assert len(update.sums[GRAM]) == FACTORS**2
    down, up = plan.algorithm.traffic(plan, 0)
    assert up - down == FACTORS**2 * 4
    assert plan.public.statistics[POPULATION].tolist() == [USERS, 0, 0]
    assert plan.public.statistics[COUNTS].tolist() == dense(federation).sum(0).tolist()


def test_other_optimizers_ask_for_nothing_more() -> None:
    assert not tiny_settings(algorithm="closed_form", aggregation="delta").algorithm.statistics(newton())
    with pytest.raises(InvalidSettings, match="item_ridge"):
        tiny_settings(algorithm="closed_form", aggregation="delta", server_optimizer="adam", item_ridge=1.0)
